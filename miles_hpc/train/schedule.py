"""Which rank trains which sample, in which optimizer step and in which micro-batch.

Pure functions of the whole step's lengths: every rank computes the plan of all ranks without talking to them, so mini-batches
are the same sets of samples for any number of ranks.
"""

import numpy as np


def mini_batches(indices: np.ndarray, count: int, seed: int, step: int) -> list[np.ndarray]:
    """Split samples into `count` shuffled, equally large sets; the shuffle mixes prompts and depends on (seed, step) only.

    Args:
        indices: [n] int64.

    Returns:
        `count` ascending arrays; sizes differ by at most one.
    """
    order = np.random.default_rng([seed, step]).permutation(indices)
    return [np.sort(order[k::count]) for k in range(count)]


def balanced(indices: np.ndarray, lengths: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Split samples over ranks: longest first, each to the rank with the fewest tokens so far (ties: the lowest rank).

    Args:
        indices: [n] int64.
        lengths: tokens of every sample of the step.

    Returns:
        One ascending array per rank.
    """
    load = np.zeros(ranks, np.int64)
    share: list[list[int]] = [[] for _ in range(ranks)]
    for i in indices[np.argsort(-lengths[indices], kind="stable")]:
        rank = int(load.argmin())
        share[rank].append(int(i))
        load[rank] += lengths[i]
    return [np.array(sorted(s), np.int64) for s in share]


def micro_batches(indices: np.ndarray, lengths: np.ndarray, limit: int) -> list[np.ndarray]:
    """Cut one rank's samples, longest first, into micro-batches of at most `limit` tokens.

    Neighbours have similar lengths, which keeps the attention's padded grid tight. A sample longer than `limit` is alone.

    Args:
        indices: [n] int64.
        lengths: tokens of every sample of the step.
        limit: tokens per micro-batch.
    """
    order = indices[np.argsort(-lengths[indices], kind="stable")]
    starts, used = [0], 0
    for i, length in enumerate(lengths[order]):
        if used and used + length > limit:
            starts.append(i)
            used = 0
        used += length
    return np.split(order, starts[1:]) if len(order) else []


def rank_micro_batches(shares: list[np.ndarray], lengths: np.ndarray, limit: int, rank: int) -> list[np.ndarray]:
    """This rank's micro-batches, filled up with empty ones so that all ranks have the same number.

    Exchanges between experts are collective: a rank without samples still takes part in every forward.
    """
    batches = [micro_batches(share, lengths, limit) for share in shares]
    own = batches[rank]
    return own + [np.zeros(0, np.int64)] * (max(map(len, batches)) - len(own))
