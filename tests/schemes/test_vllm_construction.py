"""The vLLM scheme as users build it; no engine is needed here."""

from __future__ import annotations

import copy
import inspect
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weight_update import (
    SGLangWeightSender,
    SGLangWeightSyncScheme,
    VLLMWeightSender,
    VLLMWeightSyncScheme,
)
from weight_update.delivery.adapter_push import AdapterPush
from weight_update.delivery.vllm import VLLMDeployment
from weight_update.engines.lora import AdapterFolders
from weight_update.errors import ConfigurationError
from weight_update.options import (
    BUCKET_BYTES_VARIABLE,
    FLUSH_VARIABLE,
    MASTER_ADDRESS_VARIABLE,
    PAUSE_MODE_VARIABLE,
)
from weight_update.schemes import server_scheme

URL = "http://127.0.0.1:9"


@pytest.fixture
def scheme(tmp_path: Path) -> VLLMWeightSyncScheme:
    return built(tmp_path)


def built(directory: Any, **more: Any) -> VLLMWeightSyncScheme:
    return VLLMWeightSyncScheme(URL, **{"lora": "adapter", "adapter_directory": directory} | more)


def whole(**more: Any) -> VLLMWeightSyncScheme:
    return VLLMWeightSyncScheme(URL, **more)


def test_whole_models_are_sent_unless_an_adapter_is_asked_for(tmp_path: Path) -> None:
    assert isinstance(whole().create_transport()._deployment, VLLMDeployment)
    assert isinstance(built(tmp_path).create_transport()._deployment, AdapterPush)


def test_a_directory_is_of_no_use_for_whole_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="for adapters that are sent by themselves"):
        whole(adapter_directory=tmp_path)


def test_files_are_refused_with_what_works() -> None:
    with pytest.raises(ConfigurationError, match="transport='disk' does not go") as caught:
        whole(transport="disk")

    assert "'ipc'" in caught.value.remedy


def test_requests_in_flight_are_kept_unless_an_adapter_is_sent(tmp_path: Path) -> None:
    assert whole().create_transport().pause_mode == "retract"
    assert built(tmp_path).create_transport().pause_mode == "abort"


def test_variables_of_the_library_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BUCKET_BYTES_VARIABLE, "4096")
    monkeypatch.setenv(MASTER_ADDRESS_VARIABLE, "10.0.0.1")

    assert (whole().bucket_bytes, whole().master_address) == (4096, "10.0.0.1")


@pytest.mark.parametrize("directory", [None, "", 7])
def test_a_directory_is_needed(directory: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"adapter_directory={directory!r} must be"):
        built(directory)


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written to: No such file") as caught:
        built(tmp_path / "typo")

    assert not (tmp_path / "typo").exists()
    assert "under the same path" in caught.value.remedy


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigurationError, match="cannot be written to: Not a directory"):
        built(tmp_path / "file")


def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    closed = tmp_path if not _writable(tmp_path) else Path("/proc")  # root may write anywhere else

    with pytest.raises(ConfigurationError, match="cannot be written to"):
        built(closed)


def test_construction_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    built(tmp_path).create_sender()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "bad",
    [
        {"lora": "both"},
        {"strategy": "flat"},
        {"backend": "mpi"},
        {"load_format": "zip"},
        {"transport": "post"},
        {"bucket_bytes": 0},
        {"master_port": 0},
        {"num_gpus": 0},
        {"dtype": "int8"},
        {"trim_vocabulary": 1},
        {"stale_cache": "ask"},
        {"lora_name": " "},
        {"pause_mode": "keep"},
        {"timeout": 0},
        {"on_failure": "retry"},
        {"quorum": "most"},
        {"initial_version": -1},
        {"verify": "yes"},
        {"when_busy": "queue"},
    ],
    ids=str,
)
def test_a_bad_argument_is_refused_by_name(bad: dict[str, Any], tmp_path: Path) -> None:
    ((argument, value),) = bad.items()

    with pytest.raises(ConfigurationError) as caught:
        built(tmp_path, **bad)

    assert f"{argument}={value!r}" in str(caught.value)


def test_positions_are_those_of_the_sglang_scheme() -> None:
    orders = [
        [
            p.name
            for p in inspect.signature(kind).parameters.values()
            if p.kind is not p.KEYWORD_ONLY
        ]
        for kind in (VLLMWeightSyncScheme, SGLangWeightSyncScheme)
    ]
    assert orders[0] == orders[1]


def test_a_scheme_of_torchrls_arguments_is_told_what_to_pass_instead() -> None:
    with pytest.raises(ConfigurationError, match="server_url is missing") as caught:
        VLLMWeightSyncScheme(master_port=29500, gpus_per_replica=2, num_replicas=1, device=0)

    assert "server_url=['http://host:8000'" in caught.value.remedy


def test_torchrls_positions_are_refused_since_the_first_is_no_url() -> None:
    with pytest.raises(ConfigurationError, match="server_url='localhost' needs a scheme"):
        VLLMWeightSyncScheme("localhost", 29500, 2, 1)


