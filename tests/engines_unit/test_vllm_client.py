"""The vLLM client: what it sends, and what counts as a yes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weight_update.engines.vllm.client import VLLMClient, update_request
from weight_update.engines.vllm.lora import VLLMAdapterEngine
from weight_update.errors import EngineRejected
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket
from weight_update.weights.extract import extract_weights

Call = Callable[[VLLMClient, Deadline], object]

FAILED = "Call to collective_rpc method failed: Worker failed with error '{}', ..."


@pytest.fixture
def client(server) -> VLLMClient:
    return VLLMClient(server.url, HttpOptions())


def soon() -> Deadline:
    return Deadline(10.0)


CALLS: dict[str, tuple[Call, str, Any]] = {
    "init": (
        lambda c, d: c.init_transfer({"rank_offset": 1}, d),
        "/init_weight_transfer_engine",
        {"init_info": {"rank_offset": 1}},
    ),
    "leave": (lambda c, d: c.leave_transfer(d), "/shutdown_weight_transfer_engine", {}),
    "start, with the body that 0.23 reads": (
        lambda c, d: c.start_update(d),
        "/start_weight_update",
        {"is_checkpoint_format": True},
    ),
    "update": (
        lambda c, d: c.update(b'{"update_info": {}}', d),
        "/update_weights",
        {"update_info": {}},
    ),
    "finish": (lambda c, d: c.finish_update(d), "/finish_weight_update", {}),
    "stamp": (lambda c, d: c.stamp("7", d), "/update_weight_version", {"new_version": "7"}),
    "pause, keeping": (
        lambda c, d: c.pause("keep", d, clear_cache=True),
        "/pause?mode=keep&clear_cache=true",
        {},
    ),
    "resume": (lambda c, d: c.resume(d), "/resume", {}),
    "reset": (lambda c, d: c.reset_prefix_cache(d), "/reset_prefix_cache", {}),
    "reset of what runs": (
        lambda c, d: c.reset_prefix_cache(d, running=True),
        "/reset_prefix_cache?reset_running_requests=true",
        {},
    ),
    "sleep": (lambda c, d: c.sleep(2, d, mode="wait"), "/sleep?level=2&mode=wait", {}),
    "wake up": (lambda c, d: c.wake_up(d, tags=["weights"]), "/wake_up?tags=weights", {}),
    "rpc": (
        lambda c, d: c.rpc("method", d, kwargs={"a": 2}),
        "/collective_rpc",
        {"method": "method", "args": [], "kwargs": {"a": 2}},
    ),
}


@pytest.mark.parametrize(("call", "path", "body"), CALLS.values(), ids=CALLS)
def test_it_posts(server, client: VLLMClient, call: Call, path: str, body: Any) -> None:
    call(client, soon())

    (asked,) = server.asked
    assert (asked.method, asked.path, asked.body) == ("POST", path, body)


@pytest.mark.parametrize(("call", "path", "_"), CALLS.values(), ids=CALLS)
def test_what_is_no_yes_is_an_error_with_the_servers_own_words(
    server, answer, client: VLLMClient, call: Call, path: str, _: Any
) -> None:
    envelope = {"error": {"message": FAILED.format("no such thing"), "code": 500}}
    server.answers[path] = answer(500, envelope)

    with pytest.raises(EngineRejected, match="no such thing"):
        call(client, soon())


@pytest.mark.parametrize("body", [{"success": False}, {}, "yes", None])
def test_a_reset_is_judged_by_its_body(server, answer, client: VLLMClient, body: Any) -> None:
    server.answers["/reset_prefix_cache"] = answer(200, body)

    assert not client.reset_prefix_cache(soon())


def test_an_update_request_announces_names_dtypes_and_full_shapes() -> None:
    tensors = {"a.weight": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.tensor(1.0)}
    body = json.loads(update_request(Bucket(extract_weights(tensors)), {"packed": True}))

    assert body["update_info"] == {
        "names": ["a.weight", "b"],
        "dtype_names": ["bfloat16", "float32"],
        "shapes": [[2, 3], []],
        "packed": True,
    }


@pytest.mark.parametrize(
    ("status", "words", "applied"),
    [
        (400, "a schema error", "nothing"),
        (404, "Not Found", "nothing"),
        (500, "start_weight_update must be called before update_weights.", "nothing"),
        (500, "Invalid update_info for NCCLWeightTransferEngine: unexpected key", "nothing"),
        (500, "There is no module or parameter named 'layers.9'", "unknown"),
        (500, "Connection closed by peer", "unknown"),
    ],
)
def test_a_refused_update_says_whether_anything_may_have_been_loaded(
    server, answer, client: VLLMClient, status: int, words: str, applied: str
) -> None:
    server.answers["/update_weights"] = answer(status, {"error": {"message": words}})

    with pytest.raises(EngineRejected) as caught:
        client.update(b"{}", soon())
    assert caught.value.applied == applied


def test_after_a_worker_failed_no_connection_is_used_again(
    server, answer, client: VLLMClient
) -> None:
    """The server closes it after its answer: a request on it would be reset."""
    server.answers["/finish_weight_update"] = answer(500, {"error": {"message": "no"}})
    client.resume(soon())
    client.resume(soon())
    assert server.connections == 1
    with pytest.raises(EngineRejected):
        client.finish_update(soon())

    client.resume(soon())
    assert server.connections == 2


def test_it_knows_whether_it_put_the_server_to_sleep(server, answer, client: VLLMClient) -> None:
    """Asked, a server that is only paused says that it sleeps."""
    server.answers["/wake_up?tags=weights"] = answer(200, {"status": "sleeping"})
    server.answers["/wake_up"] = answer(200, {"status": "awake"})

    assert not client.asleep
    client.sleep(1, soon())
    assert client.asleep
    assert not client.wake_up(soon(), tags=["weights"])
    assert client.asleep
    assert client.wake_up(soon())
    assert not client.asleep


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_routes_of_adapters_do_not_take_is_told_before_any_pause(
    server, answer, status: int
) -> None:
    """Routes of weights take any key: only a look at the others tells."""
    server.answers["/version"] = answer(body={"version": "0.32.0"})
    server.answers["/v1/models"] = answer(status, {"error": "Unauthorized"})
    folders: Any = None
    engine = VLLMAdapterEngine(server.url, HttpOptions(api_key="wrong"), folders)

    with pytest.raises(EngineRejected, match="Unauthorized") as caught:
        engine.inspect(soon())

    assert (caught.value.phase, "api_key=" in caught.value.remedy) == ("connect", True)
