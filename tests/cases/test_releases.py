"""Section E of the case list: engine releases and special engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from integration import kit
from integration.kit import BEGIN, CONTINUE, INIT, PAUSE

from weight_update import ConfigurationError, SGLangWeightSyncScheme, WeightUpdateError
from weight_update.reference_engine import ReferenceEngine

from .fake_http import HEALTHY, Answer, Asked, FakeServer
from .trial import NEW

# ---- C03


@pytest.mark.parametrize("release", ["0.5.6", "0.5.9", "0.5.12", "0.5.19", "0.5.23"])
def test_c03_one_update_works_on_every_release_and_asks_for_no_route_that_it_lacks(
    release: str,
) -> None:
    with ReferenceEngine(kit.llama(0), release=release) as engine:
        log = kit.Log(engine)
        for mode in ("retract", "abort", "in_place"):
            with kit.make_sender(engine, pause_mode=mode) as sender:
                report = sender.update_weights(kit.llama(1))
            assert report.engines[engine.url].state is NEW
            assert kit.label(engine) == str(report.version)
        engine.call("POST", "/flush_cache")
        assert kit.served(engine) == kit.tokens_of(1)
        assert list(missing_while_paused(log.records(engine))) == []


def missing_while_paused(records: list[dict[str, Any]]) -> Iterator[str]:
    """Routes that were not there, of those that were called between a pause and its end."""
    paused = False
    for record in records:
        paused = record["path"] == PAUSE or (paused and record["path"] != CONTINUE)
        if paused and record["status"] in (404, 405):
            yield record["path"]


@pytest.mark.parametrize("release", ["0.3.0", "0.4.6.post1", "0.5.3", "0.5.5"])
def test_c03_a_release_that_is_too_old_is_refused_at_connect(release: str) -> None:
    def old(asked: Asked) -> Answer | None:
        missing = (BEGIN, "/model_info", "/v1/loads", *([PAUSE] if release < "0.5" else []))
        return Answer(404, {"detail": "Not Found"}) if asked.path in missing else None

    with FakeServer({**HEALTHY, "version": release}, old) as server:
        scheme = SGLangWeightSyncScheme(server.url, timeout=20.0)
        with scheme.create_sender() as sender, pytest.raises(ConfigurationError) as caught:
            sender.update_weights(kit.llama(1))
        assert release in str(caught.value)
        assert "0.5.6 or later" in str(caught.value)
        assert server.posted() == []


@pytest.mark.parametrize("release", ["0.6.0", "1.0.0rc1", "main-20260901"])
def test_c03_a_release_of_the_future_is_judged_by_its_routes(release: str) -> None:
    with FakeServer({**HEALTHY, "version": release}) as server:
        scheme = SGLangWeightSyncScheme(server.url, timeout=3.0)
        with scheme.create_sender() as sender, pytest.raises(WeightUpdateError):
            sender.update_weights(kit.llama(1))  # the fake joins no group
        assert server.posted()[:1] == [INIT]


# ---- C41 (marked for GPUs; what a CPU can show)


def quantised() -> dict[str, Any]:
    state = {name: value.detach() for name, value in kit.llama(1).state_dict().items()}
    name = "model.layers.0.mlp.down_proj.weight"
    return {**state, name: state[name].to(torch.float8_e4m3fn)}


def test_c41_float8_over_gloo_is_refused_before_the_pause_where_it_cannot_travel(
    engine: ReferenceEngine,
) -> None:
    log = kit.Log(engine)
    with (
        kit.make_sender(engine, load_format="tensors") as sender,
        pytest.raises(ConfigurationError, match="float8_e4m3fn"),
    ):
        sender.update_weights(quantised())
    assert log.count(engine, PAUSE) == 0


def test_c41_float8_over_gloo_travels_as_bytes_otherwise(engine: ReferenceEngine) -> None:
    with kit.make_sender(engine) as sender:
        report = sender.update_weights(quantised())
    assert report.engines[engine.url].state is NEW
