"""What makes the value of a row independent of the rows that travel with it: fixed shapes and fixed orders of addition.

BLAS libraries choose another kernel for few rows, and another order of addition with it: filled up to ROWS rows, MKL gave
every row the same bits at any number of rows. Nobody promises that, so `selftest` checks it on the shapes of the run.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 32
"""On a CPU every matrix product has a multiple of this many rows."""


def pad_rows(x: Tensor) -> Tensor:
    """[t, ...] filled up with zero rows to a multiple of ROWS."""
    missing = -len(x) % ROWS
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept as 1, by a balanced tree of elementwise additions: the same order for any shape."""
    if x.is_cuda:
        from miles_hpc.kernels import fused

        return fused.row_sum(x)
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = F.pad(x, (0, 1))
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x
