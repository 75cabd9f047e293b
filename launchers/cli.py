"""`miles-submit`: the commands of the login node.

Exit codes: 0 done, 1 a fault, 2 wrong input, 3 something this machine does not offer. Every command imports what it needs
when it runs, so that `--help` and `plan` answer at once.
"""

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from miles_hpc.errors import MilesError, SiteError, UserError

CLUSTER_HOME = Path(".cluster")
Handler = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors raised on purpose become one message and an exit code, without a traceback."""
    for stream in (sys.stdout, sys.stderr):  # names and logs are of any bytes, terminals of any encoding
        if isinstance(stream, io.TextIOWrapper):  # None where the caller has closed it
            stream.reconfigure(errors="backslashreplace")
    try:
        options = _parser().parse_args(arguments)
        code = options.handler(options)
        print(end="", flush=True)  # here, where a closed pipe is expected, not when the interpreter ends
        return code
    except MilesError as error:
        print(f"miles-submit: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `miles-submit logs RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder that may not be written
        place = SiteError.of(error)
        print(f"miles-submit: {place}", file=sys.stderr)
        return place.exit_code
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="miles-submit", description="RL post-training as one native Slurm job.")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = _commands(parser, "command")
    _add_submitting(commands)
    _add_looking(commands)
    _add_cluster(commands)
    return parser


def _commands(parser: argparse.ArgumentParser, noun: str):
    """The parser's commands; without one it answers with the list of them."""

    def alone(options: argparse.Namespace) -> int:
        if options.version:
            return _version()
        parser.print_help()
        return UserError.exit_code

    parser.set_defaults(handler=alone, version=False)
    return parser.add_subparsers(title=f"{noun}s", metavar=noun.upper())


def _version() -> int:
    from importlib.metadata import version

    print(f"miles-submit {version('miles-hpc')}")
    return 0


def _command(commands, name: str, handler: Handler, text: str, run: bool = False) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.set_defaults(handler=handler)
    if run:
        parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    return parser


def _add_submitting(commands) -> None:
    run = _command(commands, "run", _run, "submit a run")
    plan = _command(commands, "plan", _plan, "print the job script and the batch arithmetic; touches nothing")
    for parser in (run, plan):
        parser.add_argument("file", type=Path, metavar="FILE", help="TOML file of the run")
    resume = _command(commands, "resume", _resume, "go on with a run that ended, from its newest checkpoint", run=True)
    for parser, text in ((run, "override one key"), (plan, "override one key"), (resume, "change one key of RUN/config.toml")):
        parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=text)
        parser.add_argument("--local", action="store_true", help="the same ranks under mpiexec on this machine, no Slurm")
    for parser in (run, resume):
        parser.add_argument("--watch", action="store_true", help="show progress until the end (Ctrl-C leaves the job running)")


def _add_looking(commands) -> None:
    _command(commands, "status", _status, "state, step and verdict of a run", run=True)
    logs = _command(commands, "logs", _logs, "print a rank's log", run=True)
    logs_of = ("train", "rollout", "engine", "job")
    logs.add_argument("--role", choices=logs_of, default=None, help="default: train; job: the batch script")
    logs.add_argument("--rank", type=_at_least_zero, default=None, help="rank in the MPI world (default: the role's first)")
    logs.add_argument("--attempt", type=_at_least_one, default=None, help="default: the newest")
    logs.add_argument("-f", "--follow", action="store_true", help="go on printing until the run ends")
    _command(commands, "cancel", _cancel, "end a run that is queued or running", run=True)
    why = _command(commands, "why", _why, "why an attempt ended, and what to type next", run=True)
    why.add_argument("--attempt", type=_at_least_one, default=None, help="default: the newest that has ended")
    samples = _command(commands, "samples", _samples, "print prompts, answers and rewards", run=True)
    samples.add_argument("--step", type=int, default=None, help="default: the newest")
    report = _command(commands, "report", _report, "summarise a run", run=True)
    report.add_argument("--json", action="store_true", help="as one JSON object")
    _command(commands, "audit", _audit, "recount the report's figures from the files", run=True)

    bundle = _command(commands, "bundle", _bundle, "one file with the pinned packages, for nodes without a network")
    bundle.add_argument("--python", default="3.12", help="of the node (default: 3.12)")
    bundle.add_argument("--torch", default="2.11", help="of the node (default: 2.11)")
    bundle.add_argument("--cuda", default="13", help="that torch is built for (default: 13)")
    bundle.add_argument("--with-torch", action="store_true", help="torch and NVIDIA's libraries too (3 GB)")
    bundle.add_argument("--pins", type=Path, default=None, metavar="FILE", help="pins.txt of an earlier bundle: the same bytes")
    bundle.add_argument("--out", type=Path, default=Path("miles-hpc-bundle.tar"), help="default: miles-hpc-bundle.tar")
    text = "find the first operation that trainer and engine compute differently (needs the run environment)"
    _command(commands, "compare-numerics", _compare, text, run=True)
    _command(commands, "edges", _edges, "list the points where functions of your own attach")


