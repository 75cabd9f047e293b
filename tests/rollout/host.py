"""host.py FD PARENT: an engine's host process without an engine; what it does with a request says the prompt id."""

import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from miles_hpc.rollout.request import Output, Request

REFUSED_ONCE, REFUSED, DIES, STOPS = 101, 102, 103, 104


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    folder, asked = Path(connection.recv().model_folder), list[int]()
    print("the host is up", flush=True)
    child = subprocess.Popen(["sleep", "600"])
    connection.send(("ready", {"child": child.pid}))
    while (message := connection.recv())[0] != "exit":
        if message[0] == "call":
            connection.send(("answer", message[1], None))
        for key, request in message[1] if message[0] == "generate" else ():
            fault(request, folder)
            asked.append(request.prompt_id)
            connection.send(answer(key, request, asked.count(request.prompt_id)))
    child.kill()


def answer(key: int, request: Request, times: int) -> tuple:
    if request.prompt_id == REFUSED or (request.prompt_id == REFUSED_ONCE and times == 1):
        return ("error", key, "out of memory")
    return ("output", key, Output([request.prompt_id, os.getpid()], [0.0, 0.0], True))


def fault(request: Request, folder: Path) -> None:
    """Once for a folder."""
    done = folder / f"fault-{request.prompt_id}"
    if request.prompt_id in (DIES, STOPS) and not done.exists():
        done.touch()
        os.kill(os.getpid(), signal.SIGKILL if request.prompt_id == DIES else signal.SIGSTOP)


if __name__ == "__main__":
    main()
