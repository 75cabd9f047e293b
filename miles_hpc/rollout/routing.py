"""The experts that the engine chose, from SGLang's answer to the form that is stored."""

from base64 import b64decode
from typing import Any

import numpy as np

from miles_hpc.train.convert import is_moe_layer


class Recorder:
    """Decodes SGLang's `routed_experts`: base64 of int32, all layers, no row for the last token.

    Args:
        config: transformers configuration of an MoE model.
    """

    def __init__(self, config: Any) -> None:
        self.layers, self.top_k = config.num_hidden_layers, config.num_experts_per_tok
        self.moe_layers = [i for i in range(self.layers) if is_moe_layer(config, i)]
        self.kind = np.uint8 if config.num_experts <= 256 else np.uint16

    def __call__(self, text: str, tokens: int) -> np.ndarray:
        """[tokens, MoE layers, top_k], see `Samples.routing`."""
        found = np.frombuffer(b64decode(text), np.int32).reshape(tokens - 1, self.layers, self.top_k)
        routing = np.zeros((tokens, len(self.moe_layers), self.top_k), self.kind)
        routing[:-1] = np.sort(found[:, self.moe_layers], -1)
        return routing
