"""The session of workers that open memory: what it makes of their answers, and of silence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from weight_update.engines.vllm.client import VLLMClient
from weight_update.engines.vllm.session import Bracket
from weight_update.engines.vllm.shared import VLLMSharedSession
from weight_update.errors import (
    ConfigurationError,
    EngineRejected,
    EngineUnreachable,
    WeightUpdateError,
)
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import Cargo
from weight_update.weights.extract import extract_weights

URL = "http://engine:1"
SECONDS = 30.0
BUCKET = Bucket(extract_weights({"w": torch.ones(1)}))
PLACES = [{"rank": 0, "device": "uuid-a"}, {"rank": 1, "device": "uuid-b"}]
FAILED = {"error": "KeyError: no such weight", "changed": False, "restored": True}
TOUCHED = FAILED | {"changed": True}
BROKEN = TOUCHED | {"restored": False}


class FakeClient(VLLMClient):
    """A server whose call lasts until the channel is closed, or until it is told to end."""

    def __init__(self, places: Any = PLACES) -> None:
        super().__init__(URL, HttpOptions())
        self.places = places
        self.results: Any = [{}, {}]
        self.over = threading.Event()
        self.told: Mapping[str, Any] = {}
        self.finished = 0

    def finish_update(self, deadline: Deadline) -> None:
        self.finished += 1
        raise EngineRejected("finish_weight_update called without a matching start", engine=URL)

    def rpc(self, method: str, deadline: Deadline, **settings: Any) -> list[Any]:
        if method == "weight_update_place":
            return list(_returned(self.places))
        self.told = settings["kwargs"]
        self.over.wait(SECONDS)
        return list(_returned(self.results))


def _returned(given: Any) -> Any:
    if isinstance(given, Exception):
        raise given
    return given


class FakeChannel:
    """Answers as it was told to."""

    def __init__(self, client: FakeClient) -> None:
        self.client = client
        self.workers: Sequence[str] = ()
        self.answers: dict[str, list[dict[str, Any]]] = {
            "begin": [{"unfinished": False}] * 2,
            "bring": [{}, {}],
            "complete": [{}, {}],
        }
        self.closed = False

    def bind(self, workers: Sequence[str]) -> dict[str, str]:
        self.workers = workers
        return {worker: f"ipc:///{worker}" for worker in workers}

    def begin(self, deadline: Deadline, check: Callable[[], None]) -> Any:
        return self._answered("begin", check)

    def bring(self, bucket: Any, shared: Any, deadline: Deadline, check: Callable[[], None]) -> Any:
        return self._answered("bring", check)

    def complete(self, deadline: Deadline, check: Callable[[], None]) -> Any:
        answers = self._answered("complete", check)
        self.client.over.set()
        return answers

    def close(self) -> None:
        self.closed = True
        self.client.over.set()

    def _answered(self, message: str, check: Callable[[], None]) -> Any:
        check()
        return self.answers[message]


class Update:
    """A session, and what is around it."""

    def __init__(self, places: Any = PLACES, ranks: int | None = 2) -> None:
        self.client = FakeClient(places)
        self.channel = FakeChannel(self.client)
        self.bracket = Bracket(self.client)
        self.session = VLLMSharedSession(self.client, self.bracket, lambda _: self.channel, ranks)

    def open(self) -> bool:
        return self.session.open(Deadline(SECONDS))

    def apply(self) -> None:
        self.session.apply(BUCKET, Cargo(), group_name="", flush=False, deadline=Deadline(SECONDS))

    def close(self) -> None:
        self.session.close(Deadline(SECONDS))

    def recover(self, seconds: float = SECONDS) -> None:
        self.session.recover(Deadline(seconds))


def test_a_whole_update_leaves_an_engine_that_may_generate() -> None:
    update = Update()

    assert update.open() is False
    assert update.bracket.open
    update.apply()
    update.close()

    assert not update.bracket.open
    assert update.channel.closed


def test_an_update_that_a_broadcast_left_open_is_ended_once_all_layers_are_whole() -> None:
    update = Update()
    update.bracket.suspect = True

    update.open()
    update.apply()
    assert update.client.finished == 0
    update.close()

    assert update.client.finished == 1  # that none was open is no failure
    assert not update.bracket.open
    assert not update.bracket.suspect


def test_every_worker_has_a_socket_that_is_named_after_its_gpu() -> None:
    update = Update()

    update.open()

    assert update.channel.workers == ["0-uuid-a", "1-uuid-b"]
    assert update.client.told["addresses"] == {"0": "ipc:///0-uuid-a", "1": "ipc:///1-uuid-b"}
    assert 0 < update.client.told["seconds"] <= SECONDS


def test_an_update_that_was_never_completed_is_told_of() -> None:
    update = Update()
    update.channel.answers["begin"] = [{"unfinished": False}, {"unfinished": True}]

    assert update.open() is True


def test_a_server_without_the_extension_is_told_how_to_start() -> None:
    words = "Call to collective_rpc method failed: 'CPUWorker' object has no attribute 'x'"
    update = Update(EngineRejected(words, engine=URL, phase="begin"))

    with pytest.raises(ConfigurationError, match="--worker-extension-cls weight_update") as caught:
        update.open()

    assert caught.value.engine == URL
    update.recover()  # nothing was begun


@pytest.mark.parametrize(("places", "ranks"), [(PLACES, 4), ([], None), (PLACES[:1], 2)])
def test_workers_that_cannot_all_be_called_are_an_error(places: Any, ranks: int | None) -> None:
    with pytest.raises(ConfigurationError, match="workers can be called"):
        Update(places, ranks).open()


@pytest.mark.parametrize(
    ("answers", "applied"),
    [
        ([FAILED, FAILED], "nothing"),
        ([FAILED, TOUCHED], "unknown"),
        ([FAILED, {}], "unknown"),  # the other worker has loaded it
    ],
    ids=["no worker loaded any", "one loaded some", "one loaded all"],
)
def test_a_refused_bucket_says_whether_weights_are_the_old_ones(answers: Any, applied: str) -> None:
    update = Update()
    update.open()
    update.channel.answers["bring"] = answers

    with pytest.raises(EngineRejected, match="no such weight") as caught:
        update.apply()

    assert caught.value.applied == applied
    assert caught.value.phase == "transfer"


def test_a_call_that_ended_by_itself_is_noticed_before_answers_are_waited_for() -> None:
    update = Update()
    update.open()
    update.client.results = EngineUnreachable("the server is gone", engine=URL)
    update.client.over.set()

    with pytest.raises(EngineUnreachable, match="the server is gone"):
        _until_raised(update.apply)


def test_what_the_engine_could_not_carry_out_may_have_changed_it() -> None:
    update = Update()
    update.open()
    update.client.results = EngineRejected("EngineCore encountered an issue", engine=URL)
    update.client.over.set()

    with pytest.raises(EngineRejected) as caught:
        _until_raised(update.apply)

    assert caught.value.applied == "unknown"


def _until_raised(call: Callable[[], None]) -> None:
    end = Deadline(SECONDS)
    while not end.expired():
        call()
        end.sleep(0.01)


def test_recovering_ends_the_call_and_the_engine_may_generate() -> None:
    update = Update()
    update.open()
    update.client.results = [FAILED, TOUCHED]

    update.recover()

    assert update.channel.closed
    assert not update.bracket.open


@pytest.mark.parametrize("results", [[FAILED, BROKEN], EngineUnreachable("gone", engine=URL)])
def test_an_engine_whose_layers_are_not_whole_must_not_generate(results: Any) -> None:
    update = Update()
    update.open()
    update.client.results = results

    with pytest.raises(EngineRejected):
        update.recover()

    assert update.bracket.open


def test_an_engine_that_is_still_busy_must_not_generate() -> None:
    update = Update()
    update.open()
    update.channel.close = lambda: None  # type: ignore[method-assign]  # its workers read nothing

    with pytest.raises(EngineRejected, match="did not end the update"):
        update.recover(0.1)

    assert update.bracket.open
    update.client.over.set()


def test_an_update_that_could_not_be_completed_is_in_doubt() -> None:
    update = Update()
    update.open()
    update.apply()
    update.channel.answers["complete"] = [TOUCHED, {}]
    update.client.results = [TOUCHED, {}]

    with pytest.raises(EngineRejected):
        update.close()
    with pytest.raises(EngineRejected):
        update.recover()

    assert not update.bracket.open  # every layer has weights, of whichever update


def test_nothing_can_be_applied_before_an_update_was_begun() -> None:
    with pytest.raises(WeightUpdateError, match="no update was begun"):
        Update().apply()
