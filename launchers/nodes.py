"""Nodes of an allocation: which there are, and which of them an attempt uses."""

import os
import re
from collections.abc import Collection

from miles_hpc.config import Config

Pools = list[list[str]]
"""Nodes of training and of rollout, or of both together in a homogeneous job; empty on this machine without Slurm."""


def expanded(node_list: str) -> list[str]:
    """Names in a list as Slurm writes it, such as `t[0-1,07],r0`. Not asked of scontrol, which batch hosts may lack."""
    names: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", node_list):
        before, bracket, rest = word.partition("[")
        inside, _, after = rest.partition("]")
        if not bracket:
            names.append(word)
            continue
        numbers = [number for part in inside.split(",") for number in _numbers(part)]
        names += [before + number + tail for number in numbers for tail in (expanded(after) if after else [""])]
    return names


def _numbers(part: str) -> list[str]:
    """`07-10` or `3`, with its leading zeros."""
    first, dash, last = part.partition("-")
    return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)] if dash else [part]


def allocated() -> Pools:
    """The nodes of this job, from Slurm's variables."""
    components = [os.environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}", "") for i in (0, 1)]
    lists = components if all(components) else [os.environ.get("SLURM_JOB_NODELIST", "")]
    return [expanded(text) for text in lists if text]


def hosts(pools: Pools, config: Config, avoid: Collection[str] = ()) -> list[str] | None:
    """Node of every rank without those to avoid, None where too few are left: training on the first nodes, rollout on the rest;
    colocated, both on all.
    """
    train, rollout = config.slurm.train, config.rollout_component
    if not pools:
        return ["localhost"] * (train.ranks + rollout.ranks)
    good = [[node for node in pool if node not in avoid] for pool in pools]
    first, rest = good[0], good[-1]
    if len(pools) == 1 and not config.colocated:
        rest = rest[train.nodes :]
    if len(first) < train.nodes or len(rest) < rollout.nodes:
        return None
    ranks = [node for node in first[: train.nodes] for _ in range(train.ranks_per_node)]
    return ranks + [node for node in rest[: rollout.nodes] for _ in range(rollout.ranks_per_node)]
