"""The state machine of a fake: order of calls, traps, death."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from .releases import INIT_KEYS, UPDATE_KEYS, Release
from .weights import Model, signature

_STEP_SECONDS = 0.002
_TAGS = {"weights", "kv_cache"}


class EngineDead(RuntimeError):
    """The engine core is gone; its HTTP front answers on."""

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace for the root cause.")


class Wire(Protocol):
    """The group that weights come in."""

    def receive(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor."""

    def close(self) -> None:
        """Leaves the group."""


class FakeEngine:
    """One engine core; calls run one at a time, so that one that blocks keeps others waiting.

    Args:
        weights: What it starts with.
        release: The release that it imitates.
        open_wire: Joins a group as a rank.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], release: Release, open_wire: Any):
        self.model, self.release = Model(weights), release
        self.label, self.paused, self.dead = "default", False, False
        self.running = 0
        self.torn_after: int | None = None  # the next update fails once it loaded so many
        self._open_wire = open_wire
        self._wire: Wire | None = None
        self._packed = False
        self._active = False
        self._sleeping: set[str] = set()
        self._aborts = 0
        self._prefixes: str | None = None
        self._core = threading.Lock()

    @contextmanager
    def core(self) -> Iterator[None]:
        """The core's attention; whoever asks while a call blocks waits for it."""
        with self._core:
            if self.dead:
                raise EngineDead
            yield

    def die(self) -> None:
        """The core goes, as it does when a request meets weights that are not there."""
        self.dead = True
        raise EngineDead

    # -- pausing and sleeping -----------------------------------------------------------

    def pause(self, mode: str, *, clear_cache: bool = True) -> None:
        self.paused = True
        self._aborts += mode == "abort"
        self._prefixes = None if clear_cache else self._prefixes

    def resume(self) -> None:
        self.paused = False

    def sleep(self, level: int, mode: str) -> None:
        self.pause(mode, clear_cache=level > 0)
        if level:
            self._sleeping = set(_TAGS)

    def wake_up(self, tags: list[str]) -> bool:
        self._sleeping -= set(tags or _TAGS)
        self.paused = self.paused and bool(self._sleeping)
        return not self._sleeping

    @property
    def sleeping(self) -> bool:
        return bool(self._sleeping)

    # -- weights ------------------------------------------------------------------------

    def init_transfer(self, info: dict[str, Any]) -> None:
        _check_keys("init_info", info, INIT_KEYS)
        self._drop_wire()
        self._packed, self._wire = info["packed"], self._open_wire(info)

    def shutdown_transfer(self) -> None:
        if self._active:
            raise RuntimeError("Cannot release a trainer connection during a weight update")
        self._drop_wire()

    def start(self) -> None:
        if self._active:
            raise RuntimeError(
                "start_weight_update called while a weight update is already active. "
                "Call finish_weight_update first."
            )
        self.model.begin()
        self._active = True

    def update(self, info: dict[str, Any]) -> None:
        if not self._active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self._load(info)
        except BaseException:
            self._active = False  # and the model stays where it is: on meta
            self._drop_wire()  # others may wait for this rank
            raise

    def finish(self) -> None:
        if not self._active:
            raise RuntimeError(
                "finish_weight_update called without a matching start_weight_update."
            )
        self.model.finish()
        self._active = False

    def _load(self, info: dict[str, Any]) -> None:
        _check_keys("update_info", info, UPDATE_KEYS)
        names, dtypes, shapes = info["names"], info["dtype_names"], info["shapes"]
        if not len(names) == len(dtypes) == len(shapes):
            raise ValueError("`dtype_names` and `shapes` should be of the same size as `names`")
        specs = [
            (getattr(torch, dtype), shape) for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
        for index, (name, value) in enumerate(zip(names, self._values(specs), strict=True)):
            if index == self.torn_after:
                self.torn_after = None
                raise RuntimeError("Connection closed by peer")
            self.model.load(name, value)

    def _values(self, specs: list[tuple[torch.dtype, list[int]]]) -> Iterator[torch.Tensor]:
        if self._wire is None:
            raise RuntimeError("no group: /init_weight_transfer_engine was not called")
        if not self._packed:
            for dtype, shape in specs:
                yield self._wire.receive(shape, dtype)
            return
        sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in specs]
        parts = self._wire.receive([sum(sizes)], torch.uint8).split(sizes)
        for (dtype, shape), part in zip(specs, parts, strict=True):
            yield part.clone().view(dtype).view(shape)

    def _drop_wire(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    # -- requests -----------------------------------------------------------------------

    def reset_prefix_cache(self, *, running: bool = False) -> bool:
        """Empties the prefix cache; requests that run or are frozen may keep it from being done."""
        if self.running and not running:
            return False
        self._prefixes = None
        return True

    def generate(self, *, until_frozen: bool = False) -> tuple[str, str]:
        """What it generates, and why it stopped; a request that finds it paused waits.

        A prefix that other weights left in the cache shows in the text.

        Args:
            until_frozen: Whether it goes on until a pause froze it and ended.
        """
        aborts, goes_on = None, True
        with self._counted():
            while goes_on:
                time.sleep(_STEP_SECONDS)
                with self.core():
                    if aborts not in (None, self._aborts):
                        return "", "abort"
                    if self.paused:
                        until_frozen = until_frozen and aborts is None
                        continue
                    aborts, goes_on = self._aborts, until_frozen
                    self._step()
        with self.core():
            now = signature(self.model.weights())
            self._prefixes = self._prefixes or now
            return (now if self._prefixes == now else f"{now} after {self._prefixes}"), "length"

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def _step(self) -> None:
        if self.model.on_meta or self._sleeping:
            self.die()


def _check_keys(what: str, info: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(info.keys() - known):
        raise ValueError(
            f"Invalid {what}: __init__() got an unexpected keyword argument {unknown[0]!r}"
        )
    if missing := sorted(known - info.keys()):
        raise ValueError(f"Invalid {what}: __init__() missing required argument {missing[0]!r}")
