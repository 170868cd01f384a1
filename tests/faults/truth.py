"""What every update must keep to, checked against what the engines really do.

Each check yields sentences; an empty list means that the library neither hung nor lied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from weight_update.errors import WeightUpdateError
from weight_update.report import EngineOutcome, EngineState, UpdateReport
from weight_update.update.updater import Updater

from .world import NAMES, ModelEngine, World, value_of

OLD, NEW, MIXED = EngineState.OLD, EngineState.NEW, EngineState.MIXED
UNREACHABLE = EngineState.UNREACHABLE
GRACE = 2.0


@dataclass
class Result:
    """What one push did, and what was true before it.

    Attributes:
        world: Where it happened.
        updater: Who pushed.
        before: What the engines held, by name.
        pushed: What was pushed.
        version: The updater's version before.
        labels: The engines' labels before.
        instances: Which starts of the engines there were before.
        error: What was raised.
        report: The report, of the error if there is one.
        seconds: How long it took.
    """

    world: World
    updater: Updater
    before: dict[str, dict[str, float]]
    pushed: dict[str, float]
    version: int
    labels: dict[str, str]
    instances: dict[str, str]
    counted: int
    error: BaseException | None = None
    report: UpdateReport | None = None
    seconds: float = 0.0

    @property
    def mode(self) -> str:
        return str(self.updater.options.effective_pause_mode())

    @property
    def fleet(self) -> list[ModelEngine]:
        return [self.world.engines[url] for url in self.updater.roster.urls]


def push(
    world: World,
    tag: float,
    names: Sequence[str] = NAMES,
    *,
    whole: bool = True,
    updater: Updater | None = None,
) -> Result:
    """Pushes and notes what happened."""
    engines = world.engines.items()
    updater = updater or world.updater
    result = Result(
        world,
        updater,
        {url: dict(engine.weights) for url, engine in engines},
        dict.fromkeys(names, tag),
        updater.version,
        {url: engine.label_shown for url, engine in engines},
        {url: engine.instance for url, engine in engines},
        len(world.counted),
    )
    start = world.time.now
    try:
        result.report = world.push(tag, names, whole=whole, updater=updater)
    except BaseException as error:  # noqa: BLE001 - judged below
        result.error = error
        result.report = getattr(error, "report", None)
    result.seconds = world.time.now - start
    return result


def troubles(result: Result) -> Iterator[str]:
    """Everything that is not as it must be after an update that may have failed."""
    error, report = result.error, result.report
    if error is not None and not isinstance(error, WeightUpdateError):
        yield f"raised {error!r}"
        return
    if report is None:
        yield f"no report: {error!r}"
        return
    limit = result.updater.options.timeout + GRACE
    if result.seconds > limit + 1e-6:
        yield f"took {result.seconds:.1f} s, at most {limit:.1f} s allowed"
    yield from _of_the_version(result, report)
    yield from _of_the_trainer()
    for engine in result.fleet:
        outcome = report.engines.get(engine.url)
        if outcome is None:
            yield f"{engine.url} is not in the report"
        else:
            yield from (f"{engine.url}: {t}" for t in _of_an_engine(engine, outcome, result))


def _of_the_version(result: Result, report: UpdateReport) -> Iterator[str]:
    updater, counted = result.updater, len(result.world.counted) - result.counted
    if report.version != updater.version:
        yield f"report.version={report.version}, but the sender's is {updater.version}"
    moved = updater.version != result.version
    if moved != bool(counted):
        yield f"version {result.version} -> {updater.version}, but counted {counted} times"
    if counted > 1:
        yield f"counted {counted} times"
    if result.error is None and not moved:
        yield "succeeded without a new version"


def _of_the_trainer() -> Iterator[str]:
    for tag in (0.0, 1.0, 2.0, 3.0):
        if not torch.equal(value_of(tag), torch.tensor([tag, tag])):
            yield f"the trainer's weights of {tag} changed"


def _of_an_engine(engine: ModelEngine, outcome: EngineOutcome, result: Result) -> Iterator[str]:
    if outcome.state is UNREACHABLE:
        if engine.answers and not _restarted(engine, result):
            yield "reported as lost, but it answers"
        return
    if not engine.answers:
        yield f"reported as {outcome.state}, but it does not answer"
        return
    yield from _of_its_weights(engine, outcome, result)
    yield from _of_its_pause(engine, outcome, result)
    if outcome.version not in (None, engine.label_shown) and "stamp" not in engine.lied:
        yield f"reported under label {outcome.version}, shows {engine.label_shown}"
    if result.error is None and not _left_out(engine, result) and "stamp" not in engine.lied:
        wanted = str(result.updater.version)
        if outcome.state is not NEW or engine.label_shown != wanted:
            yield f"{outcome.state} under {engine.label_shown} after a success, not new ({wanted})"


def _of_its_weights(engine: ModelEngine, outcome: EngineOutcome, result: Result) -> Iterator[str]:
    if "apply" in engine.lied and outcome.verified == "unverified":
        return  # nothing could tell
    # A restart before anything was sent is told by the label, which is no longer the old one.
    told = _restarted(engine, result) and outcome.version != result.labels[engine.url]
    if outcome.state is OLD and engine.weights != result.before[engine.url] and not told:
        yield f"reported old, holds {engine.fingerprint}"
    if outcome.state is NEW and engine.weights != result.before[engine.url] | result.pushed:
        yield f"reported new, holds {engine.fingerprint}"
    excused = result.mode == "in_place" or "flush" in engine.lied or "pause" in engine.lied
    if outcome.state is NEW and engine.stale and not excused:
        yield "reported new, serves prefixes of other weights"


def _of_its_pause(engine: ModelEngine, outcome: EngineOutcome, result: Result) -> Iterator[str]:
    if engine.paused and not outcome.paused and "resume" not in engine.lied:
        yield f"reported {outcome.state} and not paused, but it is"
    resumes = result.updater.options.on_failure == "resume"
    if outcome.state is MIXED and not resumes:
        held = engine.paused or "pause" in engine.lied or _restarted(engine, result)
        if not held:
            yield "mixed, and it generates"
        if not outcome.paused:
            yield "mixed, and reported as not paused"
    if outcome.state is MIXED and resumes and (engine.paused or outcome.paused):
        yield "mixed, and not resumed as asked for"
    late = "may still take effect" in outcome.detail
    foreign = outcome.paused and "was found paused" in outcome.detail
    idle = outcome.state in (OLD, NEW) and (engine.paused or (outcome.paused and not late))
    idle = idle and not foreign
    if idle and "resume" not in engine.lied:
        yield f"{outcome.state}, and not resumed"
    excused = "apply" in engine.lied and outcome.verified == "unverified"
    if not (resumes or excused or "pause" in engine.lied or unharmed(result.world, engine)):
        yield f"generates with {engine.fingerprint}"


def _left_out(engine: ModelEngine, result: Result) -> bool:
    """Whether a quorum went on without it."""
    roster = result.updater.roster
    return any(member.left_out for member in roster.members if member.url == engine.url)


def _restarted(engine: ModelEngine, result: Result) -> bool:
    return engine.instance != result.instances[engine.url]


def not_healed(result: Result) -> Iterator[str]:
    """Everything that is not as it must be after an update that nothing stood in the way of."""
    if result.error is not None:
        yield f"the next update failed: {result.error}"
        return
    yield from troubles(result)
    label = str(result.updater.version)
    for engine in result.fleet:
        outcome = result.report.engines[engine.url] if result.report else None
        fine = {
            "holds what was pushed": set(result.pushed.items()) <= set(engine.weights.items()),
            "generates": engine.generates,
            "shows the version": engine.label_shown == label,
            "has no session open": not engine.session_open,
            "has a clean cache": not engine.stale or result.mode == "in_place",
            "is reported new": outcome is not None and outcome.state is NEW,
            "is reported unpaused": outcome is not None and not outcome.paused,
        }
        yield from (
            f"healed, but not so: {engine.url} {what}" for what, so in fine.items() if not so
        )


def unharmed(world: World, engine: ModelEngine) -> bool:
    """Whether weights that no update brought as a whole are nowhere to be served from."""
    return world.sane(engine) or not engine.generates
