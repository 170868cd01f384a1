"""Keys are in nothing that an update leaves behind, however it ends."""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cases.fake_http import Answer, Asked, FakeServer
from tests.integration import kit
from tests.integration.kit import (
    ADMIN_KEY,
    BEGIN,
    CONTINUE,
    END,
    FLUSH,
    INIT,
    KEY,
    PAUSE,
    STAMP,
    UPDATE,
)
from weight_update import SGLangWeightSyncScheme, WeightUpdateError
from weight_update.reference_engine import Fault, ReferenceEngine

SECRET = "5ecret"


def everything_of(error: BaseException) -> Iterator[str]:
    """What a log, a debugger or a crash reporter may show of an error and of its causes."""
    yield "".join(traceback.format_exception(error))
    seen: list[BaseException] = []
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is None or one in seen:
            continue
        seen.append(one)
        yield from (str(one), repr(one), repr(vars(one)), repr(one.args))
        yield from getattr(one, "__notes__", [])
        chain += [one.__cause__, one.__context__]
        for holder in ("response", "request"):
            yield from _shown(getattr(one, holder, None))


def _shown(holder: Any) -> Iterator[str]:
    """A request or a response of ``requests``, with its headers."""
    if holder is None:
        return
    yield repr(vars(holder))
    yield str(getattr(holder, "headers", ""))
    yield from _shown(getattr(holder, "request", None))


def pickled(value: object) -> str:
    try:
        return repr(pickle.dumps(value))
    except Exception as error:  # noqa: BLE001 - some cannot be pickled, which shows nothing
        return str(error)


def frames_of(error: BaseException) -> Iterator[str]:
    """Local variables along the traceback, as some reporters send them."""
    trace = error.__traceback__
    while trace is not None:
        if "weight_update/" in trace.tb_frame.f_code.co_filename:
            yield from (repr(value)[:5000] for value in trace.tb_frame.f_locals.values())
        trace = trace.tb_next


class Watched:
    """An update with keys, and everything that it produced."""

    def __init__(self, engine: ReferenceEngine, caplog: pytest.LogCaptureFixture) -> None:
        self._engine, self._caplog = engine, caplog
        self.events: list[Any] = []
        self.sender = kit.make_sender(engine, api_key=KEY, admin_api_key=ADMIN_KEY, timeout=60.0)
        self.sender.update_weights(kit.llama(0))

    def run(self, seconds: float = 60.0) -> BaseException | None:
        """Update once; the error, if it failed."""
        with self._caplog.at_level(logging.DEBUG), kit.timeout_of(self.sender, seconds):
            try:
                self.report = self.sender.update_weights(kit.llama(1), progress=self.events.append)
            except WeightUpdateError as error:
                failure = error
            else:
                return None
        assert failure.report is not None
        self.report = failure.report
        return failure

    def produced(self, error: BaseException | None) -> Iterator[str]:
        transport = self.sender._transport
        shown = (self.sender, self.sender._scheme, self.sender._scheme.options, transport)
        yield from (repr(each) for each in shown)
        yield from (str(each) for each in shown)
        yield from (repr(each) for each in self.events)
        yield from (str(self.report), repr(self.report), json.dumps(self.report.to_dict()))
        yield pickled(self.report)
        yield pickled(self.events)
        yield repr(self.sender.engines)
        yield self._caplog.text
        yield from (repr(record.args) for record in self._caplog.records)
        if error is not None:
            yield from everything_of(error)
            yield from frames_of(error)
            yield pickled(error)
            yield repr(copy.deepcopy(error))


FAULTS = [
    Fault(path, kind, times=1)  # type: ignore[arg-type]
    for path in (INIT, PAUSE, BEGIN, UPDATE, END, FLUSH, STAMP, CONTINUE)
    for kind in ("refuse", "close")
] + [
    Fault(UPDATE, "success_false", times=1),
    Fault(UPDATE, "non_json", status=502, times=1),
    Fault(UPDATE, "refuse", status=401, times=1, message=f"wrong key {ADMIN_KEY}"),
    Fault(PAUSE, "refuse", status=403, times=1, message=f"Bearer {KEY} is not {ADMIN_KEY}"),
    Fault(BEGIN, "hang", times=1),
    Fault(UPDATE, "hang", times=1, when="before_answer"),
    Fault(UPDATE, "lie", times=1),
    Fault("/model_info", "refuse", status=500, times=1),
    Fault("/server_info", "non_json", status=200, times=1),
    Fault("/server_info", "close", times=1),
]


