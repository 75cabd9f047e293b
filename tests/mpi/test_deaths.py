"""Engines that die or hang, in a real MPI world with real gloo groups: nobody blocks, and nobody answers with old weights."""

import json

import pytest
from safetensors.torch import load_file

from miles_hpc.examples import arithmetic

pytestmark = pytest.mark.mpi
VERSIONS, REQUESTS = 4, 6


@pytest.fixture
def model(tmp_path):
    arithmetic.model(tmp_path, seed=0)
    return tmp_path


def told(model) -> dict:
    return json.loads((model / "told").read_text())


def answered_by_every_version(model, rollout: list[int]) -> bool:
    """Every request has one answer, given by an engine that held the right version."""
    weight = load_file(model / "model.safetensors")["model.norm.weight"]
    for version, step in enumerate(told(model)["steps"]):
        value = round((weight + version + 1).sum().item())
        if sorted(a[:3] for a in step["answers"]) != [[rank, i, value] for rank in rollout for i in range(REQUESTS)]:
            return False
    return True


@pytest.mark.parametrize("seed", [[], ["1"], *(pytest.param([str(seed)], marks=pytest.mark.long) for seed in range(2, 9))])
def test_without_a_fault_every_version_reaches_every_engine(mpi, model, seed):
    """Whatever comes late, by chance of the seed: messages, and what the engines do."""
    done = mpi("deaths", *seed, train=2, rollout=2)
    assert done.returncode == 0, done.stdout + done.stderr
    size = sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())
    steps = told(model)["steps"]
    assert [step["size"] for step in steps] == [size] * VERSIONS
    assert {step["digests"] for step in steps} == {2 * 21}
    assert answered_by_every_version(model, [2, 3])
    assert (told(model)["rounds"], told(model)["deaths"]) == (VERSIONS, [])


@pytest.mark.parametrize(
    ("fault", "given_up"),
    [
        ("init_weights_update_group 1 SIGKILL", 1),  # before the first weights
        pytest.param("update_weights_from_distributed 2 SIGKILL", 1, marks=pytest.mark.long),
        ("update_weights_from_distributed 2 SIGSTOP", 1),
        pytest.param("checksum 2 SIGKILL", 1, marks=pytest.mark.long),
        pytest.param("checksum 2 SIGSTOP", 1, marks=pytest.mark.long),
        ("checksum-answered 2 SIGKILL", None),  # before or after the trainer has compared, whoever is faster
        ("answer 9 SIGKILL", 0),  # in a generation
        pytest.param("answer 9 SIGSTOP", 0, marks=pytest.mark.long),
        ("answer 24 SIGKILL", 0),  # with the last weights
    ],
)
def test_an_engine_that_dies_or_hangs_starts_again_with_the_newest_weights(mpi, model, fault, given_up):
    (model / "fault-3").write_text(fault)
    helps = fault.startswith("answer 9")
    hangs = "SIGSTOP" in fault or fault.startswith("init")  # whose peer dies in the rendezvous stays there
    how = ["1"] * (given_up is None) + ["patient"] * helps + ["hasty"] * hangs
    done = mpi("deaths", *how, train=2, rollout=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (model / "fault-3").exists()
    assert answered_by_every_version(model, [2, 3])
    deaths = [death["rank"] for death in told(model)["deaths"]].count(3)
    helped = [a[3] for step in told(model)["steps"] for a in step["answers"] if a[0] == 3].count(2)
    found = (deaths, sum(step["given_up"] for step in told(model)["steps"]), helped)
    wanted = (1, *found[1:]) if given_up is None else (1, given_up, 4 * helps)
    if hangs:  # hasty ranks may give up more, that was only slow
        assert all(a >= b for a, b in zip(found, wanted, strict=True))
    else:
        assert found == wanted  # help comes from the engine with nothing to do


@pytest.mark.parametrize(
    "name", [pytest.param("init_weights_update_group", marks=pytest.mark.long), "update_weights_from_distributed"]
)
def test_an_engine_that_lives_and_always_refuses_ends_the_attempt(mpi, model, name):
    """Such as two ranks on one GPU, which NCCL does not take: rounds without end would only fill its memory."""
    (model / "fault-3").write_text(f"{name} refused")
    done = mpi("deaths", *["hasty"] * name.startswith("init"), train=2, rollout=2)
    assert done.returncode != 0
    if name.startswith("init") and (model / "refused-rollout").exists():  # the one that waited for it there died as often
        assert (model / "refused-rollout").read_text().startswith("the engine ended 3 times within 5 versions")
        assert f"rollout rank 3: the engine refused {name}: {name} cannot be done here" in done.stdout
    else:
        said = (model / "refused-train").read_text()
        assert said.startswith("3 rounds in a row did not bring the weights to engines that live; the last: rollout rank 3")
        assert f"{name} cannot be done here" in said
