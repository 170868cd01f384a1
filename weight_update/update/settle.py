"""After a failure: find out what each engine holds, tidy it, and resume it or hold it.

The rule: nothing applied - resumed, always. Everything applied and the cache flushed - resumed.
Mixed weights - held, unless the rules say otherwise, until a full push heals them. No
answer - one bounded attempt to resume, and reported as lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass

from weight_update.errors import Phase, WeightMismatchError, WeightUpdateError
from weight_update.facts import Sighting
from weight_update.report import EngineState
from weight_update.update.fleet import SILENT, Attempt, Fleet, Member, answers, may_obey
from weight_update.update.protocols import Engine, Group
from weight_update.update.rules import UpdateRules
from weight_update.waiting import Deadline, spawn

_log = logging.getLogger("weight_update")

# A failed update ends at most 2 s after its failure or its deadline. Of these 1.8 s, at most
# 0.8 go to the answer that is still out, and the last 0.8 are kept for resuming and for
# finding out who is lost.
GRACE_SECONDS = 1.8
RESUME_SECONDS = 0.5
_ANSWER_SECONDS = 0.8
_ARRIVAL_SECONDS = 0.5
_FLUSH_SECONDS = 0.5
_LATE_SECONDS = 0.4
_PROBE_SECONDS = 0.3

STALE_CACHE = "weights new, cache stale"
LATE_PAUSE = "resumed, but a pause that it has not answered may still take effect"
RESTARTED = "it restarted during the update and holds the weights that it started with"
# Phases that end before engines have proved what they hold.
_UNPROVEN = ("transfer", "end", "flush")

Prove = Callable[[Member, Deadline], None]
Calls = Mapping[str, Future[None] | None]


@dataclass(frozen=True)
class Settled:
    """What became of one engine."""

    state: EngineState
    doubt: str
    paused: bool
    open: bool
    detail: str
    anew: Sighting | None = None
    """What a server that restarted meanwhile shows."""


@dataclass(frozen=True)
class Failure:
    """What ended an attempt, and how long its engines may take to be settled.

    Attributes:
        group: The group of the attempt.
        rules: The rules of the attempt.
        phase: The step that failed.
        error: Why it failed.
        grace: How long all of settling may take.
        prove: Raises WeightMismatchError if an engine does not hold what it confirmed.
    """

    group: Group
    rules: UpdateRules
    phase: Phase
    error: BaseException
    grace: Deadline
    prove: Prove


def settle(fleet: Fleet, failure: Failure) -> None:
    """Brings every engine of a failed attempt into a known state, all at once, bounded.

    The group is given up if bytes may be under way in it, or if an engine was lost and with it
    a rank of the group.
    """
    if failure.phase == "transfer":
        if not isinstance(failure.error, Exception):
            _let_arrive(fleet, failure.grace)
        failure.group.give_up()
        _break_up(fleet, failure)
    tasks = {m.url: spawn(_settle_engine, m, failure) for m in fleet.members}
    interrupt = _wait_out(tasks.values(), failure.grace)
    error = failure.error
    culprit = getattr(error, "engine", None)
    for member in fleet.members:
        task = tasks[member.url]
        known = task.done() and task.exception() is None
        result = task.result() if known else _unsettled(member, task.done() and task.exception())
        _note(member, result, str(getattr(error, "message", "")) if member.url == culprit else "")
        if failure.phase == "transfer":  # no other request names the group
            member.note_debt(failure.group.name)
    if any(member.state is EngineState.UNREACHABLE for member in fleet.members):
        failure.group.give_up()
    if interrupt is not None:
        raise interrupt


def _break_up(fleet: Fleet, failure: Failure) -> None:
    if failure.group.name:
        calls = {member.url: member.call for member in fleet.members}
        for member in fleet.members:
            spawn(_leave, member.engine, calls, failure)


def _let_arrive(fleet: Fleet, grace: Deadline) -> None:
    """An interrupt is no engine's fault, and what is under way comes as ever.

    Gloo never wakes a peer that has a part of a message when the rest does not come.
    """
    calls = [member.call for member in fleet.members if member.call is not None]
    wait(calls, timeout=min(_ARRIVAL_SECONDS, grace.remaining()))


def _wait_out(tasks: Iterable[Future[Settled]], grace: Deadline) -> BaseException | None:
    """Waits even through an interrupt: leaving now would leave a whole fleet paused."""
    waiting = list(tasks)
    interrupt: BaseException | None = None
    while not grace.expired():
        try:
            wait(waiting, timeout=grace.remaining() + 0.1)
            break
        except (KeyboardInterrupt, SystemExit) as error:
            interrupt = error
    return interrupt


def _note(member: Member, result: Settled, own_words: str) -> None:
    if result.anew is not None:
        member.forget()
        member.label, member.instance = result.anew.label, result.anew.instance
        member.owed = member.lost
    member.detail = result.detail or own_words
    member.maybe_paused, member.maybe_open = result.paused, result.open
    if result.state is EngineState.NEW and member.state is not EngineState.NEW:
        member.renew(member.attempt.names)
    member.state, member.doubt = result.state, result.doubt
    if result.doubt:
        member.owed |= member.attempt.names


def _unsettled(member: Member, error: object) -> Settled:
    """No result: the engine did not answer in time, or settling it failed."""
    return Settled(
        EngineState.UNREACHABLE,
        member.attempt.doubt_left(member.doubt),
        member.maybe_paused,
        member.maybe_open,
        f"could not be settled: {error!r}" if error else "no answer while it was being settled",
    )


def _settle_engine(member: Member, failure: Failure) -> Settled:
    engine, attempt, grace = member.engine, member.attempt, failure.grace
    words = _await_answer(member, failure.phase, grace)
    suspect = bool(attempt.suspicion) or member.failed_itself
    anew = _started_anew(member, grace)
    if anew is not None:
        return _hold_anew(member, failure, anew)
    early = grace.at_most(grace.remaining() - RESUME_SECONDS - _PROBE_SECONDS)
    trouble = _close(attempt, early) if member.maybe_open else ""
    state, doubt = _holds(member, failure, early, trouble=bool(trouble))
    paused, lost = _let_go(member, state, failure)
    if (lost or trouble or suspect or doubt) and not answers(engine, grace.at_most(_PROBE_SECONDS)):
        state = EngineState.UNREACHABLE
    detail = doubt or lost or trouble or words
    return Settled(state, doubt, paused, bool(trouble), detail)


def _holds(
    member: Member, failure: Failure, deadline: Deadline, *, trouble: bool
) -> tuple[EngineState, str]:
    """What the engine holds, and the doubt that is left about it."""
    attempt, rules = member.attempt, failure.rules
    if member.state is EngineState.NEW and not attempt.suspicion:
        return EngineState.NEW, ""
    if attempt.complete and attempt.full and not trouble:
        doubt = "" if attempt.flushed else _flush(member.engine, attempt, rules, deadline)
        if failure.phase in _UNPROVEN and not doubt:
            _check_word(member, failure, deadline)
        doubt = doubt or attempt.suspicion
        return (EngineState.MIXED if doubt else EngineState.NEW), doubt
    doubt = attempt.doubt_left(_doubt_before(member))
    return (EngineState.MIXED if doubt else EngineState.OLD), doubt


def _check_word(member: Member, failure: Failure, deadline: Deadline) -> None:
    """A yes may have come from an engine that received nothing; in a broken broadcast above all."""
    try:
        failure.prove(member, deadline)
    except WeightUpdateError as error:
        if isinstance(error, WeightMismatchError) or failure.phase == "transfer":
            member.attempt.suspicion = error.message


def _let_go(member: Member, state: EngineState, failure: Failure) -> tuple[bool, str]:
    """Resumes the engine if it may be; whether it may be paused still, and why."""
    held = state is EngineState.MIXED and failure.rules.on_failure == "hold"
    foreign = state is EngineState.OLD and member.found_paused
    # Resumed before its label is written, it would serve new weights under the older one.
    counted = failure.phase in ("count", "continue")
    awaits = state is EngineState.NEW and failure.rules.regroups and not counted
    if not member.maybe_paused or held or foreign or awaits:
        return member.maybe_paused, ""
    grace = failure.grace
    paused, lost = _resume(member.engine, grace.at_most(grace.remaining() - _PROBE_SECONDS))
    if failure.phase == "pause" and not lost and member.unanswered:
        return True, LATE_PAUSE
    return paused, lost


def _started_anew(member: Member, grace: Deadline) -> Sighting | None:
    """What the server shows, if it is not the one that the attempt began with."""
    try:
        seen = member.engine.observe(grace.at_most(_PROBE_SECONDS))
    except WeightUpdateError:
        return None
    return seen if member.is_another(seen) else None


def _hold_anew(member: Member, failure: Failure, anew: Sighting) -> Settled:
    """A server that restarted serves the weights it started with: it waits for a full push."""
    engine, hold = member.engine, failure.rules.on_failure == "hold"
    deadline = failure.grace.at_most(RESUME_SECONDS)
    paused = hold or anew.ready is False
    try:
        if hold:
            mode = failure.rules.manners(engine.url).pause_mode
            engine.pause(mode, deadline, again=anew.ready is False)
        else:
            engine.resume(deadline)
            paused = False
    except WeightUpdateError as error:
        _log.debug("%s was not held or let go: %s", member.url, error)
        paused = anew.ready is not True
    return Settled(EngineState.MIXED, RESTARTED, paused, open=False, detail=RESTARTED, anew=anew)


def _doubt_before(member: Member) -> str:
    """An update found open taints an engine, unless it is one that this trainer left open."""
    return member.doubt or (
        "another trainer left its update open" if member.attempt.found_open else ""
    )


def _leave(engine: Engine, calls: Calls, failure: Failure) -> None:
    """Has an engine drop the group, unless that may end it and frees nobody.

    One that is not in the broadcast, because it refused or hangs, may be what others in its tree
    wait for: leaving the group frees them, and nothing on the trainer's side does.
    """
    own, others = calls[engine.url], [call for url, call in calls.items() if url != engine.url]
    if engine.ends_without_group and own is not None:
        wait([own], timeout=_LATE_SECONDS)
        if may_obey(own) and all(call is None or call.done() for call in others):
            return
    try:
        engine.leave(failure.group.name, failure.grace)
    except WeightUpdateError as error:
        _log.debug("%s did not leave the group: %s", engine.url, error)


def _await_answer(member: Member, phase: Phase, grace: Deadline) -> str:
    """Waits for the call that was running; its outcome counts. Returns its own error's words."""
    if member.call is None:
        return ""
    wait([member.call], timeout=min(_ANSWER_SECONDS, grace.remaining()))
    if not member.call.done():
        if phase == "transfer":
            member.attempt.suspicion = member.attempt.suspicion or "no answer to an update request"
        return ""
    error = member.call.exception()
    return "" if error is None else str(getattr(error, "message", "") or error)


