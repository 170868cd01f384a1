"""What must hold after every update of the soak, and of every answer that clients got."""

from __future__ import annotations

import hashlib
import itertools
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from weight_update import EngineOutcome, EngineState, UpdateReport
from weight_update.bench.soak.faults import is_dead, is_frozen
from weight_update.bench.soak.models import BASE, PROMPTS, Judge, Stretch
from weight_update.bench.soak.traffic import TOKENS, Answer
from weight_update.reference_engine import ReferenceEngine

BASE_LABEL = "default"
_LABELS_KEPT = 128
_ASK_SECONDS = 5.0
# An answer may leave a moment before the state behind it is there to see.
_SETTLE_SECONDS = 3.0
_PROOF_TOKENS = 8


def digests_of(model: Any) -> dict[str, str]:
    """SHA-256 of each parameter's bytes."""
    return {
        name: hashlib.sha256(parameter.detach().view(-1).numpy().data).hexdigest()
        for name, parameter in model.named_parameters()
    }


# -- engines -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What an engine says of itself; None for what it does not say.

    Attributes:
        silent: Whether it is dead, frozen or stuck.
        label: The version it shows.
        paused: Whether it holds new requests.
        seed: Which model it holds; None for a mixture.
    """

    silent: bool = True
    label: str | None = None
    paused: bool | None = None
    seed: int | None = None


class Witness:
    """Asks engines, behind the library's back, what they hold.

    Args:
        judge: Has the models.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._digests = {seed: digests_of(model) for seed, model in judge.models.items()}

    def look(self, engine: ReferenceEngine, paused: bool | None = None) -> Seen:
        """What an engine is now; ``paused`` is given a moment to become true."""
        if is_dead(engine) or is_frozen(engine):
            return Seen()
        try:
            engine.clear_faults()
            seed = self._held(engine)
            label = engine.call("GET", "/model_info", timeout=_ASK_SECONDS)["weight_version"]
            return Seen(False, label, _is_paused(engine, paused), seed)
        except (OSError, RuntimeError):
            return Seen()

    def generates(self, engine: ReferenceEngine, seed: int) -> bool:
        """Whether a resumed engine says what the model with this seed says."""
        prompt = int(uuid.uuid4()) % len(PROMPTS)
        answer = engine.generate(
            PROMPTS[prompt], _PROOF_TOKENS, extra_key=uuid.uuid4().hex, timeout=_ASK_SECONDS
        )
        ids = answer["output_ids"]
        return self._judge.made_by(prompt, ids, [Stretch(seed, 0, len(ids))])

    def _held(self, engine: ReferenceEngine) -> int | None:
        body = {"action": "checksum"}
        answer = engine.call("POST", "/weights_checker", body, timeout=_ASK_SECONDS)
        sums: Mapping[str, str] = answer["ranks"][0]["checksums"]
        for seed, expected in self._digests.items():
            if all(expected[name].startswith(digest) for name, digest in sums.items()):
                return seed
        return None


def _is_paused(engine: ReferenceEngine, wanted: bool | None) -> bool:
    end = time.monotonic() + _SETTLE_SECONDS
    while True:
        status, _ = engine._exchange("GET", "/ready", None, _ASK_SECONDS)
        paused = status != 200
        if wanted in (None, paused) or time.monotonic() > end:
            return paused
        time.sleep(0.02)


def lies_in(
    report: UpdateReport,
    seen: Mapping[str, Seen],
    before: Mapping[str, Seen],
    pushed: int,
    *,
    busy: bool = False,
) -> Iterator[str]:
    """What a report says of engines that is not so.

    Args:
        report: Of an update that succeeded or failed.
        seen: What the engines are after it.
        before: What they were before it.
        pushed: Which model it was to bring.
        busy: Whether an engine that answers now may have been too slow to answer then.
    """
    for url, outcome in report.engines.items():
        if busy and outcome.state is EngineState.UNREACHABLE and "no answer" in outcome.detail:
            continue
        for text in _lies_of(outcome, seen[url], before[url], pushed):
            yield f"{outcome}, but {text}"


def _lies_of(outcome: EngineOutcome, seen: Seen, before: Seen, pushed: int) -> Iterator[str]:
    if outcome.state is EngineState.UNREACHABLE or seen.silent:
        if not seen.silent:
            yield "it answers"
        return
    if outcome.version not in (None, seen.label):
        yield f"it shows version {seen.label}"
    if seen.paused and not outcome.paused:
        yield "it is paused"
    if outcome.paused and not seen.paused and not outcome.detail:
        yield "it is not paused"  # with a detail, it only may be: a lost answer is not known
    if outcome.state is EngineState.NEW and seen.seed != pushed:
        yield f"it holds {_model(seen.seed)}, and {_model(pushed)} was pushed"
    if outcome.state is EngineState.OLD and seen.seed != before.seed:
        yield f"it holds {_model(seen.seed)}, and held {_model(before.seed)}"
    if outcome.state is EngineState.MIXED and not seen.paused:
        yield "it is mixed and not held"


def _model(seed: int | None) -> str:
    return "a mixture" if seed is None else f"model {seed}"