def _add_cluster(commands) -> None:
    text = "a private Slurm of virtual nodes on this machine"
    cluster = commands.add_parser("cluster", help=text, description=f"{text[0].upper()}{text[1:]}.")
    actions = _commands(cluster, "action")
    up = _command(actions, "up", _cluster_up, "start it (downloads Debian's Slurm at the first time)")
    down = _command(actions, "down", _cluster_down, "cancel its jobs and stop it")
    status = _command(actions, "status", _cluster_status, "daemons, nodes and jobs")
    env = _command(actions, "env", _cluster_env, 'exports for a shell: eval "$(miles-submit cluster env)"')
    for parser in (up, down, status, env):
        parser.add_argument("--home", type=Path, default=CLUSTER_HOME, help="its folder (default: .cluster)")
    up.add_argument("--train-nodes", type=_at_least_one, default=2, help="nodes t0, t1, ... (default: 2)")
    up.add_argument("--rollout-nodes", type=_at_least_one, default=2, help="nodes r0, r1, ... (default: 2)")
    up.add_argument("--cpus", type=_at_least_one, default=8, help="cores each node declares (default: 8)")
    up.add_argument("--memory-mb", type=_at_least_one, default=8000, help="memory each node declares in MB (default: 8000)")
    up.add_argument(
        "--gpus", type=_at_least_zero, default=0, help="GPUs per node, pretended unless --gpu-devices is given (default: 0)"
    )
    up.add_argument("--gpu-devices", nargs="+", default=[], metavar="FILE", help="such as /dev/nvidia0, dealt out to the nodes")
    up.add_argument("--auth", choices=("munge", "none"), default="munge", help="none: any local user may act as anyone")
    down.add_argument("--purge", action="store_true", help="also remove its state and logs")


def _at_least_one(text: str) -> int:
    return _at_least(1, text)


