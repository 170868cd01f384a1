"""Facades over engines inside the process: what a row of ours does around and inside an update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.update.fakes import FakeEngine, FakeGroup, FakePacker
from weight_update.delivery.delivery import Delivery
from weight_update.delivery.deployment import WholeModel
from weight_update.options import UpdateOptions
from weight_update.update.updater import Updater
from weight_update.update.ways import Ends
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import Cargo

from .nemo import Journal

FREE_BYTES = 1000


class NotingEngine(FakeEngine):
    """An engine whose calls are noted in the journal, too."""

    journal: Journal

    def _enter(self, call: str) -> None:
        if call not in ("observe", "label"):
            self.journal.note(f"E.{call}")
        super()._enter(call)


class NotingPacker(FakePacker):
    """Keeps the names and the first value of everything that is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, float]] = []
        self.sizes: list[int] = []

    def pack(self, bucket: Bucket) -> Cargo:
        values = [weight.read() for weight in bucket.weights]
        names = (spec.name for spec in bucket.specs)
        self.sent += [(n, float(v.reshape(-1)[0])) for n, v in zip(names, values, strict=True)]
        self.sizes.append(sum(spec.nbytes for spec in bucket.specs))
        return Cargo(values)


class FakePolicy:
    """A trainer whose weights are read here."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.weights: Any = {name: torch.full((4,), float(i)) for i, name in enumerate("abcd")}

    def source(self) -> Any:
        self.journal.note("P.source")
        return self.weights

    def prepare_refit_info(self) -> None:
        self.journal.note("P.info")

    def offload_before_refit(self) -> None:
        self.journal.note("P.offload")

    def offload_after_refit(self) -> None:
        self.journal.note("P.restore")

    def get_free_memory_bytes(self) -> int:
        self.journal.note("P.free")
        return FREE_BYTES


class FakeGeneration:
    """Engines that can be spoken to from here."""

    def __init__(self, journal: Journal, engines: int = 1) -> None:
        self.journal = journal
        self.urls = tuple(f"http://engine{index}:1" for index in range(engines))
        self.engines: dict[str, NotingEngine] = {}
        self.groups: list[FakeGroup] = []
        self.packer = NotingPacker()
        self.asked: dict[str, Any] = {}

    def delivery(self, *, colocated: bool, timeout_s: float | None, policy: Any) -> Delivery:
        self.asked = {"colocated": colocated, "timeout_s": timeout_s, "policy": policy}
        options = UpdateOptions(timeout=30.0 if timeout_s is None else timeout_s)
        self.deliver = Delivery(self.urls, options, lambda chosen, _: _Deployment(self, chosen))
        return self.deliver

    def open(self, url: str) -> NotingEngine:
        self.engines[url] = NotingEngine(url)
        self.engines[url].journal = self.journal
        return self.engines[url]

    def open_group(self, *_: Any) -> FakeGroup:
        self.groups.append(FakeGroup())
        return self.groups[-1]

    def prepare_refit_info(self, info: Any) -> None:
        self.journal.note("G.info")

    def prepare_for_generation(self, *, tags: Sequence[str]) -> None:
        self.journal.note(f"G.prepare {tags[0]}")


class _Deployment(WholeModel):
    def __init__(self, generation: FakeGeneration, options: UpdateOptions) -> None:
        super().__init__()
        self._generation, self._options = generation, options

    def updater(self, urls: Sequence[str]) -> Updater:
        ends = Ends(self._generation.open_group, lambda _: self._generation.packer)
        return Updater(urls, self._generation.open, {"broadcast": ends}, self._options)

    def counted(self, urls: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        pass
