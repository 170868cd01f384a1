"""After a failure: find out what each engine holds, tidy it, and resume it or hold it.

The rule: nothing applied - resumed, always. Everything applied and the cache flushed - resumed.
Mixed weights - held, unless the rules say otherwise, until a full push heals them. No
answer - one bounded attempt to resume, and reported as lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass

from weight_update.errors import EngineUnreachable, Phase, UpdateTimeout, WeightUpdateError
from weight_update.report import EngineState
from weight_update.update.fleet import Attempt, Fleet, Member
from weight_update.update.protocols import Engine, Group
from weight_update.update.rules import UpdateRules
from weight_update.waiting import Deadline, spawn

_log = logging.getLogger("weight_update")

# A failed update ends at most 2 s after its failure or its deadline. Of these 1.8 s, at most
# 1.0 go to the answer that is still out, and the last 0.6 are kept for resuming.
GRACE_SECONDS = 1.8
_ANSWER_SECONDS = 1.0
_RESUME_SECONDS = 0.6
_FLUSH_SECONDS = 0.5
_PROBE_SECONDS = 0.3

STALE_CACHE = "weights new, cache stale"
_SILENT = (EngineUnreachable, UpdateTimeout)


@dataclass(frozen=True)
class Settled:
    """What became of one engine."""

    state: EngineState
    doubt: str
    paused: bool
    open: bool
    detail: str


def settle(
    fleet: Fleet, group: Group, rules: UpdateRules, phase: Phase, error: BaseException
) -> None:
    """Brings every engine of a failed attempt into a known state, all at once, bounded.

    Args:
        fleet: The engines.
        group: The group of the attempt; given up if bytes may be under way in it, or if an
            engine was lost and with it a rank of the group.
        rules: The rules of the attempt.
        phase: The step that failed.
        error: Why it failed.
    """
    grace = Deadline(GRACE_SECONDS)
    if phase == "transfer":
        group.give_up()
    tasks = {m.url: spawn(_settle_engine, m, group, rules, phase, grace) for m in fleet.members}
    interrupt = _wait_out(tasks.values(), grace)
    culprit = getattr(error, "engine", None)
    for member in fleet.members:
        task = tasks[member.url]
        known = task.done() and task.exception() is None
        result = task.result() if known else _unsettled(member, task.done() and task.exception())
        _note(member, result, str(getattr(error, "message", "")) if member.url == culprit else "")
    if any(member.state is EngineState.UNREACHABLE for member in fleet.members):
        group.give_up()
    if interrupt is not None:
        raise interrupt


def _wait_out(tasks: Iterable[Future[Settled]], grace: Deadline) -> KeyboardInterrupt | None:
    """Waits even through an interrupt: leaving now would leave a whole fleet paused."""
    waiting, interrupt = list(tasks), None
    while not grace.expired():
        try:
            wait(waiting, timeout=grace.remaining() + 0.1)
            break
        except KeyboardInterrupt as error:
            interrupt = error
    return interrupt


def _note(member: Member, result: Settled, own_words: str) -> None:
    member.detail = result.detail or own_words
    member.maybe_paused, member.maybe_open = result.paused, result.open
    if result.state is EngineState.NEW and member.state is not EngineState.NEW:
        member.renew()
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


def _settle_engine(
    member: Member, group: Group, rules: UpdateRules, phase: Phase, grace: Deadline
) -> Settled:
    engine, attempt = member.engine, member.attempt
    if phase == "transfer":
        spawn(_leave, engine, group.name, grace)
    words = _await_answer(member, phase, grace)
    early = grace.at_most(grace.remaining() - _RESUME_SECONDS)
    trouble = _close(attempt, early) if member.maybe_open else ""
    if member.state is EngineState.NEW:
        state, doubt = EngineState.NEW, ""
    elif attempt.complete and attempt.full and not trouble:
        doubt = _flush(engine, attempt, rules, early)
        state = EngineState.MIXED if doubt else EngineState.NEW
    else:
        doubt = attempt.doubt_left(_doubt_before(member))
        state = EngineState.MIXED if doubt else EngineState.OLD
    held = state is EngineState.MIXED and rules.on_failure == "hold"
    paused, lost = member.maybe_paused, ""
    if paused and not held:
        paused, lost = _resume(engine, grace)
    if (lost or trouble or attempt.suspicion) and not _reachable(engine, grace):
        state = EngineState.UNREACHABLE
    return Settled(state, doubt, paused, bool(trouble), doubt or lost or trouble or words)


def _doubt_before(member: Member) -> str:
    """An update found open taints an engine, unless it is one that this trainer left open."""
    return member.doubt or (
        "another trainer left its update open" if member.attempt.found_open else ""
    )


def _leave(engine: Engine, group_name: str, grace: Deadline) -> None:
    # An engine that refused a bucket may be what others in the broadcast tree wait for:
    # leaving the group frees them, and nothing on the trainer's side does.
    try:
        engine.leave(group_name, grace)
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
    except _SILENT as error:
        return error.message
    except WeightUpdateError as error:
        attempt.suspicion = attempt.suspicion or error.message
        return error.message
    return ""


def _flush(engine: Engine, attempt: Attempt, rules: UpdateRules, deadline: Deadline) -> str:
    """Flushes if the rules want it; returns the doubt that is left."""
    try:
        if attempt.flush_refused or (rules.flush and engine.can_flush(rules.pause_mode)):
            engine.flush(deadline.at_most(_FLUSH_SECONDS))
    except WeightUpdateError as error:
        return f"{STALE_CACHE}: {error.message}"
    return ""


def _resume(engine: Engine, grace: Deadline) -> tuple[bool, str]:
    """Whether the engine may still be paused, and why it could not be resumed."""
    try:
        engine.resume(grace)
    except WeightUpdateError as error:
        return True, f"could not be resumed: {error.message}"
    return False, ""


def _reachable(engine: Engine, grace: Deadline) -> bool:
    """Tells an engine that is lost from one that is only slow to answer one call."""
    try:
        engine.label(grace.at_most(_PROBE_SECONDS))
    except _SILENT:
        return False
    except WeightUpdateError:
        return True
    return True