def named(fault: Fault) -> str:
    return f"{fault.path[1:]}-{fault.kind}-{fault.status}-{fault.when}"


@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_a_key_is_in_nothing_that_a_failed_update_leaves(
    fault: Fault, locked: ReferenceEngine, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(locked, caplog)
    if fault.path in (INIT, "/server_info"):
        watched.sender.shutdown()
    if fault.path == FLUSH:
        kit.make_flush_owed(locked)
    locked.inject(fault)
    error = watched.run(2.0 if fault.kind in ("hang", "lie") else 60.0)
    assert [text for text in watched.produced(error) if SECRET in text] == []
    watched.sender.shutdown()


def test_a_key_is_in_nothing_that_a_good_update_leaves(
    locked: ReferenceEngine, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(locked, caplog)
    assert watched.run() is None
    assert [text for text in watched.produced(None) if SECRET in text] == []
    assert watched.events
    watched.sender.shutdown()


def test_a_dead_engine_brings_no_key_to_light(caplog: pytest.LogCaptureFixture) -> None:
    with FakeServer() as server:
        url = server.url
    scheme = SGLangWeightSyncScheme(url, timeout=5.0, api_key=KEY, admin_api_key=ADMIN_KEY)
    sender = scheme.create_sender()
    with caplog.at_level(logging.DEBUG), pytest.raises(WeightUpdateError) as caught:
        sender.update_weights(kit.llama(1))
    shown = [*everything_of(caught.value), *frames_of(caught.value), caplog.text]
    assert [text for text in shown if SECRET in text] == []
    sender.shutdown()


KEYS_IN_ANSWERS = {
    "envelope": lambda: {"error": {"message": f"expected {ADMIN_KEY}, got {KEY}"}},
    "page": lambda: f"<html>Authorization: Bearer {ADMIN_KEY}</html>",
    "cut by the limit": lambda: "x" * 490 + ADMIN_KEY + KEY,
    "spread over lines": lambda: f"key\n{KEY}\n{ADMIN_KEY}\n",
    "json escape": lambda: json.dumps({"message": f"\t{KEY}"}),
}


@pytest.mark.parametrize("body", KEYS_IN_ANSWERS.values(), ids=KEYS_IN_ANSWERS.keys())
@pytest.mark.parametrize("path", ["/server_info", INIT])
def test_a_key_that_a_server_repeats_is_in_no_message(
    path: str, body: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    def repeat(asked: Asked) -> Answer | None:
        return Answer(401, body()) if asked.path == path else None

    with FakeServer(reply=repeat) as server:
        scheme = SGLangWeightSyncScheme(
            server.url, timeout=5.0, api_key=KEY, admin_api_key=ADMIN_KEY
        )
        sender = scheme.create_sender()
        with caplog.at_level(logging.DEBUG), pytest.raises(WeightUpdateError) as caught:
            sender.update_weights(kit.llama(1))
        error = caught.value
        assert error.report is not None
        shown = [str(error), repr(error), error.message, json.dumps(error.report.to_dict())]
        assert [text for text in (*shown, caplog.text) if SECRET in text] == []
        sender.shutdown()


def test_keys_of_a_server_that_tells_its_own_are_passed_to_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """``/server_info`` of a real server holds the keys that it was started with."""
    info = {"version": "0.5.23", "tp_size": 1, "api_key": KEY, "admin_api_key": ADMIN_KEY}
    with FakeServer({**info, "pp_size": 2}) as server:
        sender = SGLangWeightSyncScheme(server.url, timeout=5.0).create_sender()
        with caplog.at_level(logging.DEBUG), pytest.raises(WeightUpdateError) as caught:
            sender.update_weights(kit.llama(1))
        shown = [*everything_of(caught.value), caplog.text, repr(sender)]
        assert [text for text in shown if SECRET in text] == []
        sender.shutdown()


def test_a_pickled_scheme_is_the_only_thing_that_carries_keys() -> None:
    """It must, to connect elsewhere; so its text form does not."""
    scheme = SGLangWeightSyncScheme("http://a:1", api_key=KEY, admin_api_key=ADMIN_KEY)
    assert pickle.loads(pickle.dumps(scheme)).options.http.api_key == KEY
    out = io.StringIO()
    print(scheme, scheme.options, vars(scheme), file=out)
    assert SECRET not in out.getvalue()
    with pytest.raises(AttributeError):
        scheme.api_key  # noqa: B018
