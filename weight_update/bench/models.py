"""Models of a wanted size and number of tensors, with names that an engine knows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

_VOCABULARY = 256
_HEADS = 2


@dataclass(frozen=True)
class ModelShape:
    """A Llama of so many tensors and about so many bytes, in fp32.

    A layer has nine tensors; embedding and final norm make two more, and a head that is not
    tied one more.

    Args:
        tensors: How many; one that no Llama has is rounded up.
        nbytes: About how many bytes in all.

    Example:
        >>> ModelShape(300, 1_000_000_000).layers, ModelShape(20_000, 1_000_000_000).tied
        (33, True)
    """

    tensors: int
    nbytes: int

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return max(1, math.ceil((self.tensors - 3) / 9))

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.tensors <= 9 * self.layers + 2

    @property
    def hidden(self) -> int:
        """Width: attention takes four squares of it, an MLP of twice the width six."""
        width = math.sqrt(self.nbytes / 4 / self.layers / 10)
        return max(8, 4 * round(width / 4))

    def config(self) -> Any:
        """The transformers configuration."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=_HEADS,
            num_key_value_heads=_HEADS,
            tie_word_embeddings=self.tied,
        )

    def build(self, device: torch.device) -> Any:
        """The model, with arbitrary values, none of them NaN."""
        from transformers import LlamaForCausalLM

        with torch.device("meta"):
            model = LlamaForCausalLM(self.config())
        model.to_empty(device=device)
        model.tie_weights()
        for index, parameter in enumerate(model.parameters()):
            parameter.detach().fill_(1.0 + index % 7)
        return model.eval().requires_grad_(False)


@torch.no_grad()
def change(model: Any) -> None:
    """Gives every parameter other values than it had before."""
    for parameter in model.parameters():
        parameter.add_(1.0)
