"""From the body of ``/generate`` to the requests that the scheduler runs."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weight_update.reference_engine.bodies import Generate, RequestError, fits
from weight_update.reference_engine.generation import GenerateRequest, Sampling

#: Parameters this engine does not implement, and the values at which they change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "top_k": (-1, None),
    "min_p": (0,),
    "min_new_tokens": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "stop": (None, [], ""),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "no_stop_trim": (True, False),
}

_TYPES: dict[str, Any] = {
    "max_new_tokens": int | None,
    "temperature": float,
    "top_p": float,
    "ignore_eos": bool,
    "stop_token_ids": list[int] | None,
    "seed": int | None,
    "sampling_seed": int | None,
}


@dataclass(frozen=True)
class Limits:
    """What the model allows.

    Args:
        vocab_size: Token ids are below this.
        context_length: Prompt and output together are at most this long; 0 where nothing can be
            generated.
        eos: Tokens at which generation stops unless ``ignore_eos`` is set.
    """

    vocab_size: int
    context_length: int
    eos: frozenset[int]


def requests_of(
    body: Generate, prompts: Sequence[list[int]], limits: Limits
) -> list[GenerateRequest]:
    """Build one request a prompt.

    Raises:
        RequestError: A prompt or a parameter is not usable.
    """
    count = len(prompts)
    params = _per_prompt(body.sampling_params, count, "sampling_params")
    rids = _per_prompt(body.rid, count, "rid")
    if count > 1 and isinstance(body.rid, str):
        rids = [f"{body.rid}_{index}" for index in range(count)]
    keys = [key or None for key in _per_prompt(body.extra_key, count, "extra_key")]
    return [
        GenerateRequest(
            rid or uuid.uuid4().hex, list(prompt), _sampling(param, prompt, limits), key
        )
        for prompt, param, rid, key in zip(prompts, params, rids, keys, strict=True)
    ]


def _per_prompt(value: Any, count: int, what: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{what} has {len(value)} entries for {count} prompts")
    return value


def _sampling(params: Mapping[str, Any], prompt: Sequence[int], limits: Limits) -> Sampling:
    _check_prompt(prompt, limits)
    _check_params(params)
    _check_length(len(prompt), params.get("max_new_tokens"), limits)
    wanted = params.get("max_new_tokens", 128)
    room = max(0, limits.context_length - len(prompt) - 2)  # SGLang keeps two for itself
    stops = frozenset(params.get("stop_token_ids") or ())
    return Sampling(
        max_new_tokens=room if wanted is None else min(wanted, room),
        temperature=params.get("temperature", 1.0),
        top_p=params.get("top_p", 1.0),
        # SGLang looks for no stop token at all, not even a wanted one, when it ignores the end.
        stop_tokens=frozenset() if params.get("ignore_eos") else stops | limits.eos,
        seed=params.get("sampling_seed", params.get("seed")),
    )


def _check_prompt(prompt: Sequence[int], limits: Limits) -> None:
    if not limits.context_length:
        raise RequestError("this engine holds parameters that belong to no model")
    if not 0 < len(prompt) < limits.context_length:
        raise RequestError(
            f"a prompt of {len(prompt)} tokens; 1 to {limits.context_length - 1} fit"
        )
    if not all(0 <= token < limits.vocab_size for token in prompt):
        raise RequestError(f"the prompt has token ids outside 0 to {limits.vocab_size - 1}")


def _check_length(prompt: int, wanted: int | None, limits: Limits) -> None:
    """A length that is asked for has to fit; the default is cut to what does."""
    if prompt + (wanted or 0) > limits.context_length:
        raise RequestError(
            f"{prompt} tokens of the prompt and {wanted} new ones exceed the context length of "
            f"{limits.context_length} tokens"
        )


def _check_params(params: Mapping[str, Any]) -> None:
    for name, value in params.items():
        if name in _TYPES and not fits(value, _TYPES[name]):
            raise RequestError(f"sampling parameter {name} cannot be {value!r}")
        if name not in _TYPES and value not in _NEUTRAL.get(name, ()):
            raise RequestError(f"sampling parameter {name}={value!r} is not supported here")
    if params.get("temperature", 1.0) < 0 or not 0 < params.get("top_p", 1.0) <= 1:
        raise RequestError("temperature must be at least 0, and top_p in (0, 1]")
    if (params.get("max_new_tokens") or 0) < 0:
        raise RequestError("max_new_tokens must be at least 0")
