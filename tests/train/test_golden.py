"""Values and gradients of verl 0.9.1 and trl 1.16.0, to 1e-6; see golden/README.md."""

from pathlib import Path

import numpy as np
import pytest
import torch

from miles_hpc.config import Train
from miles_hpc.train.advantage import group_advantages, reinforce_pp, reinforce_pp_baseline
from miles_hpc.train.correction import CORRECTIONS
from miles_hpc.train.divergence import ESTIMATORS
from miles_hpc.train.loss import LOSSES, Tokens, token_weights
from miles_hpc.train.objective import Objective
from miles_hpc.train.value import gae, value_loss, whiten

with np.load(Path(__file__).parent / "golden" / "golden.npz") as file:
    GOLDEN = {name: torch.from_numpy(file[name]) for name in file}
MASK = GOLDEN["in/mask"] > 0
LENGTHS = MASK.sum(1)
LONGEST = MASK.shape[1]
GROUP = 4
VERL = {
    "ppo": {"clip_high": 0.28},
    "ppo_sequence": {"loss_mean": "sequence"},
    "dual_clip": {"clip_high": 0.28, "dual_clip": 1.5},
    "dr_grpo": {"loss_mean": "constant"},
    "gspo": {"loss": "gspo", "clip_low": 0.03, "clip_high": 0.04, "loss_mean": "sequence"},
    "cispo": {"loss": "cispo", "clip_high": 0.28},
}
TRL = {
    "grpo": {"loss_mean": "sequence"},
    "grpo_kl": {"loss_mean": "sequence", "kl_coef": 0.1},
    "kl_unbiased": {"loss_mean": "sequence", "kl_coef": 0.1, "kl": "k3_unbiased"},
    "dapo": {"clip_high": 0.28},
    "dr_grpo": {"loss_mean": "constant"},
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.3},  # trl: no lower clip, the upper one at 1.3
    "gspo": {"loss": "gspo", "clip_low": 0.03, "clip_high": 0.04, "loss_mean": "sequence"},
}


def close(ours: torch.Tensor, golden: torch.Tensor) -> None:
    torch.testing.assert_close(ours, golden, rtol=1e-6, atol=1e-6, check_dtype=False)


def tokens(reference: bool = True) -> Tokens:
    """The masked tokens of the inputs, flat; `log_probs` is a leaf."""
    flat = {name: GOLDEN[f"in/{name}"][MASK] for name in ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs")}
    sample = torch.nonzero(MASK)[:, 0]
    return Tokens(
        log_probs=flat["log_probs"].requires_grad_(),
        old_log_probs=flat["old_log_probs"],
        advantages=GOLDEN["in/advantages"][sample],
        sample=sample,
        samples=len(MASK),
        rollout_log_probs=flat["rollout_log_probs"],
        ref_log_probs=flat["ref_log_probs"] if reference else None,
    )


def objective(**train) -> Objective:
    settings = Train(lr=0.0, **train)
    return Objective(settings, LOSSES[settings.loss], CORRECTIONS[settings.correction], ESTIMATORS[settings.kl])


def check_loss(name: str, train: dict, scale: float = 1.0) -> None:
    made, t = objective(**train), tokens()
    weights = token_weights(LENGTHS, made.train.loss_mean, LONGEST)[t.sample] * scale
    loss = made(t, weights).loss
    loss.backward()
    close(loss.detach(), GOLDEN[f"{name}/value"])
    close(t.log_probs.grad, GOLDEN[f"{name}/grad"][MASK])


@pytest.mark.parametrize("name", VERL)
def test_golden_losses_of_verl(name):
    check_loss(f"verl/loss/{name}", VERL[name])


@pytest.mark.parametrize("name", TRL)
def test_golden_losses_of_trl(name):
    """trl divides by all samples, ours by those that have answer tokens."""
    per_token = TRL[name].get("loss_mean", "token") == "token"
    check_loss(f"trl/loss/{name}", TRL[name], 1.0 if per_token else float((LENGTHS > 0).sum()) / len(LENGTHS))


@pytest.mark.parametrize(("name", "ours"), [("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("k3+", "k3_k2")])
def test_golden_kl(name, ours):
    t = tokens()
    values = ESTIMATORS[ours](t.log_probs, t.ref_log_probs, t.old_log_probs)
    values.sum().backward()
    close(values.detach(), GOLDEN[f"verl/kl/{name}/value"][MASK])
    close(t.log_probs.grad, GOLDEN[f"verl/kl/{name}/grad"][MASK])


@pytest.mark.parametrize("name", ["group_std", "group_mean", "rloo"])
def test_golden_group_advantages(name):
    rewards = GOLDEN["in/rewards"].numpy()
    close(torch.from_numpy(group_advantages(rewards, GROUP, name)), GOLDEN[f"verl/advantage/{name}"])


def test_golden_reinforce_pp():
    rewards, lengths = GOLDEN["in/rewards"].numpy(), LENGTHS.numpy()
    for name, ours in (
        ("reinforce_pp", reinforce_pp(rewards, lengths)),
        ("reinforce_pp_baseline", reinforce_pp_baseline(rewards, lengths, GROUP)),
    ):
        close(torch.from_numpy(ours)[:, None] * MASK, GOLDEN[f"verl/advantage/{name}"])


def test_golden_gae_and_value_loss():
    advantages, returns = gae(GOLDEN["in/token_rewards"], GOLDEN["in/values"], MASK, 0.9, 0.8)
    close(whiten(advantages, MASK), GOLDEN["verl/advantage/gae"])
    close(returns, GOLDEN["verl/advantage/gae_returns"])
    values = GOLDEN["in/values"][MASK].requires_grad_()
    loss = value_loss(values, GOLDEN["in/old_values"][MASK], GOLDEN["in/token_rewards"][MASK], 0.5).mean()
    loss.backward()
    close(loss.detach(), GOLDEN["verl/value_loss/value"])
    close(values.grad, GOLDEN["verl/value_loss/grad"][MASK])


def test_geometric_mis_by_hand():
    """verl 0.9.1 has no such weight. Two samples whose mean log-ratios are log 2 and log 0.5."""
    train = Train(lr=0.0, correction="geometric_mis", correction_low=0.9, correction_high=2.5)
    log2 = float(np.log(2.0))
    old = torch.tensor([2 * log2, 0.0, -log2, -log2])
    t = Tokens(old.clone(), old, torch.ones(4), torch.tensor([0, 0, 1, 1]), 2, torch.zeros(4))
    close(CORRECTIONS["geometric_mis"](t, train), torch.tensor([2.0, 2.0, 0.0, 0.0]))


@pytest.mark.parametrize("name", ["tis", "icepop", "sequence_tis", "sequence_mis"])
def test_golden_corrections(name):
    low, high = (0.0, 1.2) if "tis" in name else (0.6, 1.5)
    train = Train(lr=0.0, correction=name, correction_low=low, correction_high=high)
    close(CORRECTIONS[name](tokens(), train), GOLDEN[f"verl/correction/{name}"][MASK])
