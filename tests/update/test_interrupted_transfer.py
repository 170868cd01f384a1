"""An interrupt in the middle of a bucket: gloo wakes no peer that has a part of a message."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Timer
from unittest.mock import MagicMock, Mock

import pytest

from weight_update.errors import WeightUpdateError
from weight_update.update.fleet import Fleet
from weight_update.update.settle import Failure, settle
from weight_update.waiting import Deadline


@pytest.mark.parametrize(
    ("error", "arrived"),
    [(KeyboardInterrupt(), True), (WeightUpdateError("it said no"), False)],
    ids=["an interrupt", "a refusal"],
)
def test_what_is_under_way_arrives_before_an_interrupted_group_is_given_up(
    error: BaseException, arrived: bool
) -> None:
    call: Future[None] = Future()
    at_the_end: list[bool] = []
    group = Mock(name="group")
    group.give_up.side_effect = lambda: at_the_end.append(call.done())
    member = MagicMock(url="http://a:1", call=call)
    answer = Timer(0.1, call.set_result, [None])
    if arrived:
        answer.start()

    settle(
        Fleet([member]),
        Failure(group, Mock(), "transfer", error, Deadline(1.8), Mock()),
    )

    assert at_the_end[0] is arrived
