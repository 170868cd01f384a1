"""TorchRL's SGLang policy, whose samples also say which weights made them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import requests
import torch
from tensordict import TensorDictBase, lazy_stack
from tensordict.tensorclass import TensorClass
from torchrl.modules.llm import AsyncSGLang
from torchrl.modules.llm import SGLangWrapper as _SGLangWrapper

from weight_update.collectors.keyed_engine import KeyedSGLang
from weight_update.collectors.torchrl_adapter import AnswersHook
from weight_update.errors import ConfigurationError, EngineRejected
from weight_update.options import HttpOptions, check_choice, check_positive
from weight_update.rollouts import Versions, is_aborted, retry_aborted, versions_of
from weight_update.waiting import spawn

OnAbort = Literal["retry", "continue", "mark"]

KEY = "weight_versions"
"""Where a sample's :class:`WeightVersions` are."""

UNKNOWN = -1
"""The number of a token that the policy did not make, or whose label is no number."""

# What SGLang calls the weights that it was started with.
_START = "default"
_OWN_OPTIONS = ("on_abort", "attempts")
_DROPPED_UPSTREAM = (
    "ignore_eos",
    "min_new_tokens",
    "min_p",
    "sampling_seed",
    "stop",
    "stop_token_ids",
)
_SEVERAL = ("n", "num_return_sequences", "best_of")
_SECONDS = 300.0  # TorchRL's own
_MAX_NEW_TOKENS = 128  # what TorchRL's client and SGLang take where nothing is said


class WeightVersions(TensorClass["nocast"]):  # type: ignore[misc,name-defined]
    """Which weights made a sample, in the engine's own words.

    Numbers are those of the sender's reports; the weights that an engine was started with are 0.

    Attributes:
        response: The version of each token of the response; -1 where a label is no number.
        full: The same along ``("tokens", "full")``; -1 for tokens of the prompt.
        first: The version of the response's first token.
        last: The version of its last token.
        mixed: Whether more than one version is known to have made it.
        exact: Whether each token's version is known. If not (SGLang before 0.5.19), all numbers
            are that of the moment when the response was complete.
        aborted: Whether it was cut short by an abort (only with ``on_abort="mark"``).
    """

    response: torch.Tensor
    full: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    mixed: torch.Tensor
    exact: torch.Tensor
    aborted: torch.Tensor


