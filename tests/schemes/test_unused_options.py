"""What would be passed over without a word is refused, by whatever face it comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.kit import run
from weight_update import (
    ConfigurationError,
    SGLangWeightSyncScheme,
    VLLMWeightSyncScheme,
)
from weight_update.options import DIRECTORY_VARIABLE, HttpOptions, UpdateOptions
from weight_update.schemes.fleet import FleetWeightSyncScheme
from weight_update.schemes.transport import SGLangCollectiveTransport
from weight_update.synchronizers import SGLangGeneration

URL = "http://127.0.0.1:1"
HERE = str(Path(__file__).parent)

UNUSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"transport": "broadcast"}, {"directory": HERE}),
    ({"transport": "ipc"}, {"directory": HERE}),
    ({"transport": "disk"}, {"load_format": "tensors"}),
    ({"transport": "disk"}, {"backend": "gloo"}),
    ({"lora": "adapter"}, {"directory": HERE}),
    ({"lora": "adapter"}, {"load_format": "flattened_bucket"}),
    ({"lora": "adapter"}, {"bucket_bytes": 1 << 20}),
    ({"lora": "merge"}, {"lora_name": "actor"}),
]


@pytest.mark.parametrize(("choice", "unused"), UNUSED, ids=str)
def test_an_option_that_has_no_use_is_refused(
    choice: dict[str, Any], unused: dict[str, Any]
) -> None:
    (name,), (chooser,) = unused, choice
    with pytest.raises(ConfigurationError, match=f"{name}=.* has no use with {chooser}=") as caught:
        SGLangWeightSyncScheme(URL, **choice, **unused)
    assert name in caught.value.remedy


@pytest.mark.parametrize(
    "options",
    [
        {"directory": HERE},
        {"load_format": "tensors", "backend": "gloo", "directory": HERE},
        {"transport": "disk", "directory": HERE, "bucket_bytes": 1 << 20},
        {"transport": "ipc", "load_format": "tensors"},
        {"transport": "disk", "load_format": "auto", "backend": "auto"},
        {"lora": "adapter", "lora_name": "actor"},
        {"transport": "disk", "master_address": "127.0.0.1", "master_port": 29500, "device": 0},
    ],
    ids=str,
)
def test_what_may_be_used_is_taken(options: dict[str, Any]) -> None:
    """Of auto any way may come; addresses and devices are given by TorchRL's programs anyway."""
    SGLangWeightSyncScheme(URL, **options)


@pytest.mark.parametrize("choice", [{"transport": "broadcast"}, {"lora": "adapter"}], ids=str)
def test_a_folder_of_the_environment_is_no_argument(
    choice: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, HERE)
    FleetWeightSyncScheme([SGLangWeightSyncScheme(URL)])
    SGLangWeightSyncScheme(URL, **choice)


def test_a_vllm_scheme_refuses_alike(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="load_format='tensors' has no use with lora="):
        VLLMWeightSyncScheme(URL, lora="adapter", adapter_directory=tmp_path, load_format="tensors")


def test_a_generation_refuses_alike() -> None:
    with pytest.raises(ConfigurationError, match=r"directory=.* has no use with transport='ipc'"):
        SGLangGeneration(URL, transport="ipc", directory=HERE)


def test_a_fleet_refuses_a_folder_that_nothing_is_written_to() -> None:
    """It gets weights by a broadcast."""
    schemes = [SGLangWeightSyncScheme(URL, directory=HERE), VLLMWeightSyncScheme("http://b:1")]
    with pytest.raises(ConfigurationError, match="is for updates by disk"):
        FleetWeightSyncScheme(schemes)


@pytest.mark.parametrize("way", ["broadcast", "ipc"])
def test_the_command_refuses_a_folder_that_nothing_is_written_to(way: str) -> None:
    ended = run("push", "--server", URL, HERE, "--transport", way, "--directory", HERE)
    assert ended.code == 2
    assert f"has no use with transport='{way}'" in ended.err


def test_a_transport_takes_its_settings_in_one_way() -> None:
    with pytest.raises(ConfigurationError, match="timeout= is given beside it"):
        SGLangCollectiveTransport(URL, timeout=5.0, options=UpdateOptions())


def test_who_checks_no_certificate_names_no_authority() -> None:
    with pytest.raises(ConfigurationError, match="tls_verify=False checks none"):
        HttpOptions(ca_file=__file__, tls_verify=False)


def test_a_cache_that_is_left_alone_on_purpose_is_not_refused_for_it() -> None:
    with pytest.raises(ConfigurationError, match="asks for"):
        UpdateOptions(flush_cache_on_update=False, stale_cache="refuse")


def test_nccl_is_not_asked_to_move_bytes_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They left from the first GPU, whatever device was named."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigurationError, match="does not go with device='cpu'"):
        UpdateOptions(backend="nccl", device="cpu")
