"""deaths.py ROLE SIZE FOLDER [SEED] [patient] [hasty]: weights from trainers to engines, answers from engines that have them.

The program of the engine is replaced by `engine.py`; host, restarts, flights, receiver and sender are the real ones. Version v
is the checkpoint plus v + 1, so that an engine that answers with what it was started with is found out. With SEED every
message, and everything that an engine does, comes late by chance. A patient rank repairs its engine only once the others have
answered all that it asked them for; else whoever is faster decides how much they help. Hasty ranks give up soon what hangs: all
of them, or of patient ones the last; others leave any engine a minute, be the machine as busy as it likes.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from miles_hpc import pace, receiver
from miles_hpc.config import Config
from miles_hpc.errors import MilesError
from miles_hpc.heartbeat import Heartbeat
from miles_hpc.receiver import Receiver
from miles_hpc.rollout.engine import EngineHost
from miles_hpc.rollout.help import HELP, Help
from miles_hpc.rollout.request import Request
from miles_hpc.rollout.restarts import DEATH, Restarts
from miles_hpc.sync import Sender
from miles_hpc.world import World, connect

VERSIONS, REQUESTS, ANSWERS, SECONDS = 4, 6, 99, 100.0
HASTE_SECONDS = 2.0
DELAY_SECONDS = 0.05


class Trainer:
    def __init__(self, folder: Path) -> None:
        self.tensors, self.version = load_file(folder / "model.safetensors"), 0

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            yield name, tensor + self.version + 1
            dist.barrier()  # whole weights are gathered from all training ranks


class Box:
    """Answers of one version."""

    def __init__(self, world: World) -> None:
        self.world, self.found = world, []

    @property
    def complete(self) -> bool:
        return len(self.found) == REQUESTS * len(self.world.rollout)

    def take(self) -> bool:
        answers = self.world.take(ANSWERS)
        self.found += answers or []
        return answers is not None


class Engine(EngineHost):
    program = (str(Path(__file__).with_name("engine.py")),)


def train(world: World, folder: Path, heartbeat: Heartbeat, haste: bool) -> None:
    trainer = Trainer(folder)
    sender = Sender(world, trainer, folder, heartbeat, SECONDS, 5.0 if haste else SECONDS)
    steps = []
    for trainer.version in range(VERSIONS):
        report = sender.send(trainer.version)
        box = Box(world)
        sender.serve(box, "answers")
        steps.append({"size": report.size, "digests": report.digests, "given_up": report.given_up, "answers": box.found})
    sender.close()
    deaths = [death.__dict__ for death in iter(lambda: world.take(DEATH), None)]
    if world.leads:
        (folder / "told").write_text(json.dumps({"steps": steps, "deaths": deaths, "rounds": sender.round.number}))


def rollout(world: World, folder: Path, heartbeat: Heartbeat, patience: bool, haste: bool) -> None:
    os.environ["RANK"] = str(world.rank)
    engine = Engine(config(folder, 30.0 if haste else SECONDS), folder, folder / f"engine-{world.rank}.log", heartbeat.beat)
    restarts = Restarts(engine, world, heartbeat, SECONDS, "look")
    engine.start()
    restarts.ready()
    receiving = Receiver(world, engine, restarts, 1, "gloo", heartbeat, SECONDS)
    engine.recover = receiving.recover
    if patience:
        wait_for_help(world, receiving.help)
    for version in range(VERSIONS):
        receiving.receive(version)
        assert receiving.version == version
        with engine.flight() as flight:
            keys = flight.add([Request([1], prompt, world.rank, 4) for prompt in range(REQUESTS)])
            answers = []
            while flight.open:
                key, output = flight.next()
                answers.append([world.rank, keys.index(key), *output.tokens])
        world.send(answers, world.train[0], ANSWERS, SECONDS, "answers to be taken")
    engine.shutdown()


def delay(world: World, seed: str) -> None:
    """Messages leave late, and are taken late."""
    chance, send, post, take = random.Random(f"{seed} {world.rank}"), world.send, world.post, world.take

    def later(call: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*arguments: Any, **named: Any) -> Any:
            time.sleep(chance.random() * DELAY_SECONDS)
            return call(*arguments, **named)

        return wait

    def take_late(tag: int, source: int | None = None) -> Any:
        found = take(tag, source)
        return later(lambda: found)() if found else found

    world.send, world.post, world.take = later(send), later(post), take_late
    os.environ["SEED"] = seed


def wait_for_help(world: World, help: Help) -> None:
    """Answers are taken as they come and given out when they are asked for."""
    ask, take, came = help.ask, world.take, []

    def ask_and_wait(version: int, requests: Mapping[int, Request]) -> None:
        ask(version, requests)
        world.until(lambda: came.extend(iter(lambda: take(HELP), None)) or len(came) == len(requests), SECONDS, "all help")

    def take_what_came(tag: int, source: int | None = None) -> Any:
        return came.pop(0) if tag == HELP and came else take(tag, source)

    help.ask, world.take = ask_and_wait, take_what_came


def config(folder: Path, seconds: float) -> Config:
    sections = {"run": {"name": "t", "steps": 1}, "model": {"path": str(folder)}, "data": {"prompts": "a:b"}}
    rollout = {"prompts_per_step": 1, "samples_per_prompt": 2, "max_new_tokens": 4, "reward": "a:b", "timeout_seconds": seconds}
    return Config.model_validate(sections | {"train": {"lr": 0.1}, "rollout": rollout})


def main() -> None:
    role, size, where, *how = sys.argv[1:]
    folder = Path(where)
    world = connect(role, int(size), lambda: None)
    patience = "patient" in how
    haste = "hasty" in how and (not patience or world.rank == world.rollout[-1])
    pace.LEAST_SECONDS = receiver.GRACE_SECONDS = HASTE_SECONDS if haste else SECONDS
    if how and how[0].isdigit():
        delay(world, how[0])
    heartbeat = Heartbeat(folder / f"beat-{world.rank}.json", role, world.rank, 1)
    try:
        if role == "train":
            store = dist.FileStore(f"{folder}/group")
            dist.init_process_group("gloo", store=store, rank=world.role_rank, world_size=world.role_size)
            train(world, folder, heartbeat, haste)
        else:
            rollout(world, folder, heartbeat, patience, haste)
    except MilesError as error:
        Path(folder, f"refused-{role}").write_text(str(error))  # what is printed just before an abort may be lost
        world.abort(1)
    world.end(SECONDS)


if __name__ == "__main__":
    main()
