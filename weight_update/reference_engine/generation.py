"""Generating tokens for a batch of requests, with a KV cache and a prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

# A request that is not streamed reports its tokens to the HTTP layer by as many.
_TOKENS_A_REPORT = 50


@dataclass(frozen=True)
class Sampling:
    """How one request wants its tokens chosen."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    stop_tokens: frozenset[int] = frozenset()
    seed: int | None = None


@dataclass(eq=False)
class GenerateRequest:
    """One prompt on its way through the scheduler.

    ``kv`` holds the keys and values of the first ``kv_length`` tokens, for all layers in one
    tensor of shape [2 * layers, heads, tokens, head size]; it is never written in place.
    """

    rid: str
    tokens: list[int]
    sampling: Sampling
    extra_key: str | None = None
    answer: Future[dict[str, Any]] = field(default_factory=Future)
    prompt_length: int = 0
    kv: torch.Tensor | None = None
    cached_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    retractions: int = 0
    joining: bool = False
    aborted: bool = False
    aborted_waiting: bool = False
    random: torch.Generator | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Go to other ranks as it was asked."""
        return GenerateRequest, (self.rid, self.tokens, self.sampling, self.extra_key)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        if self.sampling.seed is not None:
            self.random = torch.Generator().manual_seed(self.sampling.seed)

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.prompt_length :]

    @property
    def kv_length(self) -> int:
        """How many tokens have their keys and values computed."""
        return 0 if self.kv is None else self.kv.shape[2]

    @property
    def pending(self) -> int:
        """How many tokens the next forward pass must take: 1 while decoding."""
        return len(self.tokens) - self.kv_length

    def retract(self) -> None:
        """Give up the keys and values; they are computed again when the request runs again."""
        self.kv = None
        self.retractions += 1

    def abort_waiting(self) -> None:
        """End before running (again); tokens that were not reported yet are lost, as in SGLang."""
        reported = len(self.versions) // _TOKENS_A_REPORT * _TOKENS_A_REPORT
        del self.tokens[self.prompt_length + reported :]
        del self.versions[reported:], self.logprobs[reported:]
        self.aborted_waiting = True

    def finish_reason(self) -> dict[str, Any] | None:
        """Why this request is done, or None if it is not."""
        if self.versions and self.tokens[-1] in self.sampling.stop_tokens:
            return {"type": "stop", "matched": self.tokens[-1]}
        if len(self.versions) >= self.sampling.max_new_tokens:
            return {"type": "length", "length": self.sampling.max_new_tokens}
        if self.aborted_waiting:
            return {"type": "abort", "message": "Abort in waiting queue"}
        if self.aborted:
            why = {"message": "Aborted", "status_code": None, "err_type": None}
            return {"type": "abort", **why}
        return None


# The key that a sequence came under, and its tokens.
_Sequence = tuple[str | None, tuple[int, ...]]


class PrefixCache:
    """Keys and values of earlier token sequences, found by their longest common prefix.

    An entry says nothing about the weights that computed it: after an update it is stale, and
    is used all the same until somebody flushes. That is the real engine's behaviour.
    Sequences that came under different keys share nothing.
    """

    def __init__(self, capacity: int = 128) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[_Sequence, torch.Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def put(
        self, tokens: Sequence[int], kv: torch.Tensor, extra_key: str | None = None
    ) -> torch.Tensor:
        """Keep ``kv`` for ``tokens``, and return what is kept: older values stay."""
        key = tuple(tokens)
        known = [tokens for own, tokens in self._entries if own == extra_key]
        covering = next((each for each in known if each[: len(key)] == key), None)
        if covering is not None:
            return self._entries[extra_key, covering][:, :, : len(key)]
        if not self._capacity:
            return kv
        for each in [each for each in known if key[: len(each)] == each]:
            del self._entries[extra_key, each]
        # A copy: ``kv`` is a view that would keep its whole batch alive.
        self._entries[extra_key, key] = kv.clone()
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        return kv

    def longest(self, tokens: Sequence[int], extra_key: str | None = None) -> torch.Tensor | None:
        """Return the keys and values of the longest known prefix, short of the last token."""
        known = [key for key in self._entries if key[0] == extra_key]
        lengths = {key: common_prefix(key[1], tokens[:-1]) for key in known}
        best = max(lengths, key=lambda key: lengths[key], default=(extra_key, ()))
        if not lengths.get(best):
            return None
        self._entries.move_to_end(best)
        return self._entries[best][:, :, : lengths[best]]


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many leading tokens two sequences share."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return min(len(left), len(right))


class Generator:
    """Takes one step for a set of requests: one more token for each of them."""

    def __init__(self, model: Any, cache: PrefixCache) -> None:
        self.model = model
        self.cache = cache

    def admit(self, request: GenerateRequest) -> None:
        """Start from the longest prefix that the cache knows."""
        request.kv = self.cache.longest(request.tokens, request.extra_key)
        request.cached_tokens = request.kv_length
        request.joining = True

    def retire(self, request: GenerateRequest) -> None:
        """Leave what a finished request has computed to later ones."""
        if request.kv is not None:
            tokens = request.tokens[: request.kv_length]
            self.cache.put(tokens, request.kv, request.extra_key)
            request.kv = None

    @torch.inference_mode()
    def step(self, requests: Sequence[GenerateRequest], version: str) -> None:
        """Append one token, made with the weights called ``version``, to each request."""
        for group in _alike(requests):
            logits = self._forward(group)
            for request in [request for request in group if request.joining]:
                assert request.kv is not None
                # A prompt that is known whole goes on with the known values, as in SGLang,
                # although its last token was just computed anew.
                request.kv = self.cache.put(request.tokens, request.kv, request.extra_key)
                request.joining = False
            for request, (token, logprob) in zip(group, _choose(logits, group), strict=True):
                request.tokens.append(token)
                request.logprobs.append(logprob)
                request.versions.append(version)

    def _forward(self, group: Sequence[GenerateRequest]) -> torch.Tensor:
        """Run the pending tokens of ``group`` in one batch and return the last logits.

        The pasts are padded on the left to the longest, so that the new tokens line up.
        """
        width, past = group[0].pending, max(request.kv_length for request in group)
        device = self.model.device
        pads = [past - request.kv_length for request in group]
        mask = torch.ones(len(group), past + width, dtype=torch.long)
        for row, pad in enumerate(pads):
            mask[row, :pad] = 0
        ids = torch.tensor([request.tokens[-width:] for request in group])
        starts = torch.tensor([[request.kv_length] for request in group])
        out = self.model(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            position_ids=(starts + torch.arange(width)).to(device),
            past_key_values=_join([request.kv for request in group], pads),
            use_cache=True,
            logits_to_keep=1,
        )
        for request, pad, kv in zip(group, pads, _split(out.past_key_values), strict=True):
            request.kv = kv[:, :, pad:]
        logits: torch.Tensor = out.logits[:, -1].float().cpu()
        return logits


def _alike(requests: Sequence[GenerateRequest]) -> Iterator[list[GenerateRequest]]:
    """Group requests that fit into one forward pass: equally many pending tokens."""
    groups: dict[tuple[int, bool], list[GenerateRequest]] = {}
    for request in requests:
        groups.setdefault((request.pending, request.kv is None), []).append(request)
    yield from groups.values()


def _join(kvs: Sequence[torch.Tensor | None], pads: Sequence[int]) -> Any:
    """Return a transformers cache that holds the requests' keys and values as one batch."""
    from transformers import DynamicCache

    past = [(kv, pad) for kv, pad in zip(kvs, pads, strict=True) if kv is not None]
    if not past:
        return DynamicCache()
    batch = torch.stack([F.pad(kv, (0, 0, pad, 0)) if pad else kv for kv, pad in past], dim=1)
    return DynamicCache(list(zip(batch[::2], batch[1::2], strict=True)))


def _split(cache: Any) -> torch.Tensor:
    """Return a batch's cache as one tensor whose first index is the request."""
    return torch.stack([t for layer in cache.layers for t in (layer.keys, layer.values)], dim=1)


def _choose(logits: torch.Tensor, group: Sequence[GenerateRequest]) -> Iterator[tuple[int, float]]:
    """Choose a token a row; greedy for temperature 0."""
    heats = torch.tensor([[request.sampling.temperature or 1.0] for request in group])
    logprobs = torch.log_softmax(logits / heats, dim=-1)
    best = logprobs.argmax(dim=-1).tolist()
    for row, request, token in zip(logprobs, group, best, strict=True):
        sampling = request.sampling
        drawn = (
            _sample(row.exp(), sampling.top_p, request.random) if sampling.temperature else token
        )

        yield drawn, float(row[drawn])


def _sample(probabilities: torch.Tensor, top_p: float, random: torch.Generator | None) -> int:
    ordered, tokens = probabilities.sort(descending=True)
    # A token stays if those before it do not yet reach top_p; the first always stays.
    ordered[ordered.cumsum(0) - ordered >= top_p] = 0
    return int(tokens[torch.multinomial(ordered, 1, generator=random)])
