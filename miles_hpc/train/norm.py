"""RMSNorm as a megatron-core module."""

from typing import Any

import torch
from torch import Tensor

from miles_hpc.kernels.norm import rms_norm


class RMSNorm(torch.nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (arXiv 1910.07467).

    megatron's own torch norm refuses sequence parallelism.

    Args:
        config: megatron-core's `TransformerConfig`.
        hidden_size: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        where = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=where))
        # Read by megatron when it sums gradients over tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden], in the type of the weights."""
        return rms_norm(x, self.weight, self.eps)