def test_torchrls_numbers_count_the_ranks() -> None:
    scheme = VLLMWeightSyncScheme([URL, "http://127.0.0.2:9"], gpus_per_replica=2, num_replicas=2)

    assert (scheme.num_gpus, scheme.world_size) == (4, 5)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"num_replicas": 2}, "num_replicas=2, and server_url names 1"),
        ({"gpus_per_replica": 2, "num_gpus": 3}, "num_gpus=3, but gpus_per_replica=2"),
        ({"gpus_per_replica": 0}, "gpus_per_replica=0 must be"),
    ],
    ids=str,
)
def test_numbers_that_contradict_each_other_are_refused(
    numbers: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        whole(**numbers)


def test_the_strategy_has_both_names() -> None:
    scheme = whole(strategy="state_dict")

    assert (scheme.strategy_str, scheme.strategy_name) == ("state_dict", "state_dict")


class Engine:
    """What TorchRL's trainers generate with."""

    def __init__(self, server_url: str | None = None) -> None:
        if server_url is not None:
            self.server_url = server_url


@pytest.mark.parametrize(
    ("engine", "warned"),
    [(None, False), (Engine(URL + "/"), False), (Engine("http://b:1"), True), (Engine(), True)],
    ids=["none", "ours", "elsewhere", "actors"],
)
def test_an_engine_that_gets_no_weights_is_warned_of(
    engine: Any, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(server_scheme.torchrl_logger, "warning", said.append)

    whole().warn_of_stranger(engine)

    assert bool(said) == warned
    assert all(URL in text for text in said)


def test_every_argument_is_kept_and_means_what_it_means_for_sglang(
    scheme: VLLMWeightSyncScheme,
) -> None:
    not_there = {"directory", "trainer_ranks"}
    ours, theirs = (
        inspect.signature(kind).parameters
        for kind in (VLLMWeightSyncScheme, SGLangWeightSyncScheme)
    )
    assert (
        set(ours) ^ set(theirs)
        == {"adapter_directory", "gpus_per_replica", "num_replicas"} | not_there
    )
    for name, parameter in ours.items():
        if "api_key" not in name:
            getattr(scheme, name)
        if name in theirs and name != "server_url":
            assert parameter.default == theirs[name].default


def test_variables_of_sglang_set_neither_pause_mode_nor_flush(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(PAUSE_MODE_VARIABLE, "in_place")
    monkeypatch.setenv(FLUSH_VARIABLE, "no")

    assert whole().create_transport().pause_mode == "retract"
    assert built(tmp_path).create_transport().pause_mode == "abort"
    assert built(tmp_path, pause_mode="retract").create_transport().pause_mode == "retract"
    assert whole().options.flush_wanted()


def test_there_is_one_sender_class(scheme: VLLMWeightSyncScheme) -> None:
    assert VLLMWeightSender is SGLangWeightSender
    assert isinstance(scheme.create_sender(), VLLMWeightSender)


def test_keys_are_never_shown(tmp_path: Path) -> None:
    made = built(tmp_path, api_key="hunter2", admin_api_key="hunter3")

    for item in (made, made.options, made.create_sender(), made.create_transport()):
        assert "hunter" not in repr(item)


@pytest.mark.parametrize(
    "rebuild", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy], ids=["pickle", "deepcopy"]
)
@pytest.mark.parametrize(
    ("part", "transport_of"),
    [
        (lambda scheme: scheme, lambda twin: twin.create_transport()),
        (lambda scheme: scheme.create_sender(), lambda twin: twin._transport),
        (lambda scheme: scheme.create_transport(), lambda twin: twin),
    ],
    ids=["scheme", "sender", "transport"],
)
def test_each_part_crosses_processes_and_still_pushes_to_vllm(
    rebuild: Any, part: Any, transport_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    transport = transport_of(rebuild(part(built(".", quorum=1, initial_version=3))))

    assert (transport.server_url, transport.version) == (URL, 3)
    assert isinstance(transport._deployment._courier, AdapterFolders)
    assert transport._deployment._courier._directory == tmp_path


@pytest.mark.parametrize(
    "rebuild", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy], ids=["pickle", "deepcopy"]
)
def test_a_sender_of_whole_models_crosses_processes(rebuild: Any) -> None:
    sender = rebuild(whole(initial_version=3, dtype=torch.bfloat16).create_sender())

    assert isinstance(sender._transport._deployment, VLLMDeployment)
    assert sender._transport.version == 3


@pytest.mark.parametrize("source", [nn.Linear(1, 1), {"w": torch.ones(1)}], ids=["plain", "dict"])
def test_what_holds_no_adapter_is_refused_before_any_engine_is_asked(
    source: Any, scheme: VLLMWeightSyncScheme
) -> None:
    with scheme.create_sender() as sender, pytest.raises(ConfigurationError, match="adapter"):
        sender.update_weights(source)


def _writable(directory: Path) -> bool:
    try:
        (directory / "probe").touch()
    except OSError:
        return False
    return True
