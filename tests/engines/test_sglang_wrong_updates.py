"""What the real server does with wrong updates, and what the library makes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import torch

from weight_update import (
    EngineRejected,
    EngineState,
    SGLangWeightSender,
    WeightMismatchError,
    get_model_metadata,
)

from .long_request import LongRequest, wait_until
from .models import SEED_A, SEED_B
from .served import Served, sender_of

NORM = "model.norm.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture
def sender(at_a: Served) -> Iterator[SGLangWeightSender]:
    with sender_of(at_a) as sender:
        yield sender


@pytest.fixture
def healed(at_a: Served, sender: SGLangWeightSender) -> Iterator[None]:
    """Afterwards the server runs, outside any update, on weights that no test has spoilt."""
    yield
    sender.update_weights(at_a.model(SEED_A))


def weights_of(served: Served, seed: int) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in served.model(seed).named_parameters()}


def post(served: Served, route: str, body: Any = None) -> requests.Response:
    return requests.post(f"{served.server.url}/{route}", json=body, timeout=60)


def update_lines(served: Served, since: int) -> list[str]:
    """The routes of updates and their statuses, in the order of the server's access log."""
    text = served.server.log_path.read_text(errors="replace")[since:]
    routes = "begin_weight_update|update_weights_from_distributed|end_weight_update"
    return [" ".join(found) for found in re.findall(rf'"POST /({routes}) HTTP/1.1" (\d+)', text)]


# ---- sessions


def test_the_server_refuses_an_update_outside_a_session(at_a: Served) -> None:
    answer = post(
        at_a,
        "update_weights_from_distributed",
        {"names": [NORM], "dtypes": ["float32"], "shapes": [[64]]},
    )
    assert answer.status_code == 400
    words = "must run between begin_weight_update() and end_weight_update()"
    assert words in answer.json()["message"]
    assert at_a.serves(SEED_A)


def test_the_library_never_sends_one_outside_a_session(at_a: Served) -> None:
    start = len(at_a.server.log_path.read_text(errors="replace"))
    with sender_of(at_a, bucket_bytes=60_000) as sender:
        for seed in (SEED_B, SEED_A):
            buckets = sender.update_weights(at_a.model(seed)).buckets
    updates = ["update_weights_from_distributed 200"] * buckets
    expected = ["begin_weight_update 200", *updates, "end_weight_update 200"] * 2
    wait_until(lambda: len(update_lines(at_a, start)) >= len(expected))
    assert update_lines(at_a, start) == expected
    assert buckets > 1


def test_a_session_that_a_dead_trainer_left_open_is_no_obstacle(
    at_a: Served, sender: SGLangWeightSender
) -> None:
    assert post(at_a, "begin_weight_update", {}).ok
    again = post(at_a, "begin_weight_update", {})
    assert (again.status_code, "already open" in again.text) == (400, True)

    sender.update_weights(at_a.model(SEED_B))

    assert at_a.serves(SEED_B)
    assert post(at_a, "end_weight_update", {}).status_code == 400


# ---- names, shapes, dtypes


UNKNOWN = "model.no_such.weight"


def test_a_name_that_the_server_does_not_know_is_refused_before_any_pause(
    at_a: Served, sender: SGLangWeightSender
) -> None:
    with pytest.raises(WeightMismatchError, match="no_such") as caught:
        sender.update_weights({**weights_of(at_a, SEED_B), UNKNOWN: torch.ones(4)})

    assert caught.value.phase == "plan"
    assert at_a.serves(SEED_A)


def test_a_name_that_the_server_does_not_know_changes_nothing_and_is_answered_yes(
    at_a: Served,
) -> None:
    """Nothing in the answer tells: without verification, the report says what the server said."""
    with sender_of(at_a, verify="off") as sender:
        report = sender.update_weights({UNKNOWN: torch.ones(4)})

    assert report.engines[at_a.server.url].state is EngineState.NEW
    assert report.verification == "off"
    assert at_a.serves(SEED_A)


def test_an_unknown_name_among_known_ones_does_not_keep_them_out(at_a: Served) -> None:
    with sender_of(at_a, verify="off") as sender:
        sender.update_weights({**weights_of(at_a, SEED_B), UNKNOWN: torch.ones(4)})

    assert at_a.serves(SEED_B)


@pytest.mark.parametrize("name", [NORM, GATE])
def test_a_wrong_shape_is_refused_before_any_pause(
    at_a: Served, sender: SGLangWeightSender, name: str
) -> None:
    """The folder of the server's model is on this machine, and tells."""
    with pytest.raises(WeightMismatchError, match=re.escape(name)) as caught:
        sender.update_weights({**weights_of(at_a, SEED_B), name: torch.ones(64, 3)})

    assert caught.value.phase == "plan"
    assert at_a.serves(SEED_A)


