"""A mixed fleet as users build it; no engine is needed here."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from weight_update import SGLangWeightSender, SGLangWeightSyncScheme, VLLMWeightSyncScheme
from weight_update.delivery.mixed import MixedDeployment
from weight_update.errors import ConfigurationError
from weight_update.options import PAUSE_MODE_VARIABLE
from weight_update.schemes.fleet import FleetWeightSyncScheme

A, B, C = "http://127.0.0.1:9", "http://127.0.0.2:9/", "http://127.0.0.3:9"


def fleet(
    sglang: dict[str, Any] | None = None, vllm: dict[str, Any] | None = None, **shared: Any
) -> FleetWeightSyncScheme:
    return FleetWeightSyncScheme(
        [
            SGLangWeightSyncScheme([A, B], **{**shared, **(sglang or {})}),
            VLLMWeightSyncScheme(C, **{**shared, **(vllm or {})}),
        ]
    )


def test_it_has_the_servers_of_all_schemes_and_one_sender() -> None:
    scheme = fleet(timeout=60.0, dtype=torch.bfloat16)

    assert scheme.server_url == [A, B.rstrip("/"), C]
    assert (scheme.timeout, scheme.dtype) == (60.0, torch.bfloat16)
    sender = scheme.create_sender()
    assert isinstance(sender, SGLangWeightSender)
    assert set(sender.engines) == set(scheme.server_url)
    assert isinstance(sender._transport._deployment, MixedDeployment)


SHARED = [
    ("timeout", 60.0, 61.0),
    ("dtype", None, "engine"),
    ("name_map", None, {"a": "b"}),
    ("quorum", "all", 2),
    ("initial_version", None, 3),
    ("on_failure", "hold", "resume"),
    ("bucket_bytes", None, 4096),
    ("load_format", "auto", "tensors"),
    ("verify", "auto", "off"),
    ("when_busy", "wait", "refuse"),
    ("stale_cache", "warn", "refuse"),
    ("check_finite", False, True),
    ("trim_vocabulary", False, True),
    ("device", None, "cpu"),
    ("backend", "auto", "gloo"),
]


@pytest.mark.parametrize(("name", "one", "other"), SHARED, ids=[row[0] for row in SHARED])
def test_what_a_fleet_has_once_must_agree(name: str, one: Any, other: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        fleet(sglang={name: one}, vllm={name: other})

    assert f"{name}={one!r} for {A} (sglang), {name}={other!r} for {C} (vllm)" in str(caught.value)
    assert "pause_mode" in caught.value.remedy
    fleet(**{name: other})


def test_what_each_kind_has_of_its_own_may_differ() -> None:
    ours = {"pause_mode": "in_place", "api_key": "hunter1", "tls_verify": False, "num_gpus": 2}
    theirs = {"pause_mode": "abort", "api_key": "hunter2", "num_gpus": 1, "master_port": 29500}

    scheme = fleet(ours, theirs)

    assert scheme.world_size == 4
    assert [scheme.options.of(url).http.api_key for url in scheme.urls] == [
        "hunter1",
        "hunter1",
        "hunter2",
    ]
    assert [scheme.options.of(url).effective_pause_mode() for url in scheme.urls] == [
        "in_place",
        "in_place",
        "abort",
    ]


def test_keys_are_never_shown() -> None:
    made = fleet({"api_key": "hunter1"}, {"admin_api_key": "hunter2"})

    for item in (made, made.options, made.create_sender(), made.create_transport()):
        assert "hunter" not in repr(item)


def test_sglangs_variable_is_read_for_sglang_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = fleet()
    monkeypatch.setenv(PAUSE_MODE_VARIABLE, "abort")

    modes = [scheme.options.of(url).effective_pause_mode() for url in (A, C)]
    assert modes == ["abort", "retract"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"transport": "ipc"}, "transport='ipc' does not go with a fleet"),
    ({"master_port": 29500}, "master_port=29500 is given twice"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[str(row[0]) for row in REFUSED])
def test_what_no_fleet_can_do_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        fleet(**options)


def test_what_no_fleet_can_do_is_refused_as_that_also_where_one_scheme_asks_for_it() -> None:
    with pytest.raises(ConfigurationError, match="transport='disk' does not go with a fleet"):
        fleet({"transport": "disk"}, {})


def test_adapters_are_merged(tmp_path: Any) -> None:
    adapter = {"lora": "adapter"}

    with pytest.raises(ConfigurationError, match="lora='adapter' does not go with a fleet"):
        fleet(adapter, {**adapter, "adapter_directory": tmp_path})


def test_all_ranks_of_a_node_do_not_join_several_groups() -> None:
    scheme = SGLangWeightSyncScheme(A, trainer_ranks="node")

    with pytest.raises(ConfigurationError, match="trainer_ranks='node' does not go"):
        FleetWeightSyncScheme([scheme])


def test_a_server_belongs_to_one_scheme() -> None:
    with pytest.raises(ConfigurationError, match="names an engine twice"):
        FleetWeightSyncScheme([SGLangWeightSyncScheme(A), VLLMWeightSyncScheme(A)])


@pytest.mark.parametrize("schemes", [[], [A], [None], None, 3, A, b"x", {"sglang": A}], ids=str)
def test_a_fleet_is_made_of_schemes(schemes: Any) -> None:
    with pytest.raises(ConfigurationError, match="a fleet"):
        FleetWeightSyncScheme(schemes)


def test_a_fleet_of_fleets_is_none() -> None:
    with pytest.raises(ConfigurationError, match="not of a FleetWeightSyncScheme"):
        FleetWeightSyncScheme([fleet()])


def test_strategies_must_agree() -> None:
    with pytest.raises(ConfigurationError, match="strategy is state_dict and tensordict"):
        fleet({"strategy": "state_dict"})


@pytest.mark.parametrize(
    "rebuild", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy], ids=["pickle", "deepcopy"]
)
def test_a_fleet_crosses_processes(rebuild: Any) -> None:
    scheme = fleet({"pause_mode": "abort"}, {"api_key": "hunter2"}, initial_version=3)

    for twin in (rebuild(scheme), rebuild(scheme.create_sender())._scheme):
        sender = twin.create_sender()
        assert set(sender.engines) == set(scheme.urls)
        assert sender.version == 3
        assert twin.options.of(A).pause_mode == "abort"
        assert twin.options.of(C).http.api_key == "hunter2"
