"""After a failure: find out what each engine holds, tidy it, and resume it or hold it.

The rule: nothing applied - resumed, always. Everything applied and the cache flushed - resumed.
Mixed weights - held, unless the policy says otherwise, until a full push heals them. No
answer - one bounded attempt to resume, and reported as lost.
"""

from __future__ import annotations

import logging
from concurrent.futures import wait

from weight_update.errors import EngineUnreachable, Phase, UpdateTimeout, WeightUpdateError
from weight_update.report import EngineState
from weight_update.update.fleet import Fleet, Member
from weight_update.update.policy import Policy
from weight_update.update.protocols import Group
from weight_update.waiting import Deadline, spawn

_log = logging.getLogger("weight_update")

GRACE_SECONDS = 1.8
"""A failed update ends at most 2 s after its failure or its deadline."""
_ANSWER_SECONDS = 1.0
UNCOUNTED = "serves the weights of this failed update under its old label"

STALE_CACHE = "weights new, cache stale"


def settle(fleet: Fleet, group: Group, policy: Policy, phase: Phase, error: BaseException) -> None:
    """Brings every engine of a failed attempt into a known state, all at once, bounded.

    Args:
        fleet: The engines.
        group: The group of the attempt; given up if the transfer failed in it.
        policy: The policy of the attempt.
        phase: The step that failed.
        error: Why it failed.
    """
    grace = Deadline(GRACE_SECONDS)
    if phase == "transfer":
        group.give_up()
    tasks = {spawn(_settle_member, m, group, policy, phase, grace): m for m in fleet.members}
    _, late = wait(tasks, timeout=grace.remaining() + 0.1)
    for task in late:
        tasks[task].state = EngineState.UNREACHABLE
        tasks[task].detail = "no answer while the update was being settled"
    culprit = getattr(error, "engine", None)
    for member in fleet.members:
        if member.url == culprit and not member.detail:
            member.detail = str(getattr(error, "message", error))


def _settle_member(
    member: Member, group: Group, policy: Policy, phase: Phase, grace: Deadline
) -> None:
    if phase == "transfer":
        spawn(_leave, member, group.name, grace)
    _await_answer(member, phase, grace)
    try:
        _tidy(member, policy, grace)
    except (EngineUnreachable, UpdateTimeout) as error:
        _lost(member, error, grace)
        return
    except WeightUpdateError as error:
        member.suspect(member.doubt or error.message)
    member.conclude()
    if member.state is EngineState.NEW and phase not in ("stamp", "count", "continue"):
        member.detail = member.detail or UNCOUNTED
    if member.state is not EngineState.MIXED or policy.on_failure == "resume":
        _resume(member, grace)


def _leave(member: Member, group_name: str, grace: Deadline) -> None:
    # An engine that refused a bucket may be what others in the broadcast tree wait for:
    # leaving the group frees them, and nothing on the trainer's side does.
    try:
        member.engine.leave(group_name, grace)
    except WeightUpdateError as error:
        _log.debug("%s did not leave the group: %s", member.url, error)


def _await_answer(member: Member, phase: Phase, grace: Deadline) -> None:
    """Waits for the call that was running when the attempt failed; its outcome counts."""
    if member.call is None:
        return
    _, pending = wait([member.call], timeout=min(_ANSWER_SECONDS, grace.remaining()))
    if pending and phase == "transfer" and not member.doubt:
        member.suspect("no answer to an update request")


def _tidy(member: Member, policy: Policy, grace: Deadline) -> None:
    complete = 0 < member.buckets == member.confirmed
    if member.session is not None:
        member.session.recover(grace)  # closes it; the lost answer may have closed it already
        member.session = None
    if complete and member.state is not EngineState.NEW:
        _flush(member, policy, grace)


def _flush(member: Member, policy: Policy, grace: Deadline) -> None:
    mode = policy.pause_mode
    try:
        if member.flush_refused or (policy.flush and member.engine.can_flush(mode)):
            member.engine.flush(grace.at_most(0.5))
        member.finish_attempt()
    except WeightUpdateError as error:
        member.suspect(f"{STALE_CACHE}: {error.message}")


def _resume(member: Member, grace: Deadline) -> None:
    if not member.maybe_paused:
        return
    try:
        member.engine.resume(grace)
        member.maybe_paused = False
    except (EngineUnreachable, UpdateTimeout) as error:
        _lost(member, error, grace)
    except WeightUpdateError as error:
        member.detail = f"could not be resumed: {error.message}"


def _lost(member: Member, error: WeightUpdateError, grace: Deadline) -> None:
    """No answer: tells a lost engine from one that is only slow to answer this call."""
    member.detail = error.message
    member.conclude()
    try:
        member.engine.label(grace.at_most(0.3))
    except WeightUpdateError:
        member.state = EngineState.UNREACHABLE
