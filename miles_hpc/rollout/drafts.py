"""Answers that an interruption left unfinished, kept beside the shards for the next attempt (`rollout.unfinished`)."""

from collections.abc import Sequence

import numpy as np

from miles_hpc.errors import SampleError
from miles_hpc.paths import RunPaths
from miles_hpc.rollout.request import Draft, Output
from miles_hpc.samples import store
from miles_hpc.samples.schema import BEGUN, STOPPED, TRUNCATED, Samples, flat


def on_disk(paths: RunPaths, step: int) -> dict[tuple[int, int], Draft]:
    """What earlier attempts have left of `step`, by prompt id and sample index; of several drafts of an answer the longest."""
    found: dict[tuple[int, int], Draft] = {}
    for file in store.on_disk(paths, step, drafts=True):
        try:
            drafts = unpack(store.read(file, deadline=0))
        except SampleError as error:
            print(f"what was begun is generated again: {error}", flush=True)
            continue
        for draft in drafts:
            if draft.sample not in found or len(draft.output.tokens) > len(found[draft.sample].output.tokens):
                found[draft.sample] = draft
    return found


def pack(drafts: Sequence[Draft]) -> Samples:
    """As samples without a reward, in the same order; not for no drafts at all."""
    lengths = [len(draft.prompt) + len(draft.output.tokens) for draft in drafts]
    nothing = [""] * len(drafts)
    return Samples(
        prompt_ids=np.array([draft.sample[0] for draft in drafts], np.int64),
        sample_index=np.array([draft.sample[1] for draft in drafts], np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=flat([(d.prompt, d.output.tokens) for d in drafts], np.int32),
        loss_mask=flat([([0] * len(d.prompt), d.output.mask) for d in drafts], np.uint8),
        rollout_log_probs=flat([([0.0] * len(d.prompt), d.output.log_probs) for d in drafts], np.float32),
        weight_versions=flat([([-1] * len(d.prompt), d.versions) for d in drafts], np.int32),
        rewards=np.full(len(drafts), np.nan, np.float32),
        status=np.array([_status(draft.output) for draft in drafts], np.uint8),
        prompts=nothing,
        answers=nothing,
        labels=nothing,
        routing=_routing(drafts, lengths),
    )


def unpack(samples: Samples) -> list[Draft]:
    """What `pack` was given; log-probs as float32."""
    return [_draft(samples, i) for i in range(len(samples))]


def _draft(samples: Samples, i: int) -> Draft:
    start, end = samples.offsets[i : i + 2]
    begin = start + int(np.argmax(samples.loss_mask[start:end]))
    status = samples.status[i]
    output = Output(
        tokens=samples.tokens[begin:end].tolist(),
        log_probs=samples.rollout_log_probs[begin:end].tolist(),
        stopped=bool(status == STOPPED),
        routing=None if samples.routing is None or status == BEGUN else samples.routing[start:end],
        whole=bool(status != BEGUN),
    )
    sample = int(samples.prompt_ids[i]), int(samples.sample_index[i])
    return Draft(sample, samples.tokens[start:begin].tolist(), output, samples.weight_versions[begin:end].tolist())


def _status(output: Output) -> int:
    if not output.whole:
        return BEGUN
    return STOPPED if output.stopped else TRUNCATED


def _routing(drafts: Sequence[Draft], lengths: list[int]) -> np.ndarray | None:
    """Zeros for answers that were interrupted: whoever goes on computes their beginnings again."""
    one = next((draft.output.routing for draft in drafts if draft.output.routing is not None), None)
    if one is None:
        return None
    given = [draft.output.routing for draft in drafts]
    return np.concatenate(
        [np.zeros((n, *one.shape[1:]), one.dtype) if r is None else r for n, r in zip(lengths, given, strict=True)]
    )
