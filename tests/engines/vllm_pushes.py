"""Whole models to real vLLM servers, and what their greedy output says of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weight_update.delivery.delivery import Delivery
from weight_update.delivery.vllm import VLLMDeployment
from weight_update.options import UpdateOptions
from weight_update.report import UpdateReport

from .models import shortfall
from .vllm_server import VLLMServer, vllm_llama

PROMPT = [3, 14, 15, 92, 65]
TOKENS = 24
SECONDS = 60.0
BUCKET_BYTES = 200_000  # six buckets
# Of fp32 logits, whichever kernel made them; those of other weights are apart by far more.
NEAR = 1e-3


@contextmanager
def delivery_to(*servers: VLLMServer, **options: Any) -> Iterator[Delivery]:
    """What brings weights to servers; it lets go of them at the end."""
    urls = [server.url for server in servers]
    delivery = Delivery(urls, UpdateOptions(**{"timeout": SECONDS, **options}), VLLMDeployment)
    try:
        yield delivery
    finally:
        delivery.shutdown()


def push(delivery: Delivery, source: Any, **more: Any) -> UpdateReport:
    """Update the servers with a source."""
    return delivery.update(lambda: source, **more)


def serves(server: VLLMServer, seed: int, prompt: list[int] = PROMPT) -> bool:
    """Tell whether a server computes what the model of a seed does, token for token."""
    return holds(server, vllm_llama(seed), prompt)


def holds(server: VLLMServer, model: Any, prompt: list[int] = PROMPT) -> bool:
    """Tell whether each of the server's tokens is the model's own greedy choice."""
    return shortfall(model, prompt, server.generate(prompt, TOKENS)) == 0


@torch.no_grad()
def is_of_both(prompt: list[int], tokens: list[int], old: int, new: int, at_least: int) -> bool:
    """Tell whether greedy tokens begin as the old model's, and all later ones are the new one's."""
    wrong_of = {}
    for seed in (old, new):
        logits = vllm_llama(seed)(input_ids=torch.tensor([prompt + tokens])).logits[0]
        logits = logits[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        wrong_of[seed] = logits.amax(1) - chosen > NEAR
    first_not_old = int(wrong_of[old].int().argmax()) if wrong_of[old].any() else len(tokens)
    places = wrong_of[new].nonzero()
    first_all_new = int(places[-1]) + 1 if len(places) else 0
    return at_least <= first_all_new <= first_not_old < len(tokens)


def with_weight(seed: int, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights of a model, one of them replaced."""
    return {**vllm_llama(seed).state_dict(), name: value}


Change = Callable[[], dict[str, torch.Tensor]]
