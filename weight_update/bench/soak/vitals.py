"""Memory, threads and descriptors of a process, and whether they stay flat."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

_MEGABYTE = 1_000_000
_CLOSE_WAIT = "08"
# Connections that a sender's pool keeps to each engine.
_POOLED = 4
# Fewer than these cannot tell a leak from a warm-up.
ENOUGH_SAMPLES = 15


@dataclass(frozen=True)
class Vitals:
    """What one process holds.

    Attributes:
        rss_bytes: Resident memory.
        threads: Threads.
        fds: Open descriptors.
        close_wait: Sockets whose peer is gone and that nobody closed.
    """

    rss_bytes: int
    threads: int
    fds: int
    close_wait: int


def vitals_of(pid: int) -> Vitals | None:
    """What a process of this host holds now; None if it is gone.

    Example:
        >>> own = vitals_of(os.getpid())
        >>> own is None or own.threads >= 1
        True
    """
    home = Path("/proc") / str(pid)
    try:
        status = (home / "status").read_text()
        links = _links(home / "fd")
        sockets = _sockets_left(home / "net")
    except OSError:
        return None
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    rss = re.search(r"VmRSS:\s+(\d+) kB", status)
    threads = re.search(r"Threads:\s+(\d+)", status)
    if rss is None or threads is None:  # a zombie
        return None
    return Vitals(int(rss[1]) * 1024, int(threads[1]), len(links), len(inodes & sockets))


def _links(folder: Path) -> list[str]:
    found = []
    for name in os.listdir(folder):
        try:
            found.append(os.readlink(folder / name))
        except FileNotFoundError:  # closed meanwhile, as the listing's own
            continue
    return found


def _sockets_left(folder: Path) -> set[str]:
    """Inodes of the host's TCP sockets that wait for their owner to close them."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        if (folder / name).exists()
        for line in (folder / name).read_text().splitlines()[1:]
    ]
    return {row[9] for row in rows if row[3] == _CLOSE_WAIT}


@dataclass(frozen=True)
class Trend:
    """How one figure of a process moved.

    Attributes:
        what: Which figure, of which process.
        early: Its median in the second fifth of the samples; the first is warm-up.
        late: Its median in the last fifth.
        allowed: How much larger ``late`` may be.

    Example:
        >>> Trend("threads of the trainer", early=14.0, late=15.0, allowed=2.0).flat
        True
    """

    what: str
    early: float
    late: float
    allowed: float

    @property
    def flat(self) -> bool:
        """Whether it did not grow by more than is allowed."""
        return self.late - self.early <= self.allowed


def trends(who: str, samples: Sequence[Vitals], *, peers: int = 1) -> list[Trend]:
    """The trend of each figure; none of so few samples that they say nothing.

    Threads and descriptors in use may grow by 2, memory by 5 % or 20 MB, whichever is more.
    Connections that the other side closed wait in a sender's pool, as many as that holds.

    Args:
        who: The process.
        samples: What it held, in order.
        peers: How many processes a pool of it talks to.
    """
    if len(samples) < ENOUGH_SAMPLES:
        return []
    fifth = len(samples) // 5
    early, late = samples[fifth : 2 * fifth], samples[-fifth:]
    idle = [v.close_wait for v in early]
    room = _POOLED * peers - median(idle)
    return [
        _trend(f"threads of {who}", [v.threads for v in early], [v.threads for v in late], 2),
        _trend(f"descriptors in use of {who}", _in_use(early), _in_use(late), 2),
        _trend(f"sockets in CLOSE_WAIT of {who}", idle, [v.close_wait for v in late], room),
        _memory_trend(who, early, late),
    ]


def _in_use(samples: Sequence[Vitals]) -> list[int]:
    return [v.fds - v.close_wait for v in samples]


def _trend(what: str, early: Sequence[float], late: Sequence[float], allowed: float) -> Trend:
    return Trend(what, float(median(early)), float(median(late)), allowed)


def _memory_trend(who: str, early: Sequence[Vitals], late: Sequence[Vitals]) -> Trend:
    sizes = [v.rss_bytes / _MEGABYTE for v in early]
    return _trend(
        f"MB of memory of {who}",
        sizes,
        [v.rss_bytes / _MEGABYTE for v in late],
        max(0.05 * median(sizes), 20.0),
    )
