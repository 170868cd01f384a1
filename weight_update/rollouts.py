"""For those who sample while weights change: who made an answer, and how to get all of it.

Works on the answers of SGLang's ``/generate`` and of its OpenAI routes, as decoded JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from weight_update.errors import ConfigurationError, WeightUpdateError

_Answer = dict[str, Any]

_OPENAI_PROMPTS = ("messages", "prompt", "input")
# A grammar starts anew with every request; the others have no value for each token.
_NOT_CONTINUED = (
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "return_hidden_states",
    "return_routed_experts",
    "return_sampling_mask",
    "session_params",
)


@dataclass(frozen=True)
class Span:
    """Tokens ``start`` to ``end`` of an output were made by the weights called ``version``."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Versions:
    """Which weights made an answer.

    Attributes:
        spans: Versions of its output tokens, in order and without gaps; empty if the answer
            does not say.
        exact: Whether the spans hold for every token. If not, the version is only that of the
            moment when the answer was complete, and an answer of several versions looks like
            one of the last (releases before 0.5.19; answers of several choices, of which SGLang
            labels the first).
    """

    spans: tuple[Span, ...] = ()
    exact: bool = False

    @property
    def mixed(self) -> bool:
        """Whether more than one version is known to have made it."""
        return len({span.version for span in self.spans}) > 1


def versions_of(answer: object) -> Versions:
    """Which weights made an answer.

    Args:
        answer: One answer of ``/generate``, an answer of an OpenAI route, or one of its choices
            if that has a ``meta_info`` (of chat completions on request).

    Example:
        >>> spans = [
        ...     {"version": "6", "start": 0, "end": 3},
        ...     {"version": "7", "start": 3, "end": 5},
        ... ]
        >>> versions = versions_of({"meta_info": {"weight_versions": spans}})
        >>> versions.spans[0], versions.mixed, versions.exact
        (Span(version='6', start=0, end=3), True, True)
        >>> versions_of({"meta_info": {"weight_version": "7", "completion_tokens": 5}})
        Versions(spans=(Span(version='7', start=0, end=5),), exact=False)
        >>> versions_of({"choices": [], "metadata": {"weight_version": "7"}}).spans[0].version
        '7'
        >>> versions_of({"error": "none of these"})
        Versions(spans=(), exact=False)
    """
    answer = _mapping(answer)
    labels = _mapping(answer.get("meta_info")) or _mapping(answer.get("metadata"))
    listed = [_mapping(item) for item in _items(labels.get("weight_versions"))]
    if spans := _spans(listed):
        alone = len(_items(answer.get("choices"))) < 2
        return Versions(spans, alone and all(item.get("exact", True) for item in listed))
    version = labels.get("weight_version")
    known = isinstance(version, str)
    return Versions((Span(str(version), 0, _token_count(answer)),) if known else ())


def is_aborted(answer: object) -> bool:
    """Whether an answer, or any of several, was cut short by an abort.

    An aborted answer is no sample: it may have no token at all, and the tokens that it has are
    not all that the policy would have said.

    Args:
        answer: An answer of ``/generate`` or a list of them (``n`` > 1, or several prompts), an
            answer of an OpenAI route, or one of its choices.

    Example:
        >>> is_aborted({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}})
        True
        >>> is_aborted({"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}]})
        True
        >>> is_aborted({"index": 0, "finish_reason": "length"})
        False
    """
    return any(reason == "abort" for reason in _finish_reasons(answer))


def salted(request: Mapping[str, Any], version: int | str) -> dict[str, Any]:
    """A copy of a request that uses no prefix which other weights have cached.

    An update that leaves requests in flight as they are (``in_place``) cannot flush the prefix
    cache. With the version in the cache's key, prefixes of other versions are not found.
    SGLang honours the key from 0.5.11 on; older releases accept it and ignore it.

    Args:
        request: The body of ``/generate`` or of an OpenAI route. A key of its own is kept.
        version: That of the last successful update, ``report.version``.

    Raises:
        ConfigurationError: The version is empty, which is no key.

    Example:
        >>> salted({"input_ids": [3, 14]}, 7)
        {'input_ids': [3, 14], 'extra_key': '7'}
        >>> salted({"prompt": "Once", "cache_salt": "tenant"}, "7")
        {'prompt': 'Once', 'cache_salt': 'tenant|7'}
    """
    if version == "":
        raise ConfigurationError("an empty version cannot separate prefixes")
    # Both names work on the OpenAI routes of SGLang; other engines know only this one.
    openai = any(name in request for name in _OPENAI_PROMPTS)
    field = "cache_salt" if openai else "extra_key"
    own = request.get(field)
    salts = [_salt(key, version) for key in own] if isinstance(own, list) else _salt(own, version)
    return {**request, field: salts}


