"""What identifies a run: the machine, the versions; and how much memory this process took."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("weight-update", "torch", "torchrl", "tensordict", "transformers")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, GPUs, Python and package versions."""
    return {
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version()} | _versions(),
    }


def _processor() -> str:
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


class PeakMemory:
    """The most that this process, or a GPU of it, held above what it holds now.

    Args:
        device: Which memory.

    Example:
        >>> peak = PeakMemory(torch.device("cpu"))
        >>> held = torch.ones(1 << 26)  # far more than a busy process gives back meanwhile
        >>> extra = peak.above()
        >>> extra is None or extra > (1 << 25)
        True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._start: int | None = torch.cuda.memory_allocated(device)
        else:
            self._start = _resident("VmRSS") if _forget_peak() else None

    def above(self) -> int | None:
        """Bytes; None where the system does not tell."""
        if self._start is None:
            return None
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device)) - self._start
        peak = _resident("VmHWM")
        return None if peak is None else peak - self._start


def _forget_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident(key: str) -> int | None:
    try:
        found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
