"""What a vLLM release can do, by its routes; its number decides only where they cannot."""

from __future__ import annotations

import pytest

from weight_update.engines.vllm.capabilities import (
    PROBED_ROUTES,
    VLLMCapabilities,
    read_capabilities,
)
from weight_update.engines.vllm.facts import instance_of, read_facts
from weight_update.errors import ConfigurationError

# Routes that releases do not have yet, as their sources and the servers that were run show.
LACKING = {
    "0.16.0": {
        "/start_weight_update",
        "/finish_weight_update",
        "/update_weight_version",
        "/shutdown_weight_transfer_engine",
    },
    "0.20.2": {
        "/start_weight_update",
        "/finish_weight_update",
        "/update_weight_version",
        "/shutdown_weight_transfer_engine",
    },
    "0.23.0": {"/update_weight_version", "/shutdown_weight_transfer_engine"},
    "0.27.1": {"/shutdown_weight_transfer_engine"},
    "0.28.0": {"/shutdown_weight_transfer_engine"},
    "0.32.0": set(),
}


def of(release: str, lacking: set[str] | None = None) -> VLLMCapabilities:
    lacking = LACKING[release] if lacking is None else lacking
    routes = {route: route not in lacking for route in PROBED_ROUTES}
    return read_capabilities(release, routes, url="http://a:1")


@pytest.mark.parametrize("release", ["0.16.0", "0.20.2"])
def test_a_release_without_start_and_finish_is_refused_and_told_which_has_them(
    release: str,
) -> None:
    with pytest.raises(ConfigurationError, match="/start_weight_update") as caught:
        of(release)
    assert "0.23" in caught.value.remedy


@pytest.mark.parametrize(
    ("release", "labels", "leaves", "packed_in_init", "unique_id"),
    [
        ("0.23.0", False, False, False, False),
        ("0.27.1", True, False, False, False),
        ("0.28.0", True, False, True, False),
        ("0.32.0", True, True, True, True),
    ],
)
def test_releases_differ_in(
    release: str, labels: bool, leaves: bool, packed_in_init: bool, unique_id: bool
) -> None:
    found = of(release)

    assert (found.labels, found.leaves) == (labels, leaves)
    assert (found.packed_in_init, found.unique_id) == (packed_in_init, unique_id)


@pytest.mark.parametrize("release", ["dev", "0.1.dev1+gabcdef", ""])
def test_a_build_without_a_number_is_taken_for_a_new_one(release: str) -> None:
    assert of(release, set()).packed_in_init


@pytest.mark.parametrize("release", ["0.27.1", "0.32.0"])
def test_packing_is_told_once_where_the_release_wants_it(release: str) -> None:
    found = of(release)
    once, each = found.init_info(packed=True), found.update_info(packed=True)

    assert bool(once) != bool(each)
    told = {**once, **each}
    assert told["packed"] is True
    assert told["packed_buffer_size_bytes"] > 1 << 50  # a bucket is one broadcast, never cut


# ---- what a server says of itself


def test_facts_are_read_from_its_configuration() -> None:
    info = {
        "instance_id": "17",
        "weight_transfer_config": {"backend": "nccl"},
        "parallel_config": {"worker_extension_cls": "a.B"},
        "model_config": {"model": "/nowhere", "dtype": "torch.bfloat16", "quantization": "fp8"},
    }
    facts = read_facts(info, [])

    assert (facts.backend, facts.extension) == ("nccl", "a.B")
    assert facts.intake.dtype == "bfloat16"
    assert facts.intake.quantization == "fp8 in vLLM"
    assert not facts.intake.partial_modules
    assert instance_of(info) == "17"


@pytest.mark.parametrize(("info", "backend"), [({}, None), ({"model_config": {}}, "")])
def test_a_server_that_says_nothing_is_told_from_one_without_weight_transfer(
    info: dict[str, object], backend: str | None
) -> None:
    assert read_facts(info, []).backend == backend
