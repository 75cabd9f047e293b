"""Puts a rollout rank together: engine, prompts, reward, weight receiver."""

from miles_hpc import data, logline, signals, verdicts
from miles_hpc.attach import attach
from miles_hpc.config import Config
from miles_hpc.device import backend
from miles_hpc.handover import Borrower, Taker
from miles_hpc.heartbeat import Heartbeat
from miles_hpc.metrics import Clock
from miles_hpc.paths import RunPaths
from miles_hpc.receiver import Receiver
from miles_hpc.rollout.engine import EngineHost
from miles_hpc.rollout.generate import Generator
from miles_hpc.rollout.judge import Judge
from miles_hpc.rollout.restarts import Restarts
from miles_hpc.rollout.reward import Reward
from miles_hpc.rollout.role import RolloutRole
from miles_hpc.samples.exchange import Outbox
from miles_hpc.stop import Stop
from miles_hpc.transport import Carrier, Unpacker
from miles_hpc.world import World


def start_engine(config: Config, paths: RunPaths, attempt: int, heartbeat: Heartbeat) -> EngineHost:
    """Start the engine's host and return at once; it is awaited in `build`."""
    number = heartbeat.rank - config.slurm.train.ranks
    log = paths.log(attempt, "engine", heartbeat.rank)
    engine = EngineHost(config, paths.model_of(config), log, signals.check, number)
    engine.start()
    return engine


def build(config: Config, paths: RunPaths, world: World, attempt: int, heartbeat: Heartbeat, engine: EngineHost) -> RolloutRole:
    """A rollout rank, ready for `loop.rollout`.

    Raises:
        DataError, EdgeError: prompts or reward. EngineError, EngineDied: the engine did not start.
    """
    heartbeat.enter("build")
    logline.say(f"MPI world of {len(world.hosts)} ranks is complete; reading prompts, the engine starts meanwhile")
    seconds = config.patience_seconds
    tokenizer = data.tokenizer_of(paths.model_of(config))
    prompts = data.load(config, "train", tokenizer)
    held_out = data.load(config, "eval", tokenizer) if config.data.eval else None
    reward, judge, rollout = Reward.of(config), Judge.of(config), config.rollout
    talk = attach(config, "rollout.generate", rollout.generate) if rollout.generate else None
    whole = attach(config, "rollout.function", rollout.function) if rollout.function else None
    heartbeat.enter("engine start")
    logs = verdicts.logs(paths.folder, "engine", world.rank, attempt)
    restarts = Restarts(engine, world, heartbeat, seconds, logs)
    restarts.ready()
    logline.say(f"engine ready; what it says: {paths.log(attempt, 'engine', world.rank).name}")
    generator = Generator(config, engine, prompts, reward, held_out, judge, talk, whole)
    receiver = _receiver(config, paths, world, engine, restarts, heartbeat)
    world.poll = engine.poll_hook = Stop(world, config.slurm.warning_seconds).poll
    outbox = Outbox(world, paths, attempt, seconds)
    return RolloutRole(config, paths, world, prompts, generator, receiver, outbox, Clock(heartbeat), seconds)


def _receiver(
    config: Config, paths: RunPaths, world: World, engine: EngineHost, restarts: Restarts, heartbeat: Heartbeat
) -> Receiver | Taker:
    workers, seconds = config.rollout.tensor_parallel, config.patience_seconds
    if config.rollout.weight_transport:
        return Unpacker(world, engine, workers, heartbeat, seconds, Carrier.of(config, paths))
    if not config.colocated:
        return Receiver(world, engine, restarts, workers, backend(), heartbeat, seconds)
    engine.call("sleep")  # until weights come; the trainer may be in its warm start
    return Borrower(world, engine, workers, heartbeat, seconds)
