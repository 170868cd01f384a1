"""The models of the soak, and the judgement whether tokens were made by the weights they name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

SEEDS = (0, 1, 2, 3)
BASE = SEEDS[0]
"""The model that engines start with."""

_VOCABULARY = 64
# Engines decode in batches, and a batch may turn a near tie of two tokens around.
_TIE = 1e-3

PROMPTS: tuple[tuple[int, ...], ...] = tuple(
    tuple((7 * row + 11 * column + row * column) % (_VOCABULARY - 4) + 2 for column in range(8))
    for row in range(8)
)


def tiny_model(seed: int) -> Any:
    """A random Llama of 21 tensors whose greedy tokens differ from those of other seeds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@dataclass(frozen=True)
class Stretch:
    """Tokens of an answer that one version made.

    Attributes:
        seed: The model which that version is.
        start: Its first token.
        end: Behind its last token.
        carried: Whether it may go on from the keys and values of the stretch before; those of
            an update that retracts or aborts are always computed anew.
    """

    seed: int
    start: int
    end: int
    carried: bool = False


@dataclass
class Judge:
    """Recomputes what the models say, token by token.

    Attributes:
        models: By seed.
    """

    models: dict[int, Any] = field(
        default_factory=lambda: {seed: tiny_model(seed) for seed in SEEDS}
    )
    _known: set[tuple[Any, ...]] = field(default_factory=set, init=False, repr=False)

    def made_by(self, prompt: int, output: Sequence[int], stretches: Sequence[Stretch]) -> bool:
        """Whether the output is the greedy answer of these models to a prompt.

        A stretch that is carried may go on from all the keys and values that earlier weights
        left, from its own ones (the request may have been aborted and begun anew meanwhile), or
        from what the prefix cache had of the earlier ones (it may have been retracted).
        """
        key = (prompt, tuple(output), tuple(stretches))
        if key in self._known:
            return True
        right = self._follows([*PROMPTS[prompt], *output], len(PROMPTS[prompt]), stretches)
        if right and len(stretches) == 1:  # few, and most answers are one of them
            self._known.add(key)
        return right

    def _follows(
        self,
        tokens: list[int],
        start: int,
        stretches: Sequence[Stretch],
        before: Stretch | None = None,
        past: Any = None,
    ) -> bool:
        """Whether the stretches can follow on one that left ``past`` behind."""
        if not stretches:
            return True
        stretch, *rest = stretches
        first, last = start + stretch.start, start + stretch.end
        for own in self._pasts(past, before, stretch, tokens[: first - 1]):
            after = self._continued(own, tokens[:last], first, stretch.seed)
            if after is not None and self._follows(tokens, start, rest, stretch, after):
                return True
        return False

    def _pasts(
        self, past: Any, before: Stretch | None, stretch: Stretch, known: list[int]
    ) -> Iterator[Any]:
        """Keys and values from which a stretch may go on, the likely ones first."""
        if before is not None and stretch.carried:
            yield past
            for length in range(len(known), 0, -1):
                yield self._run(before.seed, known[:length], None).past_key_values
        yield None

    def _continued(self, past: Any, tokens: list[int], first: int, seed: int) -> Any:
        """Keys and values behind the last token; None if a model does not say it so."""
        done = 0 if past is None else past.get_seq_length()
        wanted = torch.tensor(tokens[first:])
        out = self._run(seed, tokens[done:-1], past)
        logits = out.logits[0, -len(wanted) :]
        given = logits.gather(1, wanted[:, None])[:, 0]
        right = bool((logits.max(dim=1).values - given < _TIE).all())
        return out.past_key_values if right else None

    @torch.inference_mode()
    def _run(self, seed: int, tokens: list[int], past: Any) -> Any:
        ids = torch.tensor([tokens])
        return self.models[seed](input_ids=ids, past_key_values=past, use_cache=True)

    def greedy(self, seed: int, prompt: int, count: int) -> list[int]:
        """What a model says after a prompt."""
        ids = torch.tensor([PROMPTS[prompt]])
        with torch.inference_mode():
            out = self.models[seed].generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
            )
        return list(out[0, ids.shape[1] :].tolist())
