"""One resolver for what workers return: references of Ray, futures, awaitables, plain values."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from weight_update.errors import Phase, UpdateTimeout, WeightUpdateError
from weight_update.waiting import Deadline, spawn

PATIENCE_SECONDS = 300.0
# A coroutine ends by itself after nobody waits for it any more.
_LINGER_SECONDS = 0.5


def resolve(value: Any, deadline: Deadline, phase: Phase = "transfer") -> Any:
    """Waits for what a call returned, under a deadline.

    Everything in a list is waited for at once. When one of several fails, the others are given
    until the deadline to end before its error is raised: whoever is told of it may start anew,
    and nobody should be inside the old work then.

    Args:
        value: A reference of Ray, a future, a coroutine or another awaitable, a list or tuple of
            such, a generator of any kind, which gives a list, or anything else, which is
            returned as it is.
        deadline: By when all of it must be there.
        phase: What the error says was waited for.

    Raises:
        UpdateTimeout: Something was not there in time.
        Exception: Whatever the work raised.

    Example:
        >>> done: Future[int] = Future()
        >>> done.set_result(2)
        >>> resolve([1, done], Deadline(1.0))
        [1, 2]
    """
    begun = _begun(value, deadline)
    running = list(_futures(begun))
    if not running:
        return value
    _wait_for(running, deadline, phase)
    return resolve(_taken(begun), deadline, phase)  # an actor may answer with references


def asked(what: str, call: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
    """What a side answers; whatever it raises becomes an error that says what was asked.

    Args:
        what: Names the call.
        call: Asks.
        seconds: How long workers may take.

    Raises:
        WeightUpdateError: It raised something, or did not answer in time.
    """
    try:
        return resolve(call(), Deadline(seconds), "configure")
    except WeightUpdateError:
        raise
    except Exception as error:
        raise WeightUpdateError(f"{what} failed: {type(error).__name__}: {error}") from error


def _begun(value: Any, deadline: Deadline) -> Any:
    """The same, with a future in place of whatever has to be waited for."""
    if isinstance(value, (list, tuple)):
        return [_begun(item, deadline) for item in value]
    if _is_reference(value):  # it can be awaited too, but only where ray's own loop runs
        return value.future()
    if inspect.isgenerator(value):
        return spawn(list, value)
    work = _collected(value) if inspect.isasyncgen(value) else value
    if inspect.isawaitable(work):
        return spawn(_run, work, deadline.remaining() + _LINGER_SECONDS)
    return value


def _is_reference(value: Any) -> bool:
    # A reference can only exist once ray was imported; importing it here would need it.
    reference = getattr(sys.modules.get("ray"), "ObjectRef", None)
    return isinstance(reference, type) and isinstance(value, reference)


async def _collected(answers: AsyncIterator[Any]) -> list[Any]:
    return [answer async for answer in answers]


def _run(work: Awaitable[Any], seconds: float) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(bounded())


def _futures(begun: Any) -> Iterator[Future[Any]]:
    if isinstance(begun, Future):
        yield begun
    for item in begun if isinstance(begun, list) else ():
        yield from _futures(item)


def _taken(begun: Any) -> Any:
    if isinstance(begun, Future):
        return begun.result()
    return [_taken(item) for item in begun] if isinstance(begun, list) else begun


def _wait_for(running: list[Future[Any]], deadline: Deadline, phase: Phase) -> None:
    done = wait(running, deadline.remaining(), FIRST_EXCEPTION).done
    failed = next((each for each in running if each in done and each.exception()), None)
    late = wait(running, deadline.remaining()).not_done
    if failed is not None:
        failed.result()
    if late:
        raise UpdateTimeout(
            f"{len(late)} of {len(running)} workers did not answer within {deadline.seconds:.1f} s",
            phase=phase,
            remedy="look at the workers' logs; refit_timeout_s= is the time that they have",
        )
