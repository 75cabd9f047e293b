import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles_hpc import config as configuration
from miles_hpc.launchers import cli, controller, evidence, verdict


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_plan_prints_arithmetic_and_script_and_touches_nothing(capsys, no_slurm, toml):
    code, out, _ = run(capsys, "plan", str(toml))
    assert code == 0
    assert "4 prompts x 4 samples = 16 samples per step" in out
    assert "4 data-parallel ranks / 1 mini-batch = 4 samples per rank" in out
    assert "#SBATCH hetjob" in out
    assert list(no_slurm.iterdir()) == []


def test_plan_without_slurm_is_mpiexec(capsys, no_slurm, toml):
    code, out, _ = run(capsys, "plan", str(toml), "--local")
    assert code == 0
    assert "mpiexec" in out and "#SBATCH" not in out


def test_set_overrides(capsys, no_slurm, toml):
    _, out, _ = run(capsys, "plan", str(toml), "--set", "run.name=other", "--set", "slurm.train.nodes=4")
    assert "#SBATCH --job-name=other" in out and "#SBATCH --nodes=4" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--set", "train.lrr=1"], 2, "did you mean train.lr"),
        (["--set", "train.lr=fast"], 2, "train.lr"),
        (["--set", "nonsense"], 2, "section.key=value"),
        (["--set", "slurm.train.nodes=3"], 2, "would fit"),
        (["--set", "slurm.site=genric"], 2, "did you mean generic"),
        (["--set", "run.folder=/tmp/hetjob/x"], 2, "hetjob"),
        (["--set", "rollout.reward=scoring:rewrd"], 2, "did you mean reward"),
    ],
)
def test_a_users_error_is_one_message_and_exit_code_2(capsys, no_slurm, toml, arguments, code, said):
    got, out, err = run(capsys, "plan", str(toml), *arguments)
    assert got == code
    assert said in err and "Traceback" not in err and out == ""


def test_what_the_machine_refuses_is_a_message_too(capsys, no_slurm, toml):
    """A name longer than the file system takes, a file where a folder should be."""
    for folder in ("x" * 300, str(toml / "below")):
        code, _, err = run(capsys, "run", str(toml), "--local", "--set", f"run.folder={folder}")
        assert code in (2, 3) and err.startswith("miles-submit: ") and "Traceback" not in err
    code, _, err = run(capsys, "cluster", "up", "--home", "/proc/nothing")
    assert code == 3 and "/proc/nothing" in err


@pytest.mark.parametrize("lines", ["0", "1"])
def test_a_reader_that_leaves_early_is_no_error(toml, lines):
    plan = f"{shlex.quote(sys.executable)} -m miles_hpc.launchers.cli plan --local {shlex.quote(str(toml))}"
    script = f"{plan} | head -n {lines} > /dev/null; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_no_slurm_is_exit_code_3_and_leaves_nothing(capsys, no_slurm, toml):
    code, _, err = run(capsys, "run", str(toml))
    assert code == 3
    assert "miles-submit cluster up" in err and "--local" in err
    assert list(no_slurm.iterdir()) == []


@pytest.mark.parametrize("command", ["status", "logs", "cancel", "why", "resume", "report", "audit", "samples"])
def test_a_folder_without_a_run(capsys, no_slurm, command):
    code, _, err = run(capsys, command, str(no_slurm))
    assert code == 2
    assert "no run in this folder" in err


def test_an_existing_run_folder_is_refused(capsys, no_slurm, toml):
    taken = no_slurm / "taken"
    taken.mkdir()
    code, _, err = run(capsys, "run", str(toml), "--local", "--set", f"run.folder={taken}")
    assert code == 2
    assert f"miles-submit resume {taken}" in err
    assert list(taken.iterdir()) == []


def test_cluster_paths_that_slurm_cannot_take(capsys, tmp_path):
    code, _, err = run(capsys, "cluster", "up", "--home", str(tmp_path / "a b"))
    assert code == 3
    assert "--home" in err
    assert not (tmp_path / "a b").exists()


def test_cluster_status_and_env_of_none(capsys, tmp_path):
    assert run(capsys, "cluster", "status", "--home", str(tmp_path))[:2] == (0, f"no cluster runs in {tmp_path}\n")
    assert run(capsys, "cluster", "env", "--home", str(tmp_path))[0] == 3
    assert run(capsys, "cluster", "down", "--home", str(tmp_path))[0] == 0


