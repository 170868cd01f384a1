"""``bench link``: what is sent, what is said of it, and that servers keep what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weight_update import EngineRejected, EngineUnreachable
from weight_update.bench.link import LinkJobs, Setting, advice, run_link
from weight_update.bench.rows import Pair, Row
from weight_update.options import UpdateOptions
from weight_update.reference_engine import Fault, ReferenceEngine

OPTIONS = UpdateOptions(timeout=60.0, transport="broadcast")
NBYTES = 1_200_000
UPDATE = "/update_weights_from_distributed"


@pytest.fixture(scope="module")
def engines() -> Iterator[list[ReferenceEngine]]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM(config)
    started = [ReferenceEngine(model, wait=False) for _ in range(2)]
    for engine in started:
        engine.wait_until_ready()
    yield started
    for engine in started:
        engine.stop()


def jobs(*engines: ReferenceEngine, **changes: Any) -> LinkJobs:
    urls = [engine.url for engine in engines]
    return LinkJobs(urls, OPTIONS, **{"nbytes": NBYTES, "tensors": 30, "rounds": 1, **changes})


def quiet(_: str) -> None:
    pass


def seen(engine: ReferenceEngine) -> tuple[Any, Any, int]:
    """Digests, label, and whether it generates."""
    digests = requests.post(
        f"{engine.url}/weights_checker", json={"action": "checksum"}, timeout=60
    )
    model = requests.get(f"{engine.url}/model_info", timeout=60).json()
    ready = requests.get(f"{engine.url}/ready", timeout=60).status_code
    return digests.json()["ranks"], model["weight_version"], ready


def test_every_row_has_the_same_bytes_and_its_distance_from_the_limit(
    engines: list[ReferenceEngine],
) -> None:
    rows = [row.to_dict() for row in run_link(jobs(*engines), quiet)]

    assert [row["job"] for row in rows] == [
        "as update_weights() divides it",
        "flat buckets, requests of 1 MiB",
        "a broadcast a tensor, requests of 1 MiB",
    ]
    for row in rows:
        assert (row["bytes"], row["tensors"], row["limit"]) == (NBYTES, 30, "one huge broadcast")
        assert row["ratio"] == pytest.approx(row["seconds"] / row["limit_seconds"])
        assert row["backend"] == "gloo"
        assert row["request_seconds"] > 0
        assert row["correct"] is None
        assert "machine" in row


def test_servers_keep_weights_and_labels_and_go_on(engines: list[ReferenceEngine]) -> None:
    before = [seen(engine) for engine in engines]

    list(run_link(jobs(*engines), quiet))

    assert [seen(engine) for engine in engines] == before
    assert [ready for _, _, ready in before] == [200, 200]


def test_a_server_that_fails_while_it_is_measured_goes_on(engines: list[ReferenceEngine]) -> None:
    engine = engines[0]
    before = seen(engine)
    engine.inject(Fault(UPDATE, "refuse", after=3))
    try:
        with pytest.raises(EngineRejected):
            list(run_link(jobs(engine), quiet))
    finally:
        engine.clear_faults()

    assert seen(engine) == before


def test_a_server_that_is_not_there_ends_the_measurement() -> None:
    nobody = LinkJobs(["http://127.0.0.1:9"], OPTIONS, nbytes=NBYTES)

    with pytest.raises(EngineUnreachable):
        list(run_link(nobody, quiet))


def row(seconds: float, setting: str = "") -> Row:
    return Row(setting or "default", "limit", [Pair(seconds, 1.0)], identity={"setting": setting})


@pytest.mark.parametrize(
    ("default", "other", "told"),
    [
        (2.0, 1.2, "use bucket_bytes=7 (1.20x"),
        (1.2, 1.2, "leave bucket_bytes and load_format alone: the default takes 1.20x"),
        (1.24, 1.2, "leave bucket_bytes and load_format alone"),
        (1.2, 3.0, "leave bucket_bytes and load_format alone"),
    ],
)
def test_a_setting_is_advised_only_where_it_saves_something(
    default: float, other: float, told: str
) -> None:
    assert told in advice([row(default), row(other, "bucket_bytes=7")])


def test_the_line_to_copy_is_python() -> None:
    setting = Setting(1 << 20, "flattened_bucket")

    given = eval(f"dict({setting.line})")

    assert UpdateOptions(**given).bucket_bytes == 1 << 20
    assert UpdateOptions(**given).load_format == "flattened_bucket"


def test_fewer_bytes_than_tensors_are_refused() -> None:
    assert LinkJobs(["http://a:1"], OPTIONS, nbytes=100).objection() is not None
    assert LinkJobs(["http://a:1"], OPTIONS).objection() is None
