"""The experts of a layer as one autograd step.

megatron's `SequentialMLP` runs a whole MLP per expert, forward and backward; for small experts most is bookkeeping. Here
only the matrix products are per expert (on a GPU grouped in one call), everything else is done once for all tokens.
Parameters keep their names and places.
"""

from typing import Any

from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.autograd import Function

from miles_hpc.kernels import activation
from miles_hpc.kernels.moe import outer, products


class Experts(SequentialMLP):
    """SwiGLU experts without biases, tokens sorted by expert."""

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Routed tokens through their experts, weighted by the router.

        Args:
            hidden: [tokens, hidden size].
            tokens_per_expert: [local experts] int64.
            probs: [tokens] float32.

        Returns:
            [tokens, hidden size], and no bias.
        """
        up = [expert.linear_fc1.weight for expert in self.local_experts]
        down = [expert.linear_fc2.weight for expert in self.local_experts]
        ends = tokens_per_expert.to(hidden.device).cumsum(0).int()
        return _Experts.apply(hidden, probs, ends, *up, *down), None


class _Experts(Function):
    """`(silu(x G') * (x U') * p) D'` per expert, where fc1 = [G; U] and fc2 = D; element-wise operations in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        fc1, fc2 = weights[: len(ends)], weights[len(ends) :]
        h = products(x, fc1, ends, transpose=True)
        a = activation.forward(h, probs[:, None])
        ctx.save_for_backward(x, probs, ends, h, a, *weights)
        return products(a, fc2, ends, transpose=True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, probs, ends, h, a, *weights = ctx.saved_tensors
        fc1, fc2 = weights[: len(ends)], weights[len(ends) :]
        dy = dy.contiguous()
        da = products(dy, fc2, ends)
        dh, dprobs = activation.backward(h, da, probs[:, None])
        dx = products(dh, fc1, ends)
        return dx, dprobs[:, 0].to(probs.dtype), None, *outer(dh, x, ends), *outer(dy, a, ends)
