"""Turns: one update at a time an engine, whichever sender or process of this host makes it."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path

from weight_update.errors import ConfigurationError, UpdateTimeout, WeightUpdateError
from weight_update.options import WhenBusy, place_of
from weight_update.waiting import Deadline

_log = logging.getLogger("weight_update")

_POLL_SECONDS = 0.01

# Senders whose update runs in this thread, or in a thread that it started.
_updating: ContextVar[frozenset[int]] = ContextVar("weight_update_updating", default=frozenset())


@contextmanager
def one_at_a_time(owner: int) -> Iterator[None]:
    """Refuses a hook of a running update that calls its own sender: it would wait for itself.

    Raises:
        ConfigurationError: ``owner`` is updating, and this is a hook of it.
    """
    if owner in _updating.get():
        raise ConfigurationError(
            "a hook of a running update called its sender",
            phase="plan",
            remedy="call it once the update has returned",
        )
    token = _updating.set(_updating.get() | {owner})
    try:
        yield
    finally:
        _updating.reset(token)


@contextmanager
def turn(urls: Iterable[str], when_busy: WhenBusy, deadline: Deadline) -> Iterator[None]:
    """Holds the engines for one update.

    A lock file an engine keeps senders of other processes of this host away too, and the kernel
    frees it when its holder dies. Trainers on other hosts are not kept away.

    Raises:
        UpdateTimeout: Another update still ran at the deadline.
        WeightUpdateError: Another update runs, and waiting was not wanted.
    """
    with ExitStack() as held:
        # In one order for all, and each once: turns that overlap do not wait for each other.
        places = {place_of(url): url for url in urls}
        for url in (places[place] for place in sorted(places)):
            held.enter_context(_locked(url, when_busy, deadline))
        yield


@contextmanager
def _locked(url: str, when_busy: WhenBusy, deadline: Deadline) -> Iterator[None]:
    try:
        handle = os.open(_lock_file(url), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        _log.warning("other processes are not kept away from %s: %s", url, error)
        yield
        return
    try:
        _take(handle, url, when_busy, deadline)
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # a fork's copy of the handle would hold it on
        os.close(handle)


def _take(handle: int, url: str, when_busy: WhenBusy, deadline: Deadline) -> None:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if when_busy == "refuse":
            raise WeightUpdateError(
                "busy: another update of this engine is running",
                engine=url,
                phase="plan",
                remedy="push again later, or wait for it with when_busy='wait'",
            )
        if deadline.expired():
            raise UpdateTimeout(
                f"another update of this engine was still running after {deadline.seconds:.1f} s",
                engine=url,
                phase="plan",
            )
        deadline.sleep(_POLL_SECONDS)


def _lock_file(url: str) -> Path:
    name = hashlib.sha256(place_of(url).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"weight_update-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} is somebody else's")  # who could hold or move the lock
    return folder / f"{name}.lock"
