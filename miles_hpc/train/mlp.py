"""The dense MLP as a megatron-core module."""

from typing import Any

from megatron.core.transformer.mlp import MLP
from torch import Tensor

from miles_hpc.kernels.activation import swiglu


class SwiGLU(MLP):
    """megatron's, with the activation in one step."""

    def forward(self, hidden: Tensor, *unused: Any, **more: Any) -> tuple[Tensor, None]:
        """[t, 1, hidden] -> [t, 1, hidden], and no bias."""
        return self.linear_fc2(swiglu(self.linear_fc1(hidden)[0]))[0], None
