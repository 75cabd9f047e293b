"""Write golden.npz: values and gradients by verl 0.9.1 and trl 1.16.0 (README.md says in which environment)."""

import types
from pathlib import Path

import numpy as np
import torch
import verl.trainer.ppo.core_algos as verl
from trl.trainer.grpo_trainer import GRPOTrainer
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

LENGTHS, LONGEST, GROUP = [7, 3, 5, 1, 0, 6, 2, 7], 7, 4
ACTOR = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
VERL_LOSSES = {
    "ppo": ("vanilla", "token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e9}),
    "ppo_sequence": ("vanilla", "seq-mean-token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1e9}),
    "dual_clip": ("vanilla", "token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1e9}),
    "gspo": ("gspo", "seq-mean-token-mean", {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04}),
    "cispo": ("cispo", "token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}),
}
TRL_LOSSES = {
    "grpo": {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    "grpo_kl": {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.1},
    "kl_unbiased": {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.1, "bias": True},
    "dapo": {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    "cispo": {"loss_type": "cispo", "epsilon_low": 0.2, "epsilon_high": 1.3},
    "gspo": {"loss_type": "grpo", "epsilon_low": 0.03, "epsilon_high": 0.04, "level": "sequence"},
}


def inputs() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    shape = (len(LENGTHS), LONGEST)
    mask = (torch.arange(LONGEST)[None] < torch.tensor(LENGTHS)[:, None]).float()
    log_probs = -torch.rand(shape, generator=g) * 3 - 0.05
    noise = {name: torch.randn(shape, generator=g) * s for name, s in (("old", 0.3), ("rollout", 0.4), ("ref", 0.5))}
    return {
        "mask": mask,
        "log_probs": log_probs,
        "old_log_probs": log_probs + noise["old"],
        "rollout_log_probs": log_probs + noise["rollout"],
        "ref_log_probs": log_probs + noise["ref"],
        "advantages": torch.randn(len(LENGTHS), generator=g),
        "rewards": torch.tensor([1.0, 0.0, 0.5, 1.0, 0.25, 0.25, 0.25, 0.25]),
        "token_rewards": torch.randn(shape, generator=g),
        "values": torch.randn(shape, generator=g),
        "old_values": torch.randn(shape, generator=g),
        "entropy": torch.rand(shape, generator=g),
    }


def with_gradient(name: str, x: torch.Tensor, function) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    value = function(x)
    value.sum().backward()
    return {f"{name}/value": value.detach(), f"{name}/grad": x.grad}


def verl_losses(i) -> dict[str, torch.Tensor]:
    found = {}
    advantages = i["advantages"][:, None] * i["mask"]
    for name, (kind, mode, options) in VERL_LOSSES.items():
        config = ActorConfig(**ACTOR, clip_ratio=0.2, **options)
        loss = verl.get_policy_loss_fn(kind)
        found |= with_gradient(
            f"verl/loss/{name}",
            i["log_probs"],
            lambda x, loss=loss, mode=mode, config=config: loss(
                i["old_log_probs"], x, advantages, i["mask"], loss_agg_mode=mode, config=config
            )[0],
        )
    for kind in ("k1", "k2", "k3", "k3+"):
        found |= with_gradient(
            f"verl/kl/{kind}", i["log_probs"], lambda x, kind=kind: verl.kl_penalty(x, i["ref_log_probs"], kind) * i["mask"]
        )
    found |= with_gradient(
        "verl/value_loss",
        i["values"],
        lambda x: verl.compute_value_loss(x, i["token_rewards"], i["old_values"], i["mask"], 0.5)[0],
    )
    return found


def verl_advantages(i) -> dict[str, torch.Tensor]:
    scores = torch.zeros_like(i["mask"])
    scores[:, 0] = i["rewards"]
    whole = torch.ones_like(i["mask"])
    lengths = torch.where(i["mask"].sum(1, keepdim=True) > 0, i["mask"], whole * 0)
    index = np.repeat(np.arange(2), GROUP)
    config = AlgoConfig(gamma=1.0)
    last = torch.zeros_like(i["mask"])
    for row, length in enumerate(LENGTHS):
        last[row, max(0, length - 1)] = i["rewards"][row]
    found = {
        "group_std": verl.compute_grpo_outcome_advantage(scores.clone(), whole, index)[0][:, 0],
        "group_mean": verl.compute_grpo_outcome_advantage(scores.clone(), whole, index, norm_adv_by_std_in_grpo=False)[0][:, 0],
        "rloo": verl.compute_rloo_outcome_advantage(scores.clone(), whole, index)[0][:, 0],
        "reinforce_pp": verl.compute_reinforce_plus_plus_outcome_advantage(last, lengths, config)[0],
        "reinforce_pp_baseline": verl.compute_reinforce_plus_plus_baseline_outcome_advantage(last.clone(), lengths, index)[0],
    }
    advantages, returns = verl.compute_gae_advantage_return(i["token_rewards"], i["values"], i["mask"], 0.9, 0.8)
    found |= {"gae": advantages * i["mask"], "gae_returns": returns * i["mask"]}
    return {f"verl/advantage/{name}": values for name, values in found.items()}


def verl_corrections(i) -> dict[str, torch.Tensor]:
    ratio = (i["old_log_probs"] - i["rollout_log_probs"]) * i["mask"]
    kinds = {"tis": ("token", 1.2), "icepop": ("token", "0.6_1.5"), "sequence_tis": ("sequence", 1.2)}
    kinds["sequence_mis"] = ("sequence", "0.6_1.5")
    return {
        f"verl/correction/{name}": compute_rollout_correction_weights(ratio, i["mask"], level, threshold)[0]
        for name, (level, threshold) in kinds.items()
    }


class Trl:
    """As much of a GRPOTrainer as its loss reads."""

    top_entropy_quantile, off_policy_mask_threshold, aux_loss_enabled, use_vllm = 1.0, None, False, False
    vllm_importance_sampling_correction, current_gradient_accumulation_steps = False, 1
    max_completion_length, _entropy_bonus_enabled, use_adaptive_entropy = LONGEST, False, False

    def __init__(self, i, loss_type, epsilon_low, epsilon_high, beta=0.0, bias=False, level="token") -> None:
        from collections import defaultdict

        self.i, self.loss_type, self.epsilon_low, self.epsilon_high, self.beta = i, loss_type, epsilon_low, epsilon_high, beta
        self.importance_sampling_level = level
        self.args = types.SimpleNamespace(delta=None, use_bias_correction_kl=bias, steps_per_generation=1)
        self.accelerator = types.SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x
        )
        self.model = types.SimpleNamespace(training=True)
        self._metrics = {"train": defaultdict(list)}

    def _get_per_token_logps_and_entropies(self, *unused, **fields):
        return self.x, self.i["entropy"], None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.x = x
        ids = torch.zeros(x.shape, dtype=torch.long)
        batch = {
            "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": self.i["mask"],
            "advantages": self.i["advantages"], "old_per_token_logps": self.i["old_log_probs"],
            "ref_per_token_logps": self.i["ref_log_probs"], "num_items_in_batch": self.i["mask"].sum(),
        }  # fmt: skip
        return GRPOTrainer._compute_loss(self, None, batch)


def main() -> None:
    i = inputs()
    found = {f"in/{name}": value for name, value in i.items()}
    found |= verl_losses(i) | verl_advantages(i) | verl_corrections(i)
    for name, options in TRL_LOSSES.items():
        found |= with_gradient(f"trl/loss/{name}", i["log_probs"], Trl(i, **options))
    file = Path(__file__).with_name("golden.npz")
    np.savez_compressed(file, **{name: value.numpy() for name, value in found.items()})
    print(len(found), "arrays,", file.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