def _close(attempt: Attempt, deadline: Deadline) -> str:
    """Leaves no update open; returns why that could not be done."""
    if attempt.session is None:
        return ""
    try:
        attempt.session.recover(deadline)
    except SILENT as error:
        return error.message
    except WeightUpdateError as error:
        attempt.suspicion = attempt.suspicion or error.message
        return error.message
    return ""


def _flush(engine: Engine, attempt: Attempt, rules: UpdateRules, deadline: Deadline) -> str:
    """Flushes if the rules want it; returns the doubt that is left."""
    manners = rules.manners(engine.url)
    try:
        if attempt.flush_owed or (manners.flush and engine.can_flush(manners.pause_mode)):
            engine.flush(deadline.at_most(_FLUSH_SECONDS))
    except WeightUpdateError as error:
        return f"{STALE_CACHE}: {error.message}"
    return ""


def release(fleet: Fleet, grace: Deadline) -> None:
    """Resumes engines with new weights that waited, paused, for an attempt that never came."""
    waiting = [m for m in fleet.members if m.state is EngineState.NEW and m.maybe_paused]
    calls = [(member, spawn(_resume, member.engine, grace)) for member in waiting]
    wait([call for _, call in calls], timeout=grace.remaining())
    for member, call in calls:
        if call.done():
            member.maybe_paused, lost = call.result()
            member.detail = member.detail or lost


def _resume(engine: Engine, grace: Deadline) -> tuple[bool, str]:
    """Whether the engine may still be paused, and why it could not be resumed."""
    try:
        engine.resume(grace)
    except WeightUpdateError as error:
        return True, f"could not be resumed: {error.message}"
    return False, ""
