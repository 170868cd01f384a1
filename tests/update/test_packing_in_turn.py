"""A bucket travels while the next is packed, unless its memory is all that there is."""

from __future__ import annotations

import pytest
import torch

from tests.update.fakes import FakeEngine, FakeGroup, FakePacker
from weight_update.options import UpdateOptions
from weight_update.update.updater import Payload, Push, Updater
from weight_update.update.ways import Ends
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import Cargo
from weight_update.weights.extract import extract_weights


class OneBuffer(FakePacker):
    """Notes what every engine had confirmed when a bucket was packed."""

    def __init__(self, engine: FakeEngine, *, alone: bool) -> None:
        self._engine, self._alone = engine, alone
        self.confirmed: list[int] = []

    def pack(self, bucket: Bucket) -> Cargo:
        self.confirmed.append(len(self._engine.buckets))
        return Cargo(super().pack(bucket).tensors, alone=self._alone)


def pushed(*, alone: bool) -> list[int]:
    engine = FakeEngine("http://engine:1")
    packer = OneBuffer(engine, alone=alone)
    ends = Ends(lambda *_: FakeGroup(), lambda _: packer)
    options = UpdateOptions(bucket_bytes=8, timeout=5.0)
    updater = Updater([engine.url], lambda _: engine, {"broadcast": ends}, options)
    weights = extract_weights({name: torch.zeros(2) for name in "abcd"})
    report = updater.update(Push(lambda: Payload(weights), lambda _: []))
    assert report.buckets == 4
    assert engine.buckets == list("abcd")
    return packer.confirmed


def test_the_only_buffer_is_written_again_once_the_bucket_in_it_arrived():
    assert pushed(alone=True) == [0, 1, 2, 3]


@pytest.mark.parametrize("alone", [True, False])
def test_no_bucket_is_packed_more_than_one_ahead(alone: bool):
    confirmed = pushed(alone=alone)

    assert all(index - 1 <= seen <= index for index, seen in enumerate(confirmed))
