"""The resolver: references of Ray, futures, coroutines, lists and plain values, in bounds."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import MagicMock

import pytest

from weight_update import UpdateTimeout, WeightUpdateError
from weight_update.synchronizers import IPCWeightSynchronizer
from weight_update.synchronizers.resolve import asked, resolve
from weight_update.waiting import Deadline

from . import ray_cluster
from .nemo import Journal, NemoPolicy, NemoVLLM, done, failed


def soon() -> Deadline:
    return Deadline(30.0)


@pytest.mark.parametrize(
    "value", [None, 0, "text", {"a": 1}, [], [1, None], (1, (2, 3)), MagicMock(), object()]
)
def test_a_plain_value_is_returned_as_it_is(value: Any):
    assert resolve(value, soon()) is value


def test_a_future_gives_its_result():
    with ThreadPoolExecutor(1) as pool:
        assert resolve(pool.submit(lambda: 3), soon()) == 3


def test_a_coroutine_is_run():
    async def worked() -> int:
        await asyncio.sleep(0)
        return 3

    assert resolve(worked(), soon()) == 3


class Awaited:
    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        return 3


async def answering() -> Any:
    for answer in (1, Awaited()):
        yield answer


@pytest.mark.parametrize(
    ("work", "result"),
    [
        (Awaited, 3),
        (answering, [1, 3]),
        (lambda: (done(number) for number in (1, 2)), [1, 2]),
        (lambda: [Awaited(), answering()], [3, [1, 3]]),
    ],
    ids=["awaitable", "async generator", "generator of futures", "several"],
)
def test_whatever_has_to_be_awaited_or_asked_is(work: Any, result: Any):
    assert resolve(work(), soon()) == result


def test_a_future_of_another_loop_is_no_success():
    loop = asyncio.new_event_loop()
    with pytest.raises(ValueError, match="loop"):
        resolve(loop.create_future(), soon())
    loop.close()


def test_a_coroutine_is_run_though_a_loop_runs_here():
    async def worked() -> int:
        return 3

    async def outer() -> Any:
        return resolve(worked(), soon())

    assert asyncio.run(outer()) == 3


def test_lists_keep_their_order_whatever_is_in_them():
    async def worked() -> int:
        return 4

    assert resolve([1, done(2), (done(3), worked())], soon()) == [1, 2, [3, 4]]


def test_an_answer_that_is_a_future_again_is_waited_for():
    assert resolve([done([done(1), 2])], soon()) == [[1, 2]]


def test_everything_in_a_list_runs_at_once():
    meeting = threading.Barrier(3)

    async def met() -> int:
        return await asyncio.to_thread(meeting.wait, 30)

    assert sorted(resolve([met(), met(), met()], soon())) == [0, 1, 2]


def test_what_work_raises_is_raised():
    with pytest.raises(ZeroDivisionError, match="here"):
        resolve([done(1), failed(ZeroDivisionError("here"))], soon())


def test_a_timeout_of_the_work_itself_is_no_timeout_of_ours():
    with pytest.raises(TimeoutError, match="theirs") as caught:
        resolve(failed(TimeoutError("theirs")), soon())
    assert not isinstance(caught.value, WeightUpdateError)


def test_a_failure_is_raised_when_the_others_have_ended():
    other: Future[None] = Future()
    threading.Timer(0.1, other.set_result, [None]).start()
    with pytest.raises(ZeroDivisionError):
        resolve([other, failed(ZeroDivisionError())], soon())
    assert other.done()


def test_a_failure_is_raised_though_another_never_ends():
    with pytest.raises(ZeroDivisionError):
        resolve([Future(), failed(ZeroDivisionError())], Deadline(0.05))


async def _never() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("make", [Future, _never], ids=["future", "coroutine"])
def test_what_never_comes_is_a_timeout(make: Any):
    with pytest.raises(UpdateTimeout, match="1 of 2 workers did not answer"):
        resolve([make(), done(1)], Deadline(0.05))


def test_an_error_says_what_was_asked():
    def refuse() -> None:
        raise ZeroDivisionError("no")

    with pytest.raises(WeightUpdateError, match=r"policy\.x\(\) failed: ZeroDivisionError: no"):
        asked("policy.x()", refuse)


def test_a_ray_that_is_a_mock_has_no_references(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", MagicMock())
    value = [MagicMock()]
    assert resolve(value, soon()) is value


# -- real references ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with ray_cluster.cluster(pytest.importorskip("ray"), 1) as module:
        yield module


def test_references_of_ray_are_waited_for(ray: Any):
    assert resolve([ray.put(1), [ray.put("b"), 3]], soon()) == [1, ["b", 3]]


def test_an_actor_that_answers_with_references_is_waited_for_twice(ray: Any):
    assert resolve([ray.put([ray.put(1)])], soon()) == [[1]]


def test_work_of_ray_that_fails_raises_its_cause(ray: Any):
    @ray.remote(num_cpus=0)
    def broken() -> None:
        raise ValueError("on a worker")

    with pytest.raises(ValueError, match="on a worker"):
        resolve([ray.put(1), broken.remote()], Deadline(120.0))


def test_work_of_ray_that_hangs_is_a_timeout(ray: Any):
    @ray.remote(num_cpus=0)
    class Stuck:
        def wait(self) -> None:
            threading.Event().wait()

    stuck = Stuck.remote()
    with pytest.raises(UpdateTimeout):
        resolve(stuck.wait.remote(), Deadline(0.05))
    ray.kill(stuck)


def test_a_row_hands_over_through_references_of_ray(ray: Any):
    journal = Journal()
    journal.futures = {"P.stream": [ray.put(None)], "G.open": [ray.put(True), ray.put(None)]}
    sync = IPCWeightSynchronizer(NemoPolicy(journal), NemoVLLM(journal))
    sync.sync_weights()
    assert not sync.is_stale
    journal.futures["G.open"] = [ray.put(False)]
    with pytest.raises(RuntimeError, match="Weight transfer failed: 1 of 1 workers"):
        sync.sync_weights()
