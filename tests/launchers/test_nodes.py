from types import SimpleNamespace

import pytest

from miles_hpc.config import Config
from miles_hpc.launchers import nodes
from miles_hpc.sections import Component, Slurm

CONFIG = Config.model_construct(
    run=SimpleNamespace(placement="split"),
    slurm=Slurm(train=Component(nodes=2, ranks_per_node=2), rollout=Component(nodes=1)),
    rollout=SimpleNamespace(tensor_parallel=1),
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("t0", ["t0"]),
        ("t[0-2],r0", ["t0", "t1", "t2", "r0"]),
        ("n[008-010,3],login", ["n008", "n009", "n010", "n3", "login"]),
        ("rack[1-2]-n[0,2]", ["rack1-n0", "rack1-n2", "rack2-n0", "rack2-n2"]),
        ("c[1-2]x,d", ["c1x", "c2x", "d"]),
    ],
)
def test_names_in_a_list(text, names):
    assert nodes.expanded(text) == names


def test_ranks_of_both_components_and_of_a_homogeneous_job():
    assert nodes.hosts([["t0", "t1"], ["r0"]], CONFIG) == ["t0", "t0", "t1", "t1", "r0"]
    assert nodes.hosts([["a", "b", "c"]], CONFIG) == ["a", "a", "b", "b", "c"]
    assert nodes.hosts([], CONFIG) == ["localhost"] * 5


def test_a_spare_of_the_same_component_takes_over_and_without_one_there_are_too_few():
    assert nodes.hosts([["t0", "t1", "t2"], ["r0"]], CONFIG, avoid=["t0"]) == ["t1", "t1", "t2", "t2", "r0"]
    assert nodes.hosts([["t0", "t1", "t2"], ["r0"]], CONFIG, avoid=["r0"]) is None
    assert nodes.hosts([["a", "b", "c"]], CONFIG, avoid=["b"]) is None


def test_colocated_both_roles_are_on_all_nodes():
    both = CONFIG.model_copy(update={"run": SimpleNamespace(placement="colocate")})
    assert nodes.hosts([["a", "b"]], both) == ["a", "a", "b", "b"] * 2
    assert nodes.hosts([["a", "b"]], both, avoid=["b"]) is None


def test_slurms_variables(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "t[0-1],r0")
    assert nodes.allocated() == [["t0", "t1", "r0"]]
    for number, names in enumerate(("t[0-1]", "r0")):
        monkeypatch.setenv(f"SLURM_JOB_NODELIST_HET_GROUP_{number}", names)
    assert nodes.allocated() == [["t0", "t1"], ["r0"]]
