"""Messages between ranks, on a store of this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import distributed

from weight_update.errors import WeightUpdateError
from weight_update.transports.rank_channel import RankChannel, open_channel


@pytest.fixture
def store() -> Any:
    return distributed.HashStore()


def test_a_message_stays_until_it_is_removed_and_is_removed_once(store: Any) -> None:
    one, other = RankChannel(store, 0, 2), RankChannel(store, 1, 2)
    one.post("key", {"n": 1})
    assert [other.peek("key"), other.peek("key")] == [{"n": 1}] * 2
    assert [other.remove("key"), one.remove("key")] == [True, False]
    assert one.peek("key") is None


def test_a_later_message_takes_the_place_of_an_earlier_one(store: Any) -> None:
    channel = RankChannel(store, 0, 2)
    for number in (1, 2):
        channel.post("key", {"n": number})
    assert channel.peek("key") == {"n": 2}


def test_the_trainers_own_keys_are_out_of_reach(store: Any) -> None:
    store.set("key", "theirs")
    channel = RankChannel(store, 0, 2)
    assert channel.peek("key") is None
    channel.post("key", {})
    assert store.get("key") == b"theirs"


class Gone:
    """A store whose process has ended."""

    def __getattr__(self, name: str) -> Any:
        def fail(*arguments: Any) -> None:
            raise RuntimeError("Connection reset by peer")

        return fail


@pytest.mark.parametrize(
    "use", [lambda c: c.post("key", {}), lambda c: c.peek("key"), lambda c: c.remove("key")]
)
def test_a_store_that_is_gone_is_an_error_that_says_what_to_do(use: Any) -> None:
    with pytest.raises(WeightUpdateError, match="does not answer: Connection reset") as caught:
        use(RankChannel(Gone(), 1, 2))
    assert "restart the trainer" in caught.value.remedy


@pytest.fixture
def alone() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_there_is_no_channel_without_a_process_group() -> None:
    assert open_channel() is None


@pytest.mark.usefixtures("alone")
def test_there_is_no_channel_for_a_rank_that_is_alone() -> None:
    assert open_channel() is None
