"""Routing replay (R3, arXiv 2510.11370): the trainer sends each token to the experts that the engine chose.

Probabilities come from the trainer's own logits over these experts, so the router keeps its gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from miles_hpc import device
from miles_hpc.errors import ModelError, SampleError
from miles_hpc.samples.schema import Samples
from miles_hpc.train.packing import Pack


class Replay(RouterReplay):
    """Of one router, where megatron-core asks for the experts of a forward or of a recomputation in the backward.

    megatron's own class enters a list of the whole process, which the reference policy would share, and knows no token without
    a record. A pack's backward follows its forward at once, so the recomputation finds the same experts here.
    """

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts
        """[2] float64, choices that differ from the engine's, and choices compared; shared by the routers."""
        self.counting = True
        self.ids: Tensor | None = None
        """[tokens, top_k] int64, the engine's choice; None: there is no record of this pack."""
        self.known: Tensor | None = None
        """[tokens, 1] bool, tokens of which there is a record."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores [tokens, top_k] and experts [tokens, top_k] int64 of each token of `scores` [tokens, experts]."""
        assert default_compute_topk
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.ids is None or self.known is None:
            return values, own
        self.compare(own)
        ids = torch.where(self.known, self.ids, own)
        return scores.gather(1, ids), ids

    def compare(self, own: Tensor) -> None:
        """Count the tokens whose `own` experts [tokens, top_k] are not, as a set, the engine's."""
        if self.ids is None or self.known is None or not self.counting:
            return
        same = (own[:, :, None] == self.ids[:, None, :]).any(-1).all(-1, keepdim=True)
        self.counts += torch.stack([(self.known & ~same).sum(), self.known.sum()])


class Replays:
    """Of all routers of a model.

    Args:
        module: the model; its routers ask from now on.
        tensor: tensor-parallel group; sequence parallelism gives each of its ranks a piece of the pack.

    Raises:
        ModelError: it has no routers.
    """

    def __init__(self, module: torch.nn.Module, tensor: dist.ProcessGroup) -> None:
        self.tensor = tensor
        self.counts = torch.zeros(2, dtype=torch.float64, device=device.device())
        routers = [m for m in module.modules() if isinstance(m, TopKRouter)]
        if not routers:
            hint = "set train.routing_replay = false"
            raise ModelError("train.routing_replay = true, but the model has no experts", next_step=hint)
        self.layers = [Replay(self.counts) for _ in routers]
        self.top_k, self.experts = routers[0].config.moe_router_topk, routers[0].config.num_moe_experts
        for router, replay in zip(routers, self.layers, strict=True):
            router.router_replay = replay

    def begin(self, samples: Samples) -> None:
        """Count the choices of a step from now on.

        Raises:
            SampleError: the samples have no record, or one of another model.
        """
        wanted, found = (len(self.layers), self.top_k), samples.routing
        if found is None or found.shape[1:] != wanted or found.max(initial=0) >= self.experts:
            there = "there is none" if found is None else f"it has {found.shape[1:]}, up to expert {found.max(initial=0)}"
            raise SampleError(
                f"train.routing_replay needs a record of {wanted[0]} layers x {wanted[1]} of {self.experts} experts; {there}",
                next_step="remove the step's folder in samples/, then miles-submit resume: it is generated again",
            )
        self.counts.zero_()
        self.count(on=True)

    def load(self, pack: Pack) -> None:
        """Have the experts of a pack ready for its forward and backward."""
        routing = pack.routing
        if routing is not None:
            routing = routing.chunk(self.tensor.size())[self.tensor.rank()].long()
        known = None if routing is None else routing.flatten(1).any(1, keepdim=True)
        for layer, replay in enumerate(self.layers):
            replay.ids, replay.known = None if routing is None else routing[:, layer], known

    def count(self, on: bool) -> None:
        """Compare the choices of the following forwards, or not."""
        for replay in self.layers:
            replay.counting = on

    def mismatch(self) -> float:
        """Share of (token, layer) pairs whose experts differ from the engine's, since `begin`; collective."""
        counts = self.counts.clone()
        dist.all_reduce(counts)
        different, compared = counts.tolist()
        return different / max(1.0, compared)
