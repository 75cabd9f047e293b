"""Queries, keys and values of a fused projection, normalised and rotated, as the engine needs them: without gradient."""

from torch import Tensor

from miles_hpc.kernels.norm import rms_norm
from miles_hpc.kernels.rope import rotate


def reference(
    qkv: Tensor, weights: Tensor | None, cos: Tensor, sin: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What the trainer computes in four calls.

    Args:
        qkv: [t, heads + 2 * groups, head_dim].
        weights: [2, head_dim], of the norms of queries and keys; None: there are none.
        cos: [t, 1, head_dim] float32.
        sin: [t, 1, head_dim] float32, see `rope.rotate`.
        groups: heads of keys, and of values.
        eps: of the norms.

    Returns:
        [t, heads, head_dim], [t, groups, head_dim] twice.
    """
    q, k, v = qkv.split([qkv.shape[1] - 2 * groups, groups, groups], 1)
    if weights is not None:
        q, k = rms_norm(q, weights[0], eps), rms_norm(k, weights[1], eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


def heads(
    qkv: Tensor, weights: Tensor | None, cos: Tensor, sin: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference`, bit for bit (`selftest` checks it); one kernel on a GPU."""
    if not qkv.is_cuda:
        return reference(qkv, weights, cos, sin, groups, eps)
    from miles_hpc.kernels import fused

    q, k, v = fused.heads(qkv, weights, cos, sin, groups, eps)
    return q, k, v
