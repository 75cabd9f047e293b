"""SGLang's sampler backend with keyed noise. Imported by `plugin.register` only, inside SGLang's processes."""

from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler

from miles_hpc.kernels import logprob
from miles_hpc.rollout import noise


class KeyedSampler(Sampler):
    """Samples from softmax(logits / temperature) with noise keyed by each request's `sampling_seed` and the position.

    Reports log_softmax(logits / temperature) in float32, the formula of the trainer. Top-p, top-k and min-p are not applied:
    the trainer's log-probs would not be those of the sampler.
    """

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        positions: Any,
    ) -> torch.Tensor:
        """Token ids, int32 [requests]; log-probs go into `logits_output`."""
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        log_probs = self.log_softmax(logits, sampling_info.temperatures)
        greedy = sampling_info.top_ks <= 1
        tokens = noise.choose(log_probs, sampling_info.sampling_seed, positions, greedy).to(torch.int32)
        if return_logprob:
            processor = self.output_logprob_processor
            processor.compute_logprobs(log_probs, top_logprobs_nums, token_ids_logprobs, tokens).write_output_to(logits_output)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens

    def log_softmax(self, logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """[requests, vocabulary], [requests, 1] -> [requests, vocabulary] float32."""
        return torch.log_softmax(logits.float() / temperatures, dim=-1)


class ExactSampler(KeyedSampler):
    """With the trainer's formula, bit for bit."""

    def log_softmax(self, logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """[requests, vocabulary], [requests, 1] -> [requests, vocabulary] float32."""
        return logprob.log_softmax(logits, temperatures)


def carry_seeds(info: Any, batch: Any, vocab_size: int) -> None:
    """Hook of `SamplingBatchInfo`: seeds reach the sampler, which 0.5.16 does in its (slower) deterministic mode only."""
    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
