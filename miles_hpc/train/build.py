"""Puts a training rank together: trainer, checkpoints, weight sender."""

import logging
import os
import warnings

from miles_hpc import device, logline
from miles_hpc.archive import Archive
from miles_hpc.checkpoint import Checkpoints
from miles_hpc.config import Config
from miles_hpc.group import open_store
from miles_hpc.handover import Giver, Lender
from miles_hpc.heartbeat import Heartbeat
from miles_hpc.layout import Layout
from miles_hpc.metrics import Clock
from miles_hpc.paths import RunPaths
from miles_hpc.stop import Stop
from miles_hpc.sync import Sender
from miles_hpc.train.role import TrainRole
from miles_hpc.train.trainer import Trainer
from miles_hpc.transport import Carrier, Shipper
from miles_hpc.world import World

CHATTY = ("megatron", "torch", "transformers")
"""Libraries that warn of what is meant to be as it is."""


def build(config: Config, paths: RunPaths, world: World, attempt: int, heartbeat: Heartbeat) -> TrainRole:
    """A training rank, ready for `loop.train`; collective over the training ranks.

    Raises:
        ModelError: a checkpoint the trainer cannot hold.
    """
    _quiet(world)
    heartbeat.enter("build")
    logline.say(f"MPI world of {len(world.hosts)} ranks is complete; building the trainer")
    seconds = config.patience_seconds
    folder = paths.model_of(config)
    trainer = Trainer(config, folder, world.role_rank, world.role_size, _store(world, seconds))
    trainer.advance = heartbeat.advance
    logline.say(f"trainer ready on {device.device()}; waiting for the engines")
    sender = _sender(config, paths, world, attempt, trainer, heartbeat)
    archive = Archive.of(config, paths) if world.leads else None
    checkpoints = Checkpoints(paths, config.checkpoint, world.role_barrier, world.leads, archive)
    stop = Stop(world, config.slurm.warning_seconds)
    world.poll = stop.poll
    return TrainRole(config, paths, world, attempt, trainer, checkpoints, Clock(heartbeat), sender, seconds, stop)


def _sender(
    config: Config, paths: RunPaths, world: World, attempt: int, trainer: Trainer, heartbeat: Heartbeat
) -> Sender | Giver:
    seconds, folder = config.patience_seconds, paths.model_of(config)
    layout = Layout.of(config.run.numerics, config.rollout.tensor_parallel, trainer.model_config)
    if config.colocated:
        return Lender(world, trainer, folder, heartbeat, seconds, layout)
    if config.rollout.weight_transport:
        carrier, name = Carrier.of(config, paths), paths.attempt(attempt).name
        return Shipper(world, trainer, folder, heartbeat, seconds, layout, carrier, name)
    return Sender(world, trainer, folder, heartbeat, seconds, config.rollout.timeout_seconds, layout)


def _store(world: World, seconds: float):
    """The training ranks' rendezvous: the first binds a port of the kernel's choice and tells the others over MPI."""
    from torch.distributed import TCPStore

    store = open_store(world.address) if world.leads else None
    address, port = world.share((world.address, store.port) if store else None, seconds, "the trainers' rendezvous")
    return store or TCPStore(address, port, is_master=False)


def _quiet(world: World) -> None:
    """Gloo on one host talks over loopback, whatever the host name resolves to; libraries say errors only, users anything."""
    if len(set(world.hosts)) == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