def _at_least_zero(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is less than {least}")
    return number


def _run(options: argparse.Namespace) -> int:
    from miles_hpc.launchers import submission

    submitted = submission.run(options.file, options.set, without_slurm=options.local)
    return submission.follow(submitted, watch=options.watch)


def _resume(options: argparse.Namespace) -> int:
    from miles_hpc.launchers import submission

    submitted = submission.resume(_existing(options.run), options.set, without_slurm=options.local)
    return submission.follow(submitted, watch=options.watch)


def _plan(options: argparse.Namespace) -> int:
    from miles_hpc.launchers import plan

    print(plan.text(options.file, options.set, local=options.local))
    return 0


def _status(options: argparse.Namespace) -> int:
    from miles_hpc.launchers import status

    print(status.text(_existing(options.run)))
    return 0


def _logs(options: argparse.Namespace) -> int:
    from miles_hpc.launchers import logs

    run = _existing(options.run)
    return logs.show(run, options.role, options.rank, options.attempt, options.follow)


def _cancel(options: argparse.Namespace) -> int:
    from miles_hpc.launchers import status

    print(status.cancel(_existing(options.run)))
    return 0


def _why(options: argparse.Namespace) -> int:
    from miles_hpc.launchers import why

    print(why.why(_existing(options.run), options.attempt))
    return 0


def _samples(options: argparse.Namespace) -> int:
    from miles_hpc.launchers import samples

    return samples.samples(_existing(options.run), options.step)


def _report(options: argparse.Namespace) -> int:
    from miles_hpc.launchers import report

    return report.report(_existing(options.run), options.json)


def _bundle(options: argparse.Namespace) -> int:
    from miles_hpc.launchers.bundle import Target, bundle

    target = Target(options.python, options.torch, options.cuda)
    print(bundle(target, options.out, options.with_torch, options.pins))
    return 0


def _edges(options: argparse.Namespace) -> int:
    from miles_hpc.launchers import edges

    print(edges.text())
    return 0


def _audit(options: argparse.Namespace) -> int:
    from miles_hpc.launchers import audit

    return audit.audit(_existing(options.run))


def _compare(options: argparse.Namespace) -> int:
    from importlib.util import find_spec

    from miles_hpc import config
    from miles_hpc.paths import RunPaths

    paths = RunPaths(_existing(options.run))
    if missing := [name for name in ("torch", "sglang", "megatron") if not find_spec(name)]:
        raise SiteError(
            f"{', '.join(missing)} not installed here", next_step="use the environment that runs jobs: make install"
        )
    from miles_hpc import comparison

    return comparison.show(paths, config.read(paths.config))


def _existing(run: Path) -> Path:
    """The folder of a run, absolute.

    Raises:
        UserError: there is no run in it.
    """
    from miles_hpc.paths import RunPaths

    if not RunPaths(run).config.is_file():
        raise UserError(
            "no run in this folder (config.toml is missing)", where=str(run), next_step="name a folder such as runs/NAME-000"
        )
    return run.resolve()


def _cluster_up(options: argparse.Namespace) -> int:
    from miles_hpc.launchers.cluster import Cluster, Settings, differing

    if options.gpu_devices and not options.gpus:
        raise UserError("--gpu-devices without --gpus", next_step="say how many GPUs a node has: --gpus N")
    cluster = Cluster(options.home)
    wanted = Settings(
        train_nodes=options.train_nodes,
        rollout_nodes=options.rollout_nodes,
        cpus=options.cpus,
        memory_mb=options.memory_mb,
        gpus=options.gpus,
        gpu_devices=tuple(options.gpu_devices),
        auth=options.auth,
    )
    if cluster.up(wanted):
        print(f"a private Slurm with {len(wanted.nodes)} nodes runs in {cluster.home}")
    else:
        other = differing(cluster.settings or wanted, wanted)
        print(f"already up in {cluster.home}" + "".join(f"\n  {line} (to change it: down, then up)" for line in other))
    print(f'to use its commands in this shell: eval "$(miles-submit cluster env --home {cluster.home})"')
    return 0


def _cluster_down(options: argparse.Namespace) -> int:
    from miles_hpc.launchers.cluster import Cluster

    cluster = Cluster(options.home)
    print(f"stopped the cluster in {cluster.home}" if cluster.down(options.purge) else f"no cluster runs in {cluster.home}")
    return 0


def _cluster_status(options: argparse.Namespace) -> int:
    from miles_hpc.launchers.cluster import Cluster

    print(Cluster(options.home).status(), end="")
    return 0


def _cluster_env(options: argparse.Namespace) -> int:
    import shlex

    from miles_hpc.launchers.cluster import Cluster

    cluster = Cluster(options.home)
    if not cluster.running:
        raise SiteError(
            "no cluster runs there", where=str(cluster.home), next_step=f"miles-submit cluster up --home {options.home}"
        )
    for name, value in cluster.exports().items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