def retry_aborted(
    generate: Callable[[dict[str, Any]], Any],
    request: Mapping[str, Any],
    *,
    attempts: int = 8,
    keep: bool = False,
) -> Any:
    """Ask again until the completion is whole.

    There is no wait between attempts: a paused engine holds a request until it goes on.

    Args:
        generate: Sends a request body and returns the decoded answer. What it raises is raised.
        request: The body of ``/generate``; without ``keep``, of any route.
        attempts: How often ``generate`` is called at most.
        keep: Go on from the tokens that were made instead of from the prompt. The request must
            give ``input_ids`` of one prompt and ``max_new_tokens``, and use no grammar. Unless
            it sets ``ignore_eos``, the last token of a part is made anew: SGLang did not look
            whether it was an end. Penalties and stop strings begin anew with each part.

    Returns:
        The last answer; with ``keep`` all parts as one answer, without ``text``.

    Raises:
        WeightUpdateError: All attempts were aborted, or an answer does not tell how it ended.
        ConfigurationError: The request cannot be continued from its tokens.

    Example:
        >>> reasons = iter(["abort", "length"])
        >>> def generate(request):
        ...     made = {"output_ids": [len(request["input_ids"])]}
        ...     return {**made, "meta_info": {"finish_reason": {"type": next(reasons)}}}
        >>> sampling = {"max_new_tokens": 2, "ignore_eos": True}
        >>> request = {"input_ids": [5], "sampling_params": sampling}
        >>> retry_aborted(generate, request, keep=True)["output_ids"]
        [1, 2]
    """
    if attempts < 1:
        raise ConfigurationError(f"attempts must be at least 1, not {attempts}")
    if keep:
        _check_continuable(request)
    answer = None
    for _ in range(attempts):
        attempt = generate(_rest(request, answer) if keep else dict(request))
        _check_ended(attempt)
        answer = _grown(request, answer, attempt) if keep else attempt
        if not is_aborted(answer):
            return answer
    remedy = "give more attempts" if keep else "give more attempts, or keep what was made"
    raise WeightUpdateError(f"it was aborted in each of {attempts} attempts", remedy=remedy)


def _check_continuable(request: Mapping[str, Any]) -> None:
    """Refuse a request that cannot go on from its tokens."""
    prompt, sampling = _items(request.get("input_ids")), _mapping(request.get("sampling_params"))
    used = [name for name in _NOT_CONTINUED if request.get(name) or sampling.get(name)]
    if not prompt or not all(isinstance(token, int) for token in prompt):
        problem = "it does not give the input_ids of one prompt"
    elif not isinstance(sampling.get("max_new_tokens"), int):
        problem = "its sampling_params do not give max_new_tokens"
    elif sampling.get("n") not in (None, 1):
        problem = "it asks for several completions"
    elif used:
        problem = f"it uses {', '.join(used)}"
    else:
        return
    raise ConfigurationError(
        f"the request cannot be continued from its tokens: {problem}",
        remedy="change it, or start over with keep=False",
    )


def _check_ended(answer: object) -> None:
    reasons = _finish_reasons(answer)
    if not reasons or not all(isinstance(reason, str) for reason in reasons):
        raise WeightUpdateError(
            f"the answer does not tell how it ended: {repr(answer)[:200]}",
            remedy="generate() must return a decoded answer that is not a part of a stream",
        )


def _rest(request: Mapping[str, Any], answer: _Answer | None) -> dict[str, Any]:
    """What is still to be asked for, after what was answered so far."""
    made = answer["output_ids"] if answer else []
    sampling = dict(request["sampling_params"])
    sampling["max_new_tokens"] -= len(made)
    if "min_new_tokens" in sampling:
        sampling["min_new_tokens"] = max(0, sampling["min_new_tokens"] - len(made))
    return {**request, "input_ids": request["input_ids"] + made, "sampling_params": sampling}


def _grown(request: Mapping[str, Any], answer: _Answer | None, part: _Answer) -> _Answer:
    """What was answered so far, with one more part."""
    told = _mapping(part)
    if not (isinstance(told.get("output_ids"), list) and _mapping(told.get("meta_info"))):
        raise WeightUpdateError(f"an answer without tokens to go on from: {repr(part)[:200]}")
    sampling = request["sampling_params"]
    if is_aborted(part) and not sampling.get("ignore_eos"):
        part = _head(part, len(part["output_ids"]) - 1)
    grown = _joined(answer, part) if answer and answer["output_ids"] else part
    if is_aborted(grown) and len(grown["output_ids"]) >= sampling["max_new_tokens"]:
        # It was aborted in the step that made its last token.
        reason = {"type": "length", "length": sampling["max_new_tokens"]}
        return {**grown, "meta_info": {**grown["meta_info"], "finish_reason": reason}}
    return grown


