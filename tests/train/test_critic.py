"""The critic and the teacher in a training step, on a tiny dense and a tiny MoE model."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from train_parts import config, hf_model, samples, trainer, write_model

from miles_hpc import device
from miles_hpc.errors import ModelError
from miles_hpc.train.packing import pack

PPO = {"advantage": "gae", "critic_lr": 3e-3, "lr": 1e-3, "mini_batches": 2, "value_clip": 10.0}


def _steps(made, data, steps, first=0):
    return [made.step(data, data.rewards, step).metrics for step in range(first, first + steps)]


def _critic(made):
    return {name: value.clone() for name, value in made.critic.model.module.state_dict().items() if value is not None}


@pytest.mark.parametrize("family", ["qwen3", "moe", "llama"])
def test_the_critic_learns_to_tell_good_samples(family, models, tmp_path):
    """Its values explain the returns of samples that it has seen; at first all are 0."""
    data = samples()
    with trainer(config(**PPO | {"lr": 0.0}), models[family], tmp_path / "store") as made:
        metrics = _steps(made, data, 25)
        before, policy = made.critic.model.module.state_dict(), made.policy.module.state_dict()
        assert not torch.equal(before["embedding.word_embeddings.weight"], policy["embedding.word_embeddings.weight"])
    assert metrics[0]["train/value_explained"] < 0.1 and metrics[-1]["train/value_explained"] > 0.5
    assert metrics[-1]["train/value_loss"] < metrics[0]["train/value_loss"] / 2


def test_the_advantages_are_those_of_gae_by_hand(models, tmp_path):
    """With values of 0, gamma = 1: the reward, decayed by lambda towards the start of the answer, whitened over all tokens."""
    from miles_hpc.train.critic import Critic

    data, seen = samples(), {}
    assess = Critic.assess

    def spy(self, facts, *rest):
        found = assess(self, facts, *rest)
        seen.setdefault("advantages", facts.advantages.copy())
        return found

    with pytest.MonkeyPatch.context() as patch, trainer(config(**PPO), models["qwen3"], tmp_path / "store") as made:
        patch.setattr(Critic, "assess", spy)
        _steps(made, data, 1)
    lengths = data.answer_lengths
    raw = np.concatenate([r * 0.95 ** np.arange(n - 1, -1, -1) for r, n in zip(data.rewards, lengths, strict=True)])
    expected = (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(seen["advantages"][data.loss_mask == 1], expected, atol=1e-5)


def test_values_are_of_the_state_before_each_token(models, tmp_path):
    """Changing the last token of an answer changes no value, changing the prompt's first changes all."""
    data = samples()
    with trainer(config(**PPO), models["moe"], tmp_path / "store") as made:
        _steps(made, data, 2)
        first = pack(data, np.arange(1), 1, device.device())
        values = made.critic.model.values(first)
        tokens = first.tokens.clone()
        tokens[0, -1] += 1
        torch.testing.assert_close(
            made.critic.model.values(dataclasses.replace(first, tokens=tokens)), values, rtol=0, atol=1e-6
        )
        tokens[0, 0] += 1
        assert (made.critic.model.values(dataclasses.replace(first, tokens=tokens)) != values).all()


def test_a_resumed_run_has_the_same_critic(models, tmp_path):
    """Bit for bit, optimizer included: two steps, a checkpoint, two more, in one go and in two processes' worth of trainers."""
    data, folder = samples(), tmp_path / "checkpoint"
    with trainer(config(**PPO), models["moe"], tmp_path / "a") as made:
        _steps(made, data, 2)
        folder.mkdir()
        made.save(folder, {})
        expected = _steps(made, data, 2, first=2), _critic(made)
    with trainer(config(**PPO), models["moe"], tmp_path / "b") as made:
        made.load(folder)
        found = _steps(made, data, 2, first=2), _critic(made)
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys() and all(torch.equal(found[1][n], expected[1][n]) for n in expected[1])


def test_equal_rewards_teach_the_critic_and_give_no_nan(models, tmp_path):
    data = dataclasses.replace(samples(), rewards=np.zeros(len(samples()), np.float32))
    with trainer(config(**PPO | {"gae_lambda": 1.0}), models["qwen3"], tmp_path / "store") as made:
        metrics = _steps(made, data, 2)
    assert np.isfinite([value for m in metrics for value in m.values()]).all()
    assert metrics[0]["train/loss"] == pytest.approx(0, abs=1e-6)


def test_a_student_comes_closer_to_its_teacher(models, tmp_path):
    """The sampled tokens' log-probs rise where the teacher's are higher and fall where they are lower."""
    write_model("moe", tmp_path / "teacher", hidden_size=32)
    data = samples()
    settings = config(advantage="none", teacher=str(tmp_path / "teacher"), lr=1e-3)
    with trainer(settings, models["qwen3"], tmp_path / "store") as made:
        teacher, ours = np.zeros(len(data.tokens), np.float32), []
        made._score(made.teacher, data, [np.arange(len(data))], teacher, None)
        for step in range(12):
            result = made.step(data, np.zeros(len(data), np.float32), step)
            data = dataclasses.replace(data, rollout_log_probs=result.train_log_probs)
            ours.append(result.train_log_probs)
    apart = [np.abs(log_probs - teacher)[data.loss_mask == 1].mean() for log_probs in ours]
    assert apart[-1] < apart[0] * 0.7
    difference = (ours[-2] - teacher)[data.loss_mask == 1].mean()
    assert result.metrics["train/teacher_kl"] == pytest.approx(difference, abs=1e-5)
    assert result.metrics["train/trained_tokens"] == data.loss_mask.sum()
    start, end = data.offsets[0], data.offsets[1]
    tokens = torch.from_numpy(data.tokens[start:end]).long()
    log_probs = hf_model("moe", hidden_size=32)(tokens[None]).logits[0].log_softmax(-1)
    expected = log_probs[:-1].gather(1, tokens[1:, None])[:, 0].detach().numpy() * data.loss_mask[start + 1 : end]
    np.testing.assert_allclose(teacher[start + 1 : end], expected, atol=1e-5)


def test_a_teacher_that_cannot_be_split_alike_is_refused(models, tmp_path):
    shutil.copytree(models["qwen3"], tmp_path / "teacher")
    (tmp_path / "teacher" / "model.safetensors").unlink()
    settings = config(teacher=str(tmp_path / "teacher"))
    with pytest.raises(ModelError, match=r"no \*\.safetensors"), trainer(settings, models["qwen3"], tmp_path / "store"):
        pass