def unhealed(report: UpdateReport, seen: Mapping[str, Seen], pushed: int) -> Iterator[str]:
    """What an update that nothing disturbed has left undone."""
    wanted = Seen(False, str(report.version), False, pushed)
    for url, outcome in report.engines.items():
        if outcome.state is not EngineState.NEW or seen[url] != wanted:
            yield f"not healed by an undisturbed update: {outcome}; it is {seen[url]}"


# -- answers -------------------------------------------------------------------------------


@dataclass
class Ledger:
    """Which models a version may stand for, engine by engine, and what clients were answered.

    Attributes:
        judge: Recomputes answers.
        counts: What became of the answers.
    """

    judge: Judge
    counts: Counter[str] = field(default_factory=Counter)
    _models: dict[str, OrderedDict[str, list[int]]] = field(default_factory=dict)
    _modes: dict[str, str] = field(default_factory=dict)
    _after_failures: set[str] = field(default_factory=set)
    _kills: Counter[str] = field(default_factory=Counter)

    def note(self, url: str, seen: Seen, mode: str, *, after_failure: bool = False) -> None:
        """An engine serves (or would, if it went on) a model under a label.

        Args:
            url: The engine.
            seen: What it is.
            mode: How the last update paused.
            after_failure: Whether the update before that one failed.
        """
        labels = self._models.setdefault(url, OrderedDict({BASE_LABEL: [BASE]}))
        if seen.label is None or seen.seed is None:
            return
        seeds = labels.setdefault(seen.label, [])
        if seen.seed not in seeds:
            seeds.append(seen.seed)
        if seen.label not in self._modes:
            self._modes[seen.label] = mode
            self._after_failures |= {seen.label} if after_failure else set()
        if len(labels) > _LABELS_KEPT:
            labels.pop(next(label for label in labels if label != BASE_LABEL))
        if len(self._modes) > _LABELS_KEPT:
            oldest = next(iter(self._modes))
            self._modes.pop(oldest)
            self._after_failures.discard(oldest)

    def killed(self, url: str) -> None:
        """An engine's process ended."""
        self._kills[url] += 1

    def faults_of(self, answer: Answer) -> Iterator[str]:
        """Why an answer cannot be right; nothing if it can."""
        self.counts["answers"] += 1
        self.counts["aborted and asked again"] += answer.aborts > 0
        self.counts["asked again after a kill"] += answer.drops > 0
        if answer.drops and not self._kills[answer.engine]:
            yield f"{answer.engine} dropped a connection, and it was never killed"
        fault = (answer.trouble and f"lost: {answer.trouble}") or self._span_fault(answer)
        if fault:
            yield f"an answer of {answer.engine}: {fault}"
        else:
            yield from self._token_faults(answer)

    def _span_fault(self, answer: Answer) -> str:
        ends = [0, *(end for _, _, end in answer.spans)]
        if len(answer.output) != TOKENS or ends[-1] != TOKENS:
            return f"{len(answer.output)} of {TOKENS} tokens, versions of {ends[-1]}"
        labels = self._models[answer.engine]
        strange = [label for label, _, _ in answer.spans if label not in labels]
        return f"version {strange[0]!r} was never served" if strange else ""

    def _token_faults(self, answer: Answer) -> Iterator[str]:
        self.counts["of several versions"] += len(answer.spans) > 1
        if self._right(answer):
            self.counts["made by the versions they name"] += 1
        elif excuse := self._excuse(answer):
            self.counts[f"unjudged: {excuse}"] += 1
        else:
            yield f"{answer.engine} gave an answer that is not of the versions it names: {answer}"

    def _right(self, answer: Answer) -> bool:
        models = self._models[answer.engine]
        choices = itertools.product(*(models[label] for label, _, _ in answer.spans))
        return any(
            self.judge.made_by(answer.prompt, answer.output, list(self._stretches(answer, seeds)))
            for seeds in choices
        )

    def _excuse(self, answer: Answer) -> str:
        """Why tokens may differ from what their versions say, and nobody is to blame."""
        named = [label for label, _, _ in answer.spans]
        if any(len(self._models[answer.engine][label]) > 1 for label in named):
            return "one label, two models"
        if named[0] != answer.salt and self._frozen(named[0]):
            # It waited through the update with the key of the version before, whose prefixes
            # are still cached.
            return "admitted behind an in_place update"
        if any(self._frozen(label) and label in self._after_failures for label in named[1:]):
            return "frozen behind a failed update"
        return ""

    def _stretches(self, answer: Answer, seeds: Sequence[int]) -> Iterator[Stretch]:
        for (label, start, end), seed in zip(answer.spans, seeds, strict=True):
            yield Stretch(seed, start, end, self._frozen(label))

    def _frozen(self, label: str) -> bool:
        return self._modes.get(label) == "in_place"


def proofs(
    witness: Witness, engines: Sequence[ReferenceEngine], seen: Mapping[str, Seen]
) -> Iterator[str]:
    """Engines that serve, and do not say what the model that they hold says."""
    for engine in engines:
        state = seen[engine.url]
        if state.silent or state.paused or state.seed is None:
            continue
        right = False
        with suppress(OSError, RuntimeError):
            right = witness.generates(engine, state.seed)
        if not right:
            yield f"{engine.url} holds model {state.seed}, and does not generate with it"
