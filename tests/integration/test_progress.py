"""A progress hook of ``update_weights()``, on real engines."""

from __future__ import annotations

import pytest

from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.report import Progress

from . import kit


@pytest.mark.parametrize("hook_breaks", [False, True])
def test_an_update_lands_whatever_its_progress_hook_does(
    engine: ReferenceEngine, hook_breaks: bool
) -> None:
    told: list[Progress] = []

    def hook(now: Progress) -> None:
        told.append(now)
        if hook_breaks:
            raise ZeroDivisionError("a broken bar")

    with kit.make_sender(engine, bucket_bytes=20_000) as sender:
        report = sender.update_weights(kit.llama(1), progress=hook)

    assert kit.served(engine) == kit.tokens_of(1)
    if not hook_breaks:
        assert (told[-1].bytes_done, told[-1].bucket) == (report.bytes, report.buckets)
        assert told[-1].phase == "continue"


def test_a_refused_bucket_is_not_counted(engine: ReferenceEngine) -> None:
    told: list[Progress] = []
    engine.inject(Fault(kit.UPDATE, "refuse", after=1, times=1))

    with (
        kit.make_sender(engine, bucket_bytes=20_000) as sender,
        pytest.raises(RuntimeError, match="1 of "),
    ):
        sender.update_weights(kit.llama(1), progress=told.append)

    assert told[-1].bucket == 1
    assert 0 < told[-1].bytes_done < told[-1].bytes_total
