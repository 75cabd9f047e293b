"""The rollout side of a weight sync: follows the trainer, compares digests, and outlives the engine."""

from collections.abc import Mapping

from miles_hpc.errors import DeadlineExceeded, EngineDied, EngineError
from miles_hpc.fused import different
from miles_hpc.group import group_name
from miles_hpc.heartbeat import Heartbeat
from miles_hpc.rollout.engine import EngineHost
from miles_hpc.rollout.help import Help
from miles_hpc.rollout.request import Output, Request
from miles_hpc.rollout.restarts import Restarts
from miles_hpc.round import ANSWER, WEIGHTS, Answer, Call, Complete, Confirmed, Joined, Load, Meeting, Order, Present, Trouble
from miles_hpc.sync import LOST, Lost
from miles_hpc.world import World

GRACE_SECONDS = 10.0
"""A healthy engine returns from a broken collective within so long after the trainer has left it; another is ended."""


class Receiver:
    """Args:
    workers: processes of the engine that join the weight group.
    backend: of that group.
    seconds: deadline of a wait for the trainer.
    """

    def __init__(
        self,
        world: World,
        engine: EngineHost,
        restarts: Restarts,
        workers: int,
        backend: str,
        heartbeat: Heartbeat,
        seconds: float,
    ) -> None:
        self.world, self.engine, self.restarts, self.heartbeat, self.seconds = world, engine, restarts, heartbeat, seconds
        self.workers, self.backend = workers, backend
        self.help = Help(world, engine)
        self.figures: dict[str, float] = {}
        self.version = -1
        """Of the weights in the engine that were compared by digest; -1: those it started with."""
        self._generation: int | None = None
        self._confirmed = self._failed = 0
        """The last round that ended well here, and the last that did not."""
        self._held: list[dict[str, str]] = []
        """Digests of what the engine took last, by worker; none of an engine that has ended since."""

    def receive(self, version: int) -> None:
        """Take weights until `version` or a later one is in the engine."""
        self.heartbeat.enter("sync")
        while self.version < version:
            self._take()

    def recover(self, error: EngineDied | DeadlineExceeded, requests: Mapping[int, Request]) -> dict[int, Output]:
        """After the engine's end in the middle of its work: a new engine with the newest weights.

        Args:
            requests: those without an answer, by key.

        Returns:
            By key: answers of other engines that had nothing to do meanwhile and held the weights that are in this one now.
        """
        version = self.version
        self.help.ask(version, requests)
        self._again(error)
        answers = self.help.answers()
        self.world.send(Lost(self.world.rank, self._confirmed), self._lead, LOST, self.seconds, "the trainer to hear of a loss")
        self._take()
        return answers if self.version == version else {}

    def leave(self) -> float:
        """After a generation: seconds it took the engine to leave its GPUs to others; here it has them to itself."""
        return 0.0

    def close(self) -> None:
        """Leave the group; the engine lives on."""
        self._leave()

    @property
    def _lead(self) -> int:
        return self.world.train[0]

    def _take(self) -> None:
        """Follow the trainer's orders until a version is confirmed."""
        confirmed = False
        while not confirmed:
            order = self.world.until(self._arrived, self.seconds, "weights from the trainer")
            confirmed = order.round != self._failed and self._obey(order)

    def _arrived(self) -> Order | None:
        """The next order. An engine that ends meanwhile is started again at once, not when it is needed; it helps others."""
        if self.engine.ended:
            self._again(EngineDied("the engine's host process ended while it had nothing to do"))
        try:
            self.help.give(self.version)
        except (EngineDied, DeadlineExceeded) as error:
            self._again(error)
        return self.world.take(WEIGHTS, self._lead)

    def _obey(self, order: Order) -> bool:
        """True once a version is confirmed. Trouble is told before it is repaired, which may take minutes."""
        try:
            word = self._done(order)
        except (EngineDied, DeadlineExceeded) as error:
            self._fail(order, error)
            self._again(error)
        except EngineError as error:
            self._fail(order, error)
            self._leave()
        else:
            if word:
                self._answer(order, word)
            return isinstance(word, Confirmed)
        return False

    def _done(self, order: Order) -> Present | Joined | Confirmed | Trouble | None:
        """What to answer to an order that the engine has followed."""
        seconds = order.seconds + GRACE_SECONDS
        match order.message:
            case Call():
                return Present(self._generation, self.workers, len(self.restarts.deaths))
            case Meeting() as meeting:
                self._leave()
                return self._join(meeting, seconds)
            case Load() as load:
                self.version = -1
                self._load(load, seconds)
                return None
            case complete if self._held:
                return self._compare(complete, order.round)
            case _:
                return Trouble("the engine ended after it had taken the weights", refused=False)

    def _answer(self, order: Order, word: Present | Joined | Confirmed | Trouble) -> None:
        answer = Answer(self.world.rank, order.round, word)
        self.world.send(answer, self._lead, ANSWER, self.seconds, "the trainer to take an answer")

    def _fail(self, order: Order, error: Exception) -> None:
        self._failed = order.round
        self._answer(order, Trouble(str(error), isinstance(error, EngineError)))

    def _again(self, error: EngineDied | DeadlineExceeded) -> None:
        self.version, self._generation, self._held = -1, None, []
        self.restarts.again(error)

    def _leave(self) -> None:
        """Leave the group, if there is one; an engine that cannot is started again."""
        generation, self._generation = self._generation, None
        if generation is None:
            return
        try:
            self.engine.call("destroy_weights_update_group", timeout=GRACE_SECONDS, group_name=group_name(generation))
        except (EngineDied, DeadlineExceeded) as error:
            self._again(error)
        except EngineError as error:  # it never got into that group
            print(error, flush=True)

    def _join(self, meeting: Meeting, seconds: float) -> Joined:
        self._generation = meeting.generation
        self.engine.call(
            "init_weights_update_group",
            timeout=seconds,
            master_address=meeting.address,
            master_port=meeting.port,
            rank_offset=meeting.offset,
            world_size=meeting.size,
            group_name=group_name(meeting.generation),
            backend=self.backend,
        )
        return Joined()

    def _load(self, load: Load, seconds: float) -> None:
        """Also ask what the engine then holds: before the trainer wants to know, which saves a wait."""
        group = group_name(self._generation or 0)
        self.engine.call("update_weights_from_distributed", timeout=seconds, buckets=load.buckets, group_name=group)
        self._held = self.engine.call("checksum", timeout=seconds)

    def _compare(self, complete: Complete, number: int) -> Confirmed:
        self.version = self.restarts.version = complete.version
        self._confirmed = number
        return Confirmed(different(complete.digests, self._held), sum(map(len, complete.digests)))
