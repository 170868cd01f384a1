"""Section E of the case list: engine releases and special engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import kit
from tests.integration.kit import BEGIN, CONTINUE, INIT, PAUSE, UPDATE
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


@pytest.mark.parametrize("kind", ["fp8", "awq", "compressed-tensors"])
def test_c41_a_quantised_engine_is_refused_before_the_pause_with_a_way_out(kind: str) -> None:
    with (
        ReferenceEngine(kit.llama(0), shows={"quantization": kind}) as engine,
        kit.make_sender(engine) as sender,
    ):
        log = kit.Log(engine)
        with pytest.raises(ConfigurationError) as caught:
            sender.update_weights(kit.llama(1))
        assert log.count(engine, PAUSE) == 0
        assert kit.served(engine) == kit.tokens_of(0)
    assert kind in str(caught.value)
    assert "update_weights_from_disk" in str(caught.value)


def block_quantised(folder: Path) -> dict[str, Any]:
    """What a server on a block-quantised checkpoint shows; the checkpoint has no index here."""
    config = kit.llama(0).config.to_dict()
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(config))
    return {"model_path": str(folder)}


def test_c41_each_weight_of_a_block_quantised_engine_shares_a_request_with_its_scales(
    tmp_path: Path,
) -> None:
    """The engine of these tests has no such weights: what it is told is looked at."""
    with ReferenceEngine(kit.llama(0), shows=block_quantised(tmp_path)) as engine:
        log = kit.Log(engine)
        with kit.make_sender(engine, bucket_bytes=1, verify="off") as sender:
            sender.update_weights(kit.llama(1))
        told = [dict(zip(b["names"], b["dtypes"], strict=True)) for b in log.bodies(engine, UPDATE)]
    scaled = {n.removesuffix("_scale_inv") for names in told for n in names if "scale" in n}
    linear = {n for n in kit.llama(0).state_dict() if "_proj" in n}
    assert scaled == linear
    for names in told:
        for name in linear & set(names):
            assert names[name] == "float8_e4m3fn"
            assert names[f"{name}_scale_inv"] == "float32"
    assert {d for names in told for n, d in names.items() if "norm" in n} == {"float32"}


def test_c41_an_older_release_takes_no_block_quantised_weights(tmp_path: Path) -> None:
    shown = block_quantised(tmp_path)
    with (
        ReferenceEngine(kit.llama(0), release="0.5.20", shows=shown) as engine,
        kit.make_sender(engine) as sender,
    ):
        log = kit.Log(engine)
        with pytest.raises(ConfigurationError, match=r"before 0\.5\.21"):
            sender.update_weights(kit.llama(1))
        assert log.count(engine, PAUSE) == 0


@pytest.mark.parametrize(
    ("algorithm", "expected"), [("EAGLE", "target"), ("NGRAM", None), (None, None)]
)
def test_c41_the_weights_of_the_served_model_are_not_for_its_draft_model(
    algorithm: str | None, expected: str | None
) -> None:
    with ReferenceEngine(kit.llama(0), shows={"speculative_algorithm": algorithm}) as engine:
        log = kit.Log(engine)
        kit.push(engine, kit.llama(1))
        assert kit.served(engine) == kit.tokens_of(1)
        bodies = log.bodies(engine, BEGIN) + log.bodies(engine, UPDATE)
    assert {body.get("selector") for body in bodies} == {expected}
