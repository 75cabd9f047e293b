"""The generated text, word for word. After a wanted change: MILES_UPDATE_GOLDEN=1 pytest tests/launchers/test_script.py"""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from miles_hpc.config import Config
from miles_hpc.errors import UserError
from miles_hpc.launchers import script, site, spec
from miles_hpc.launchers.spec import JobSpec
from miles_hpc.paths import RunPaths

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def fixed_paths(monkeypatch):
    monkeypatch.setattr(script, "RANK", Path("/opt/miles/slurm/rank.sh"))


def job(config: Config, het: bool = True, gpus: int = 0) -> JobSpec:
    profile = site.load("local").model_copy(update={"het": het, "environment": {"NCCL_SOCKET_IFNAME": "hsn"}})
    slurm = config.slurm
    wanted = {name: getattr(slurm, name).model_copy(update={"gpus_per_node": gpus}) for name in ("train", "rollout")}
    config = config.model_copy(update={"slurm": slurm.model_copy(update=wanted)})
    return replace(spec.build(config, profile, Path("/scratch/my runs/demo-000")), python="/opt/miles/bin/python")


def check(name: str, text: str) -> None:
    file = GOLDEN / name
    if os.environ.get("MILES_UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_heterogeneous(launch_config):
    check("het.sbatch", script.text(job(launch_config)))


def test_heterogeneous_with_gpus(launch_config):
    check("het-gpus.sbatch", script.text(job(launch_config, gpus=4)))


def test_homogeneous(launch_config):
    check("homogeneous.sbatch", script.text(job(launch_config, het=False)))
    check("ranks.conf", script.rank_map(job(launch_config, het=False)))


def colocated(config: Config) -> Config:
    """Training nodes of 4 GPUs, an engine for every 2 of them."""
    text = {
        "run": config.run.model_dump() | {"placement": "colocate"},
        "rollout": config.rollout.model_dump() | {"tensor_parallel": 2},
    }
    slurm = config.slurm.model_dump(include={"time_minutes", "account", "setup"})
    slurm |= {"train": {"nodes": 2, "ranks_per_node": 4, "gpus_per_node": 4}, "rollout": {"cpus_per_rank": 4}}
    return Config.model_validate(config.model_dump(exclude_none=True) | text | {"slurm": slurm})


def test_colocated(launch_config):
    profile = site.load("local")
    for het in (True, False):
        built = spec.build(colocated(launch_config), profile.model_copy(update={"het": het}), Path("/scratch/demo-000"))
        made = replace(built, python="/opt/miles/bin/python")
        check("colocate.sbatch", script.text(made))
        check("colocate-ranks.conf", script.rank_map(made))


def test_local(launch_config):
    check("local.sh", script.text(job(launch_config), mpiexec="/opt/miles/bin/mpiexec"))


@pytest.mark.parametrize("file", ["het.sbatch", "het-gpus.sbatch", "homogeneous.sbatch", "colocate.sbatch", "local.sh"])
def test_golden_files_are_valid_bash(file):
    subprocess.run(["bash", "-n", GOLDEN / file], check=True)


def test_het_directives_come_in_two_blocks_with_equal_time_limits(launch_config):
    lines = list(script.directives(job(launch_config)))
    border = lines.index("#SBATCH hetjob")
    for block in (lines[:border], lines[border:]):
        assert "#SBATCH --time=30" in block
        assert "#SBATCH --account=physics" in block
    assert "#SBATCH --partition=train" in lines[:border]
    assert "#SBATCH --partition=rollout" in lines[border:]


def test_options_of_a_component_are_passed_on(launch_config):
    train = launch_config.slurm.train.model_copy(update={"extra": ["--exclusive"], "constraint": "a100|h100", "memory_gb": 64})
    changed = launch_config.model_copy(update={"slurm": launch_config.slurm.model_copy(update={"train": train})})
    lines = list(script.directives(job(changed)))
    assert {"#SBATCH --exclusive", "#SBATCH --constraint='a100|h100'", "#SBATCH --mem=64G"} <= set(lines)


def test_spares_are_allocated_and_the_step_names_the_nodes_it_uses(launch_config):
    rollout = launch_config.slurm.rollout.model_copy(update={"spares": 1})
    changed = launch_config.model_copy(update={"slurm": launch_config.slurm.model_copy(update={"rollout": rollout})})
    text = script.text(job(changed))
    assert "#SBATCH --nodes=3\n" in text.split("hetjob")[1]
    assert '--nodes=2 --ntasks=2 --cpus-per-task=4 --nodelist="$(cat "$RUN/attempts/$MILES_ATTEMPT/rollout.nodes")"' in text
    lines = script.text(job(changed, het=False))
    assert "#SBATCH --nodes=5\n" in lines and "--distribution=arbitrary --nodes=4 --ntasks=6" in lines


def test_nodes_to_be_avoided_are_excluded_in_both_components(launch_config):
    lines = list(script.directives(replace(job(launch_config), exclude=("r1", "t0"))))
    assert lines.count("#SBATCH --exclude=r1,t0") == 2


def test_a_warning_never_comes_before_the_start(launch_config):
    short = launch_config.model_copy(update={"slurm": launch_config.slurm.model_copy(update={"time_minutes": 1})})
    assert job(short).warning_seconds == 30


@pytest.mark.parametrize("path", ["/scratch/hetjob-tests/r", "/scratch/it's/r", "/scratch/100%/r"])
def test_paths_that_sbatch_misreads_are_refused(launch_config, path):
    with pytest.raises(UserError, match="sbatch"):
        spec.build(launch_config, site.load("local"), Path(path))


def test_rank_wrapper_opens_the_log_that_paths_names(tmp_path):
    paths = RunPaths(tmp_path / "a run")
    paths.attempt(7).mkdir(parents=True)
    wrapper = Path(script.SLURM) / "rank.sh"
    environment = {"SLURM_PROCID": "12", "MILES_ATTEMPT": paths.attempt(7).name, "PATH": os.environ["PATH"]}
    subprocess.run([wrapper, "rollout", paths.folder, "16", "echo", "hello"], env=environment, check=True)
    said = paths.log(7, "rollout", 12).read_text()
    assert said == f"hello --role rollout --run {paths.folder} --attempt 007 --world-size 16\n"