@pytest.mark.parametrize(("arguments", "name"), [([], "resume"), (["cluster"], "down")])
def test_without_a_command_they_are_listed(capsys, arguments, name):
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (2, "") and re.search(rf"^\s+{name}\s", out, flags=re.MULTILINE)
    assert out.startswith("usage: ") and re.search(r"\n\n[A-Z].*\.\n\n", out), "a sentence says what it is"


@pytest.mark.parametrize("arguments", [["logs", "--attempt", "0"], ["logs", "--rank", "-1"], ["why", "--attempt", "0"]])
def test_a_number_that_nothing_has_is_refused(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        cli.main([*arguments, "RUN"])
    assert "is less than" in capsys.readouterr().err


def test_version(capsys):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert run(capsys, "--version") == (0, f"miles-submit {project['version']}\n", "")


def test_help_names_every_command():
    said = subprocess.run([sys.executable, "-m", "miles_hpc.launchers.cli", "--help"], capture_output=True, text=True).stdout
    names = ["run", "plan", "resume", "status", "logs", "cancel", "why", "samples", "report", "audit", "cluster"]
    assert [name for name in names if not re.search(rf"^\s+{name}\s", said, flags=re.MULTILINE)] == []


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "TOML"]])
def test_answers_at_once_and_without_heavy_imports(no_slurm, toml, arguments):
    words = [str(toml) if a == "TOML" else a for a in arguments]
    program = (
        "import sys, json; from miles_hpc.launchers.cli import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        "print(json.dumps([m for m in ('torch', 'h5py', 'numpy', 'rich', 'submitit', 'mpi4py') if m in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert json.loads(result.stdout.splitlines()[-1]) == []


DAMAGED = ["", "{", "[]", "3", "{}", "\0", "[" * 100_000, f'{{"kind": {"9" * 5000}}}', '{"kind": "\udcff"}', "\udcff"]
LOOKING = ["status", "logs", "cancel", "why", "resume", "report", "audit", "samples"]


@pytest.mark.parametrize("command", LOOKING)
@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: ascii(text[:9]))
def test_files_of_a_run_that_are_damaged_give_no_traceback(capsys, no_slurm, toml, command, text):
    """Whatever a full disk or a hand has left in the small files of a run."""
    folder = no_slurm / "run"
    attempt = folder / "attempts/001"
    attempt.mkdir(parents=True)
    (folder / "heartbeat").mkdir()
    (folder / "config.toml").write_text(configuration.dump(configuration.load(toml)))
    for file in ("job.json", "attempts/001/verdict.json", "attempts/001/start.json", "heartbeat/rank-0000.json"):
        (folder / file).write_text(text, errors="surrogateescape")
    for file in ("events.jsonl", "ledger.jsonl"):
        (folder / file).write_text(f"{text}\n{text}", errors="surrogateescape")
    (folder / "attempts/\N{SUPERSCRIPT TWO}").mkdir()
    code, _, err = run(capsys, command, str(folder))
    assert code in (0, 1, 2) and (code == 0 or command == "audit" or err.startswith("miles-submit: "))


@pytest.mark.parametrize("value", [None, "x", "3", [1], 10**400], ids=lambda value: str(value)[:9])
def test_values_of_another_type_give_no_traceback(capsys, no_slurm, make_run, value):
    """In one key after another of the small files of a run."""
    made = make_run(2).paths
    made.job.write_text('{"scheduler": "local", "job_id": "999999999", "first_attempt": 1}')
    made.heartbeat(0).parent.mkdir()
    made.heartbeat(0).write_text('{"rank": 0, "role": "train", "phase": "end", "step": 2, "time": 5.0, "attempt": 1}')
    begun = {"time": 1.0, "steps": 0, "nodes": ["n1"], "job_log_bytes": 0, "changed": {"train.lr": [1, 2]}}
    made.start(1).write_text(json.dumps(begun))
    verdict.amend(made, 1, heartbeats=evidence.last_words(made.folder, 1), nodes=["n1"], bad_nodes=["n1"], avoided=[], error="")
    for file in (made.events, made.ledger, made.job, made.verdict(1), made.start(1), made.heartbeat(0)):
        sound = file.read_text()
        *before, last = [json.loads(line) for line in sound.splitlines()] if file.suffix == ".jsonl" else [json.loads(sound)]
        for key in last:
            file.write_text("".join(json.dumps(line) + "\n" for line in (*before, last | {key: value})))
            for command in ("status", "report" if file.suffix == ".jsonl" else "why"):
                code, _, err = run(capsys, command, str(made.folder))
                assert code == 0 or (code == 2 and err.startswith("miles-submit: ")), (file.name, key, command, err)
        file.write_text(sound)


@pytest.mark.parametrize("way", ["PYTHONIOENCODING=ascii {}", "{} >&-"])
def test_any_terminal_will_do(toml, way):
    plan = shlex.join([sys.executable, "-m", "miles_hpc.launchers.cli", "plan", "--local", str(toml)])
    script = way.format(f"{plan} --set run.folder=\N{SNOWMAN}")
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


FULL_DISK = """
import resource, signal, sys
from miles_hpc.launchers import cli
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_file_that_the_disk_refuses_is_named_and_nothing_is_left(no_slurm, toml):
    result = subprocess.run([sys.executable, "-c", FULL_DISK, "run", "--local", str(toml)], capture_output=True, text=True)
    assert result.returncode == 3 and re.search(r"where: \S*/config.toml\n  next: ", result.stderr), result.stderr
    assert list((no_slurm / "runs").iterdir()) == []


@pytest.fixture
def silent_slurm(no_slurm, toml, monkeypatch):
    """A run of a Slurm whose programs wait for a controller that is gone, and what they were asked."""
    folder, programs = no_slurm / "run", no_slurm / "bin"
    (folder / "attempts/001/logs").mkdir(parents=True)
    programs.mkdir()
    for name in ("scontrol", "scancel", "squeue", "sinfo", "sacct"):
        (programs / name).write_text("#!/bin/sh\nexec sleep 60\n")
        (programs / name).chmod(0o755)
    (folder / "config.toml").write_text(configuration.dump(configuration.load(toml)))
    job = {"scheduler": "slurm", "job_id": "7", "first_attempt": 1, "slurm_programs": str(programs)}
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "events.jsonl").write_text('{"event": "start", "step": 0, "attempt": 1, "time": 0}\n')
    monkeypatch.setattr(controller, "BRIEF", 0.2)
    say, asked = controller._said, []
    monkeypatch.setattr(controller, "_said", lambda *command, **patience: asked.append(command) or say(*command, **patience))
    return SimpleNamespace(folder=folder, asked=asked)


@pytest.mark.parametrize(
    ("command", "exit_code", "said"),
    [
        ("status", 0, "did not answer"),
        ("cancel", 3, "Slurm did not answer"),
        ("resume", 3, "does not answer"),
        ("why", 2, "status"),
    ],
)
def test_a_slurm_that_does_not_answer_is_waited_for_briefly_and_said(capsys, silent_slurm, command, exit_code, said):
    begin = time.monotonic()
    code, out, err = run(capsys, command, str(silent_slurm.folder))
    assert time.monotonic() - begin < controller.PATIENT
    assert code == exit_code and silent_slurm.asked
    assert said in (out if code == 0 else err)
    assert "progress" in out if code == 0 else "  next:  " in err


@pytest.mark.parametrize("command", ["report", "audit", "samples", "logs"])
def test_what_is_in_the_files_is_not_asked_of_slurm(capsys, silent_slurm, command):
    run(capsys, command, str(silent_slurm.folder))
    assert not silent_slurm.asked


def test_a_plan_is_made_without_a_slurm_that_does_not_answer_soon(capsys, silent_slurm, toml, monkeypatch):
    monkeypatch.setenv("PATH", f"{silent_slurm.folder.parent / 'bin'}:{os.environ['PATH']}")
    begin = time.monotonic()
    code, out, _ = run(capsys, "plan", str(toml))
    assert time.monotonic() - begin < controller.PATIENT
    assert (code, silent_slurm.asked) == (0, [("scontrol", "show", "config")]) and "unchecked" in out


def test_a_verdict_is_not_written_for_an_attempt_that_may_still_be_running(capsys, silent_slurm):
    verdict = silent_slurm.folder / "attempts/001/verdict.json"
    verdict.write_text('{"kind": "hang", "attempt": 1, "time": 1}')
    code, out, _ = run(capsys, "why", str(silent_slurm.folder))
    assert code == 0 and "hang" in out
    assert json.loads(verdict.read_text()) == {"kind": "hang", "attempt": 1, "time": 1}


@pytest.mark.parametrize("command", LOOKING)
def test_a_run_that_was_never_submitted(capsys, no_slurm, toml, command):
    (no_slurm / "config.toml").write_text(configuration.dump(configuration.load(toml)))
    code, out, _ = run(capsys, command, str(no_slurm))
    assert code in (0, 2)
    if command == "status":
        assert "not submitted" in out and "next" not in out