class SGLangWrapper(AnswersHook, _SGLangWrapper):  # type: ignore[misc]
    """``torchrl.modules.llm.SGLangWrapper`` for engines whose weights change.

    It differs in five things:

    * each sample has :class:`WeightVersions` under ``"weight_versions"``;
    * a response that an update aborted is asked for again (``on_abort``);
    * prompts are sent as the very token ids that the sample shows, so that tokens, masks and
      log-probabilities belong together in every input mode (upstream sends text, to which the
      server may add tokens, and has no ``("tokens", "full")`` of ``input_mode="text"``);
    * the prompts of a batch are generated at the same time and not one after the other;
    * ``generate_kwargs`` may also hold ``ignore_eos``, ``min_new_tokens``, ``min_p``,
      ``sampling_seed``, ``stop`` and ``stop_token_ids``, which upstream drops without a word.

    Args:
        model: As upstream: a server's URL or an ``AsyncSGLang``, which sends no key.
        on_abort: ``"retry"`` starts the response over, ``"continue"`` goes on from the tokens
            that were made (a sample of several versions), ``"mark"`` takes it as it is.
        attempts: How often a response is asked for at most.
        api_key: Key of the ordinary routes of the server at a URL (or ``WEIGHT_UPDATE_API_KEY``,
            or else the admin key that is known).
        timeout: Seconds for a response of the server at a URL, 300 by default; it waits through
            the server's queue and through updates.
        **options: As upstream.

    Raises:
        ConfigurationError: ``on_abort`` is none of these, several responses a prompt are asked
            for, there is no tokenizer and ``input_mode`` is not ``"tokens"``, or ``api_key`` or
            ``timeout`` is given with a client that has its own. When called: a prompt has no
            tokens.
        WeightUpdateError: When called: a response was aborted in every attempt.
        EngineRejected: The server refused the key, or when called a request, with its words.

    Example:
        >>> policy = SGLangWrapper("http://127.0.0.1:30000")  # doctest: +SKIP
        >>> policy(batch)["weight_versions", "last"]  # doctest: +SKIP
        tensor([3, 3, 4])
    """

    def __init__(
        self,
        model: Any,
        *,
        on_abort: OnAbort = "retry",
        attempts: int = 8,
        api_key: str | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> None:
        check_choice("on_abort", on_abort, OnAbort)
        _refuse_several(options)
        engine = model.engine if isinstance(model, _Client) else model
        if isinstance(engine, str):
            engine = _connected(engine, api_key, timeout)
        else:
            _refuse_others(api_key=api_key, timeout=timeout)
        super().__init__(engine, **options)
        if self.tokenizer is None and self.input_mode != "tokens":
            raise ConfigurationError(
                f"a tokenizer is needed for input_mode={self.input_mode!r}",
                remedy="pass tokenizer=, or use input_mode='tokens'",
            )
        wanted = options.get("generate_kwargs") or {}
        self.generate_kwargs.update({k: wanted[k] for k in _DROPPED_UPSTREAM if k in wanted})
        special = self.input_mode == "text"  # a chat template writes its own
        self.model = _Client(engine, self.tokenizer, special, on_abort, attempts)
        self.out_keys.append(KEY)

    def get_new_version(self, **changes: Any) -> SGLangWrapper:
        """As upstream."""
        own = {name: changes.pop(name, getattr(self.model, name)) for name in _OWN_OPTIONS}
        new: SGLangWrapper = super().get_new_version(**changes)
        new.model = replace(new.model, **own)
        return new

    def complete(self, out: TensorDictBase, answers: Sequence[Mapping[str, Any]]) -> None:
        """Adds to a batch of samples what TorchRL leaves out of the engine's answers."""
        samples = zip(out.unbind(0), answers, strict=True)
        out.set(KEY, lazy_stack([self._versions(sample, answer) for sample, answer in samples]))

    def _versions(self, sample: TensorDictBase, answer: Mapping[str, Any]) -> WeightVersions:
        tokens, mask = sample.get(self.tokens_key), sample.get(self.masks_key).all_assistant_mask
        versions = versions_of(answer)
        made = _by_token(versions, len(answer["output_ids"]))
        response = _filled(torch.ones_like(tokens.response, dtype=torch.bool), made)
        ends = made[[0, -1]] if len(made) else torch.tensor([UNKNOWN, UNKNOWN])
        return WeightVersions(
            response=response,
            full=_filled(mask, made),
            first=ends[0],
            last=ends[1],
            mixed=torch.tensor(versions.mixed),
            exact=torch.tensor(versions.exact),
            aborted=torch.tensor(is_aborted(answer)),
            batch_size=[],
        )


@dataclass(frozen=True)
class _Client:
    """What the wrapper asks for responses: an engine, by token ids, and whole ones."""

    engine: Any
    tokenizer: Any
    special_tokens: bool
    on_abort: OnAbort
    attempts: int

    def __getattr__(self, name: str) -> Any:
        # TorchRL's programs read the server's address and sizes from ``policy.model``.
        if name == "engine" or name.startswith("__"):  # asked for while it is unpickled
            raise AttributeError(name)
        return getattr(self.engine, name)

    def generate(
        self,
        prompts: Sequence[str] = (),
        sampling_params: Mapping[str, Any] | None = None,
        *,
        input_ids: Sequence[Sequence[int] | torch.Tensor] | None = None,
        return_logprobs: bool = False,
    ) -> list[dict[str, Any]]:
        """One answer a prompt, all asked for at once."""
        ids = self._encoded(prompts) if input_ids is None else [_listed(i) for i in input_ids]
        _refuse_empty(ids)
        sampling = {"max_new_tokens": _MAX_NEW_TOKENS, **(sampling_params or {})}
        calls = [spawn(self._answer, prompt, sampling, return_logprobs) for prompt in ids]
        return [call.result() for call in calls]

    def _encoded(self, prompts: Sequence[str]) -> list[list[int]]:
        encode = self.tokenizer.encode
        return [encode(text, add_special_tokens=self.special_tokens) for text in prompts]

    def _answer(
        self, prompt: list[int], sampling: Mapping[str, Any], logprobs: bool
    ) -> dict[str, Any]:
        def generate(request: Mapping[str, Any]) -> Any:
            with _with_its_words():
                return self.engine.generate(**request, return_logprobs=logprobs)

        request = {"input_ids": prompt, "sampling_params": dict(sampling)}
        if self.on_abort == "mark":
            answer = generate(request)
        else:
            keep = self.on_abort == "continue"
            answer = retry_aborted(generate, request, attempts=self.attempts, keep=keep)
        if logprobs:  # an answer without a token has none
            answer["meta_info"].setdefault("output_token_logprobs", [])
        return {**answer, **self._text(answer), "prompt_ids": prompt}

    def _text(self, answer: Mapping[str, Any]) -> dict[str, str]:
        """The text of an answer without: of a server without tokenizer, or of several parts."""
        if answer.get("text") or self.tokenizer is None:
            return {}
        return {"text": self.tokenizer.decode(answer["output_ids"], skip_special_tokens=True)}


def staleness(batch: TensorDictBase, version: int) -> torch.Tensor:
    """How many updates ago the oldest token of each sample was made.

    Args:
        batch: Samples of :class:`SGLangWrapper`, of any batch size.
        version: That of the weights in training: ``sender.version``, or ``report.version``.

    Returns:
        0 for samples of ``version`` alone; the largest integer for those that do not say exactly
        who made them.

    Raises:
        ConfigurationError: The samples say nothing: another wrapper made them.

    Example:
        >>> from tensordict import TensorDict
        >>> told = {"first": torch.tensor([3, 2, 3]), "exact": torch.tensor([True, True, False])}
        >>> staleness(TensorDict({"weight_versions": TensorDict(told)}), 3).tolist()
        [0, 1, 9223372036854775807]
    """
    if KEY not in batch.keys():  # noqa: SIM118 - a TensorDict's `in` takes no key
        raise ConfigurationError(
            f"the samples have no {KEY!r}, so nobody knows which weights made them",
            remedy="sample with weight_update.SGLangWrapper; TorchRL's of that name drops them",
        )
    first, exact = batch.get((KEY, "first")), batch.get((KEY, "exact"))
    unknown = torch.iinfo(torch.int64).max
    return torch.where(exact & (first != UNKNOWN), version - first, unknown)


def _connected(url: str, api_key: str | None, timeout: float | None) -> AsyncSGLang:
    seconds = _SECONDS if timeout is None else timeout
    check_positive("timeout", seconds, number=float)
    key = HttpOptions.read(api_key).key_for(control=False)
    if key is None:
        return AsyncSGLang(url, timeout=seconds)
    return KeyedSGLang.reach(url, key, seconds)


def _refuse_others(**given: Any) -> None:
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise ConfigurationError(
            f"{named[0]}= is for a server that is named by its URL, and this client is made",
            remedy="pass the server's URL as model",
        )


def _refuse_several(options: Mapping[str, Any]) -> None:
    kwargs = options.get("generate_kwargs") or {}
    asked = {"num_samples": options.get("num_samples"), **{k: kwargs.get(k) for k in _SEVERAL}}
    several = [f"{name}={count!r}" for name, count in asked.items() if count not in (None, 1)]
    if several:
        raise ConfigurationError(
            f"a prompt gets one response, and {several[0]} asks for several",
            remedy="give the prompt several times, as an environment with repeats= does",
        )


def _refuse_empty(prompts: Sequence[Sequence[int]]) -> None:
    empty = [index for index, prompt in enumerate(prompts) if not prompt]
    if empty:
        raise ConfigurationError(f"prompt {empty[0]} of the batch has no tokens")


@contextmanager
def _with_its_words() -> Iterator[None]:
    """A refusal in the server's words, which ``AsyncSGLang`` leaves out."""
    try:
        yield
    except requests.HTTPError as error:
        told = error.response
        if told is None or isinstance(error, EngineRejected):
            raise
        words = f"/generate answered {told.status_code}: {told.text[:500]}"
        raise EngineRejected(words, response=told) from None


def _listed(ids: Sequence[int] | torch.Tensor) -> list[int]:
    return ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)


def _number(label: str) -> int:
    if label == _START:
        return 0
    return int(label) if label.isdecimal() else UNKNOWN


def _by_token(versions: Versions, count: int) -> torch.Tensor:
    made = torch.full((count,), UNKNOWN)
    for span in versions.spans:
        made[span.start : span.end] = _number(span.version)
    return made


def _filled(where: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values in the first places that a mask allows, in order; unknown ones elsewhere."""
    filled = torch.full(where.shape, UNKNOWN)
    filled[where.nonzero().flatten()[: len(values)]] = values
    return filled