def _head(answer: _Answer, count: int) -> _Answer:
    """An answer with its first tokens only."""
    count = max(count, 0)
    versions = versions_of(answer)
    spans = [replace(span, end=min(span.end, count)) for span in versions.spans]
    known = replace(versions, spans=_folded([span for span in spans if span.start <= count]))
    meta = {
        key: value[:count] if _is_by_token(key, value) else value
        for key, value in answer["meta_info"].items()
    }
    return _answer(answer, answer["output_ids"][:count], meta, known)


def _joined(head: _Answer, tail: _Answer) -> _Answer:
    """Two parts of one completion as one answer."""
    first, last = head["meta_info"], tail["meta_info"]
    meta = {**last, **{key: value for key, value in first.items() if _is_of_prompt(key)}}
    for key, value in first.items():
        if _is_by_token(key, value):
            meta[key] = [*value, *_items(last.get(key))]
    ids = head["output_ids"] + tail["output_ids"]
    return _answer({**tail, **head}, ids, meta, _versions_joined(head, tail))


def _versions_joined(head: _Answer, tail: _Answer) -> Versions:
    first, last = versions_of(head), versions_of(tail)
    if not tail["output_ids"]:
        return first
    if not (first.spans and last.spans):
        return Versions()
    shift = len(head["output_ids"])
    moved = [Span(span.version, span.start + shift, span.end + shift) for span in last.spans]
    return Versions(_folded([*first.spans, *moved]), first.exact and last.exact)


def _answer(like: _Answer, ids: list[int], meta: Mapping[str, Any], versions: Versions) -> _Answer:
    """An answer put together anew; spans that are not exact are marked as such."""
    mark = {} if versions.exact else {"exact": False}
    told = {"weight_versions": [{**asdict(span), **mark} for span in versions.spans]}
    label = {"weight_version": versions.spans[-1].version} if versions.spans else {}
    known = {"completion_tokens": len(ids), **told, **label}
    kept = {key: value for key, value in like.items() if key != "text"}
    return {**kept, "output_ids": ids, "meta_info": {**meta, **known}}


def _is_by_token(key: str, value: object) -> bool:
    return key.startswith("output_") and isinstance(value, list)


def _is_of_prompt(key: str) -> bool:
    return key.startswith("input_") or key in ("prompt_tokens", "cached_tokens")


def _salt(own: object, version: int | str) -> str:
    return f"{own}|{version}" if own else str(version)


def _finish_reasons(answer: object) -> list[object]:
    """How an answer, each of several, or each of its choices ended."""
    ends: list[object] = []
    for one in answer if isinstance(answer, list) else [answer]:
        choices = _items(_mapping(one).get("choices"))
        ends += [_end(_mapping(choice)) for choice in choices or [one]]
    return ends


def _end(answer: Mapping[str, Any]) -> object:
    meta = _mapping(answer.get("meta_info"))
    reason = meta.get("finish_reason", answer.get("finish_reason"))
    return _mapping(reason).get("type") if isinstance(reason, Mapping) else reason


def _token_count(answer: Mapping[str, Any]) -> int:
    meta, usage = _mapping(answer.get("meta_info")), _mapping(answer.get("usage"))
    counted = meta.get("completion_tokens", usage.get("completion_tokens"))
    return counted if isinstance(counted, int) else len(_items(answer.get("output_ids")))


def _spans(listed: Sequence[Mapping[str, Any]]) -> tuple[Span, ...]:
    """The spans of an answer; none unless they follow on each other from the first token."""
    found = [(item.get("version"), item.get("start"), item.get("end")) for item in listed]
    spans = [
        Span(version, start, end)
        for version, start, end in found
        if isinstance(version, str) and isinstance(start, int) and isinstance(end, int)
    ]
    ends = [0, *(span.end for span in spans)]
    sound = ends == sorted(ends) and [span.start for span in spans] == ends[:-1]
    return _folded(spans) if sound and len(spans) == len(listed) else ()


def _folded(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Spans that follow on each other, without empty ones and repetitions."""
    folded: list[Span] = []
    for span in spans:
        if folded and folded[-1].version == span.version:
            folded[-1] = replace(folded[-1], end=span.end)
        elif span.end > span.start:
            folded.append(span)
    return tuple(folded or spans[:1])


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _items(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else []