@pytest.mark.usefixtures("healed")
def test_a_wrong_shape_leaves_the_server_mixed_and_held_until_a_full_push(at_a: Served) -> None:
    wrong = {**weights_of(at_a, SEED_B), NORM: torch.ones(3)}

    with sender_of(at_a, verify="off") as sender:
        with pytest.raises(EngineRejected, match="partially updated") as caught:
            sender.update_weights(wrong)
        assert_held_until_a_full_push(at_a, sender, caught)


def assert_held_until_a_full_push(at_a: Served, sender: SGLangWeightSender, caught: Any) -> None:
    assert caught.value.report is not None
    outcome = caught.value.report.engines[at_a.server.url]
    # No label is right for mixed weights.
    assert (outcome.state, outcome.paused, outcome.version) == (EngineState.MIXED, True, None)
    assert (caught.value.phase, caught.value.engine) == ("transfer", at_a.server.url)
    assert requests.get(f"{at_a.server.url}/ready", timeout=60).status_code == 503
    report = sender.update_weights(at_a.model(SEED_B))
    assert report.engines[at_a.server.url].state is EngineState.NEW
    assert at_a.serves(SEED_B)


@pytest.mark.usefixtures("healed")
def test_a_wrong_shape_of_a_part_of_a_fused_layer_is_answered_yes_and_spoils_the_model(
    at_a: Served, sender: SGLangWeightSender
) -> None:
    """SGLang's loaders for the CPU cut or pad it."""
    wrong = {**weights_of(at_a, SEED_B), GATE: torch.zeros(64, 64)}

    with sender_of(at_a, verify="off") as careless:
        report = careless.update_weights(wrong)

    assert report.engines[at_a.server.url].state is EngineState.NEW
    assert not at_a.serves(SEED_A)
    assert not at_a.serves(SEED_B)
    sender.update_weights(at_a.model(SEED_B))
    assert at_a.serves(SEED_B)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_dtype_is_cast_by_the_server_to_its_own(
    at_a: Served, sender: SGLangWeightSender, dtype: torch.dtype
) -> None:
    before = at_a.checksum()
    model = at_a.model(SEED_B).to(dtype)

    sender.update_weights(model)
    cast_there = at_a.checksum()
    sender.update_weights(model.to(at_a.dtype))

    assert at_a.checksum() == cast_there != before


@pytest.mark.parametrize("dtype", ["torch.float32", "nonsense"])
def test_the_server_refuses_a_dtype_that_is_no_bare_name(
    at_a: Served, sender: SGLangWeightSender, dtype: str
) -> None:
    """The library sends bare names only; a refused request leaves the group usable."""
    sender.init_all_workers_group()
    assert post(at_a, "begin_weight_update", {}).ok
    answer = post(
        at_a,
        "update_weights_from_distributed",
        {"names": [NORM], "dtypes": [dtype], "shapes": [[64]], "group_name": group_of(sender)},
    )
    assert post(at_a, "end_weight_update", {}).ok

    assert (answer.status_code, "Failed to receive weights" in answer.text) == (400, True)
    assert at_a.serves(SEED_A)
    sender.update_weights(at_a.model(SEED_B))
    assert at_a.serves(SEED_B)


def group_of(sender: SGLangWeightSender) -> str:
    group = sender._transport._updater.group
    assert group is not None
    return group.name


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights | {NORM: torch.ones(3)},
        lambda weights: weights | {NORM: torch.ones(64, dtype=torch.float64)},
        lambda weights: {name: w for name, w in weights.items() if name != NORM},
    ],
    ids=["wrong shape", "wrong dtype", "missing"],
)
def test_weights_that_differ_from_what_was_announced_reach_no_server(
    at_a: Served, sender: SGLangWeightSender, change: Any
) -> None:
    sender.init_all_workers_group(get_model_metadata(at_a.model(SEED_B)))
    start = len(at_a.server.log_path.read_text(errors="replace"))

    with pytest.raises(WeightMismatchError) as caught:
        sender.update_weights(change(weights_of(at_a, SEED_B)))

    assert caught.value.report is not None
    assert caught.value.report.engines[at_a.server.url].state is EngineState.OLD
    assert at_a.serves(SEED_A)
    assert update_lines(at_a, start) == []


# ---- flushes


def test_a_busy_server_refuses_to_flush_and_the_sender_says_so(
    at_a: Served, sender: SGLangWeightSender, caplog: pytest.LogCaptureFixture
) -> None:
    request = LongRequest(at_a.server.url, [7, 21, 40])
    request.wait_for(1)

    answer = post(at_a, "flush_cache")
    flushed = sender.flush_cache()
    still_running = request.cut()

    assert (answer.status_code, answer.text.strip()) == (400, "Flush cache failed.")
    assert flushed is False
    assert "the cache was not flushed" in caplog.text
    assert at_a.server.url in caplog.text
    assert still_running["meta_info"]["finish_reason"]["type"] == "abort"
    wait_until(sender.flush_cache)
