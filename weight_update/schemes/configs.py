"""Hydra-style configs of the schemes: a field an argument, with its default.

Nothing here needs Hydra, except :func:`register_configs`.

There are no fields for keys: Hydra prints configs and keeps them in files. Keys come from the
environment (``WEIGHT_UPDATE_API_KEY``), or with the call:
``hydra.utils.instantiate(cfg, api_key=...)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from weight_update.errors import ConfigurationError

GROUP = "weight_sync_scheme"
"""The group in which torchrl keeps the configs of its own schemes."""
_PROVIDER = "weight_update"
# How OmegaConf marks a value that has to be given.
_NEEDED: Any = "???"


@dataclass
class _SchemeConfig:
    """What the configs of all schemes have in common."""

    _partial_: bool = False
    # Plain lists and dictionaries reach the scheme, which is pickled to workers.
    _convert_: str = "all"


@dataclass
class _ServersConfig(_SchemeConfig):
    """The arguments that schemes of either engine have."""

    server_url: Any = _NEEDED  # a URL, or a list of them
    master_address: str | None = None
    master_port: int | None = None
    num_gpus: int | None = None
    strategy: str = "tensordict"
    device: Any = None  # an index or a name
    flush_cache_on_update: bool | None = None
    pause_mode: str | None = None
    backend: str = "auto"
    bucket_bytes: int | None = None
    load_format: str = "auto"
    transport: str = "auto"
    dtype: Any = None  # "engine", or {_target_: hydra.utils.get_object, path: torch.bfloat16}
    name_map: Any = None  # a table, or {_target_: hydra.utils.get_method, path: ...}
    trim_vocabulary: bool = False
    check_finite: bool = False
    lora: str = "merge"
    lora_name: str = "policy"
    timeout: float = 300.0
    tls_verify: bool = True
    ca_file: str | None = None
    use_proxies: bool = False
    on_failure: str = "hold"
    quorum: Any = "all"  # or a number
    initial_version: int | None = None
    verify: str = "auto"
    when_busy: str = "wait"
    stale_cache: str = "warn"


@dataclass
class SGLangWeightSyncSchemeConfig(_ServersConfig):
    """The arguments of :class:`~weight_update.SGLangWeightSyncScheme`, which explains them.

    Example:
        >>> from hydra.utils import instantiate
        >>> instantiate(SGLangWeightSyncSchemeConfig(server_url="http://127.0.0.1:30000"))
        SGLangWeightSyncScheme('http://127.0.0.1:30000', strategy='tensordict')
    """

    _target_: str = "weight_update.SGLangWeightSyncScheme"

    directory: str | None = None
    trainer_ranks: str = "one"


@dataclass
class VLLMWeightSyncSchemeConfig(_ServersConfig):
    """The arguments of :class:`~weight_update.VLLMWeightSyncScheme`, which explains them.

    Example:
        >>> from hydra.utils import instantiate
        >>> instantiate(VLLMWeightSyncSchemeConfig(server_url="http://127.0.0.1:8000"))
        VLLMWeightSyncScheme('http://127.0.0.1:8000', strategy='tensordict')
    """

    _target_: str = "weight_update.VLLMWeightSyncScheme"

    adapter_directory: str | None = None
    gpus_per_replica: int | None = None
    num_replicas: int | None = None


@dataclass
class FleetWeightSyncSchemeConfig(_SchemeConfig):
    """SGLang and vLLM servers behind one sender; ``schemes`` holds a config for each kind.

    Keys of both come from the environment: a call that instantiates it hands none on.

    Example:
        >>> from hydra.utils import instantiate
        >>> sglang = SGLangWeightSyncSchemeConfig(server_url="http://127.0.0.1:30000")
        >>> vllm = VLLMWeightSyncSchemeConfig(server_url="http://127.0.0.1:8000")
        >>> type(instantiate(FleetWeightSyncSchemeConfig(schemes=[sglang, vllm]))).__name__
        'FleetWeightSyncScheme'
    """

    _target_: str = "weight_update.FleetWeightSyncScheme"

    schemes: list[Any] = field(default_factory=lambda: _NEEDED)


CONFIGS: dict[str, type[_SchemeConfig]] = {
    "sglang": SGLangWeightSyncSchemeConfig,
    # torchrl has a "vllm" of its own in this group, for vLLM inside Ray actors.
    "vllm_servers": VLLMWeightSyncSchemeConfig,
    "server_fleet": FleetWeightSyncSchemeConfig,
}
"""The names under which :func:`register_configs` stores the configs."""


def register_configs(group: str = GROUP) -> None:
    """Has Hydra know the configs: ``weight_sync_scheme=sglang`` on a command line.

    Call it before ``@hydra.main``; calling it again changes nothing.

    Args:
        group: The config group; its default is that of torchrl's own schemes.

    Raises:
        ConfigurationError: Hydra is not installed, or somebody else stored a config under one
            of the names.
    """
    store = _config_store()
    taken = [f"{name}.yaml" for name in CONFIGS if _is_others(store, group, f"{name}.yaml")]
    if taken:
        raise ConfigurationError(
            f"the config group {group!r} has {', '.join(taken)} of somebody else's",
            remedy="name another group: register_configs(group=...)",
        )
    for name, node in CONFIGS.items():
        store.store(group=group, name=name, node=node, provider=_PROVIDER)


def _config_store() -> Any:
    try:
        from hydra.core.config_store import ConfigStore
    except ImportError as error:
        raise ConfigurationError(
            "Hydra is not installed", remedy="pip install hydra-core"
        ) from error
    return ConfigStore.instance()


def _is_others(store: Any, group: str, name: str) -> bool:
    found = name in store.list(group) if group in store.list("") else False
    return found and store.load(f"{group}/{name}").provider != _PROVIDER
