"""A trainer that leaves its device between steps."""

import pytest
import torch
from train_parts import config, run_steps, samples, trainer

from miles_hpc.train.advantage import group_advantages
from miles_hpc.train.sleep import _tensors


def gradients(made) -> int:
    """Bytes of the gradient buffers."""
    buffers = [*made.ddp.buffers, *made.ddp.expert_parallel_buffers]
    return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)


def state(made) -> int:
    """Bytes of the optimizer's tensors that are not the model's own."""
    own = {param.untyped_storage().data_ptr() for param in made.ddp.parameters()}
    storages = (tensor.untyped_storage() for tensor in _tensors(made.optimizer))
    return sum(storage.nbytes() for storage in storages if storage.data_ptr() not in own)


def weights(made) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.weights()}


def sleepy(offload: bool = True, **train):
    """A configuration with `train.offload`, which belongs to a colocated run."""
    usual = config(**train)
    return usual.model_copy(update={"train": usual.train.model_copy(update={"offload": offload})})


@pytest.mark.parametrize(
    ("family", "offload", "train"),
    [
        ("qwen3", True, {}),
        ("moe", True, {"dtype": "bfloat16"}),
        ("moe", False, {}),
        ("qwen3", True, {"advantage": "gae", "critic_lr": 1e-3}),
    ],
)
def test_steps_with_sleep_between_are_those_of_a_trainer_that_stays_awake(family, offload, train, models, tmp_path):
    with trainer(config(**train), models[family], tmp_path / "a") as made:
        expected = run_steps(made, 3)
    with trainer(sleepy(offload, **train), models[family], tmp_path / "b") as made:
        size, got = state(made), []
        for step in range(3):
            made.sleep(give_back=step == 0)
            made.sleep()
            before = weights(made)
            assert gradients(made) == 0 and state(made) == (0 if offload else size)
            made.wake()
            made.wake()
            assert gradients(made) > 0 and state(made) == size
            assert all(torch.equal(before[name], tensor) for name, tensor in made.weights())
            s = samples(seed=step)
            got.append(made.step(s, group_advantages(s.rewards, 4), step).metrics)
        assert got == expected["metrics"]
        assert all(torch.equal(expected["weights"][name], tensor) for name, tensor in made.weights())


def test_what_was_saved_after_a_sleep_resumes_to_the_same_weights(models, tmp_path):
    settings = sleepy()
    (tmp_path / "saved").mkdir()
    with trainer(settings, models["qwen3"], tmp_path / "a") as made:
        run_steps(made, 1)
        made.sleep()
        made.wake()
        made.save(tmp_path / "saved", {})
        expected = run_steps(made, 1)
    with trainer(settings, models["qwen3"], tmp_path / "b") as made:
        made.sleep()
        made.wake()
        made.load(tmp_path / "saved")  # new tensors take the place of those that slept
        made.sleep()
        made.wake()
        got = run_steps(made, 1)
    assert got["metrics"] == expected["metrics"]
    assert all(torch.equal(expected["weights"][name], tensor) for name, tensor in got["weights"].items())
