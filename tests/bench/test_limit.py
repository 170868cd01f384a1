"""The huge broadcast that updates are measured beside."""

from __future__ import annotations

import pytest

from weight_update.bench.gpu.limit import HugeBroadcast


@pytest.mark.timeout(300)
def test_it_is_measured_again_and_again() -> None:
    with HugeBroadcast(1 << 20, ["cpu", "cpu"]) as limit:
        assert all(limit.seconds() > 0 for _ in range(3))


@pytest.mark.timeout(300)
def test_processes_that_do_not_come_are_an_error_with_their_words() -> None:
    with pytest.raises(RuntimeError, match="nowhere"), HugeBroadcast(2, ["nowhere", "cpu"]):
        pass
