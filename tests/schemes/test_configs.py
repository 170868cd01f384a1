"""Hydra-style configs: what they hold, what overrides do, and what is never printed."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException, InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue

from weight_update import ConfigurationError, SGLangWeightSyncScheme, VLLMWeightSyncScheme
from weight_update.options import API_KEY_VARIABLE
from weight_update.schemes.configs import (
    CONFIGS,
    FleetWeightSyncSchemeConfig,
    SGLangWeightSyncSchemeConfig,
    VLLMWeightSyncSchemeConfig,
    register_configs,
)
from weight_update.schemes.fleet import FleetWeightSyncScheme

URL = "http://127.0.0.1:30000"
KEYS = {"api_key", "admin_api_key"}  # which come from the environment
CASES = {
    SGLangWeightSyncSchemeConfig: SGLangWeightSyncScheme,
    VLLMWeightSyncSchemeConfig: VLLMWeightSyncScheme,
    FleetWeightSyncSchemeConfig: FleetWeightSyncScheme,
}
NEEDED = "???"


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """The configs are known to Hydra."""
    register_configs()
    with initialize(version_base=None):
        yield


def composed(name: str, *overrides: str) -> Any:
    """What an application gets for ``weight_sync_scheme=name`` and further overrides."""
    words = (f"weight_sync_scheme.{override}" for override in overrides)
    return compose(overrides=[f"+weight_sync_scheme={name}", *words]).weight_sync_scheme


def arguments_of(scheme: type) -> dict[str, Any]:
    """Each argument of a constructor and its default; the keys are left out."""
    parameters = inspect.signature(scheme).parameters.values()
    return {
        # The vLLM scheme's own words say what TorchRL's users have to pass.
        p.name: NEEDED if p.default is p.empty or p.name == "server_url" else p.default
        for p in parameters
        if p.name not in KEYS
    }


@pytest.mark.parametrize("config", CASES, ids=lambda config: config.__name__)
def test_its_fields_are_the_schemes_arguments_with_their_defaults(config: type) -> None:
    made = config()
    fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(config)}
    assert {name: value for name, value in fields.items() if name[0] != "_"} == arguments_of(
        CASES[config]
    )


@pytest.mark.parametrize("config", [SGLangWeightSyncSchemeConfig, VLLMWeightSyncSchemeConfig])
def test_a_config_makes_the_scheme_that_the_constructor_makes(config: type) -> None:
    made = instantiate(config(server_url=URL))
    assert type(made) is CASES[config]
    assert made.options == CASES[config](URL).options


def test_a_fleets_config_holds_the_configs_of_its_parts() -> None:
    parts = [
        SGLangWeightSyncSchemeConfig(server_url=URL),
        VLLMWeightSyncSchemeConfig(server_url="http://127.0.0.1:8000"),
    ]
    fleet = instantiate(OmegaConf.structured(FleetWeightSyncSchemeConfig(schemes=parts)))
    assert [type(scheme) for scheme in fleet.schemes] == [
        SGLangWeightSyncScheme,
        VLLMWeightSyncScheme,
    ]


def test_the_config_of_a_torchrl_collector_can_hold_it() -> None:
    from torchrl.trainers.algorithms.configs.collectors import CollectorConfig
    from torchrl.trainers.algorithms.configs.weight_sync_schemes import NoWeightSyncSchemeConfig

    schemes = {"policy": SGLangWeightSyncSchemeConfig(server_url=URL)}
    env = NoWeightSyncSchemeConfig()  # any config of torchrl's does
    holder = CollectorConfig(create_env_fn=env, weight_sync_schemes=schemes)
    config = OmegaConf.structured(holder)
    made = instantiate(config.weight_sync_schemes)
    assert type(made["policy"]) is SGLangWeightSyncScheme


# -- overrides ------------------------------------------------------------------------------


def test_overrides_reach_the_scheme_as_plain_values() -> None:
    scheme = instantiate(
        composed(
            "sglang",
            "server_url=[http://a:1,http://b:2]",
            "pause_mode=abort",
            "quorum=1",
            "device=cpu",
            "timeout=60",
            "name_map={policy:model}",
            "dtype={_target_:hydra.utils.get_object,path:torch.bfloat16}",
        )
    )
    assert scheme.server_url == ["http://a:1", "http://b:2"]
    assert type(scheme.server_url) is list
    assert type(scheme.name_map) is dict
    assert (scheme.pause_mode, scheme.quorum, scheme.timeout) == ("abort", 1, 60.0)
    assert scheme.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("pause_mode=retarct", "accepted: 'abort', 'retract', 'in_place'"),
        ("bucket_bytes=-1", "bucket_bytes=-1 must be a whole number above zero"),
        ("server_url=a:1", "needs a scheme and a host"),
    ],
)
def test_a_wrong_value_fails_with_the_schemes_own_words(override: str, said: str) -> None:
    config = composed("sglang", f"server_url={URL}")
    config = OmegaConf.merge(config, OmegaConf.from_dotlist([override]))
    with pytest.raises(InstantiationException, match=said) as failed:
        instantiate(config)
    assert isinstance(failed.value.__cause__, ConfigurationError)


@pytest.mark.parametrize("override", ["timeout=abc", "trim_vocabulary=maybe", "puase_mode=abort"])
def test_a_value_of_another_type_and_an_unknown_name_are_refused_by_hydra(override: str) -> None:
    with pytest.raises(ConfigCompositionException, match=override.partition("=")[0]):
        composed("sglang", override)


def test_a_server_must_be_named() -> None:
    with pytest.raises(MissingMandatoryValue, match="server_url"):
        instantiate(composed("vllm_servers"))


# -- keys -----------------------------------------------------------------------------------


def test_no_key_is_in_a_config_that_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "open-sesame")
    config = composed("sglang", f"server_url={URL}")
    text = OmegaConf.to_yaml(config, resolve=True)

    scheme = instantiate(config)

    assert scheme.options.http.api_key == "open-sesame"
    assert "sesame" not in text
    assert "sesame" not in repr(scheme)


def test_a_key_has_no_place_in_a_config() -> None:
    with pytest.raises(ConfigCompositionException, match="api_key"):
        composed("sglang", "api_key=open-sesame")


def test_a_key_can_be_given_with_the_call() -> None:
    config = composed("sglang", f"server_url={URL}")
    assert instantiate(config, api_key="open-sesame").options.http.api_key == "open-sesame"


# -- registration ---------------------------------------------------------------------------


def test_the_names_are_beside_torchrls_own_whichever_comes_first() -> None:
    import torchrl.trainers.algorithms.configs as theirs

    theirs._register_configs()
    register_configs()
    names = set(ConfigStore.instance().list("weight_sync_scheme"))
    assert {f"{name}.yaml" for name in CONFIGS} <= names
    assert {"vllm.yaml", "ray.yaml"} <= names
    assert composed("vllm")._target_.startswith("torchrl.")


def test_a_name_of_somebody_else_is_not_taken() -> None:
    ConfigStore.instance().store(group="mine", name="sglang", node={"a": 1}, provider="me")
    with pytest.raises(ConfigurationError, match=r"'mine' has sglang\.yaml of somebody else's"):
        register_configs("mine")


def test_the_module_needs_neither_hydra_nor_torchrl(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['hydra'] = sys.modules['omegaconf'] = None\n"
        "from weight_update.schemes.configs import *\n"
        "print('torchrl' in sys.modules)\n"
        "SGLangWeightSyncSchemeConfig(server_url='http://a:1')\n"
        "try:\n    register_configs()\n"
        "except ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=150
    )
    assert done.stdout == "False\nHydra is not installed [pip install hydra-core]\n"
