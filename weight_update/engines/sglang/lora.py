"""SGLang, taking one LoRA adapter: the base weights stay, and requests name the adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weight_update.engines.answers import json_of
from weight_update.engines.lora import (
    MERGE,
    AdapterCourier,
    AdapterParcel,
    AdapterSession,
    HeldAdapter,
    modules_of,
)
from weight_update.engines.sglang.client import SGLangClient
from weight_update.engines.sglang.engine import SGLangEngine
from weight_update.errors import EngineRejected
from weight_update.facts import Digests, Intake, NameCheck, Part
from weight_update.options import HttpOptions, PauseMode, Way
from weight_update.waiting import Deadline

LOAD_ROUTE = "/load_lora_adapter_from_tensors"
_LATE_SECONDS = 1.0
# Fields of PEFT's config that a server refuses, or ignores and computes something else.
_NOT_SERVED = {
    "use_dora": "DoRA",
    "modules_to_save": "modules_to_save",
    "trainable_token_indices": "trainable tokens",
    "target_parameters": "adapters on parameters",
    "lora_bias": "lora_bias",
    "rank_pattern": "a rank a layer (rank_pattern)",
    "alpha_pattern": "a scale a layer (alpha_pattern)",
    "layer_replication": "layer replication",
    "alora_invocation_tokens": "activated LoRA",
}


@dataclass(frozen=True)
class LoRASupport:
    """What a server says of adapters.

    Attributes:
        route: It takes adapters from tensors (0.5.8 and later).
        enabled: It was started with ``--enable-lora``.
        replicated: Its attention is data parallel.
        fields: Fields of a load request; None where it does not say.
        rank: ``--max-lora-rank``, if known.
        modules: ``--lora-target-modules``, if known and not all.
    """

    route: bool = False
    enabled: bool = False
    replicated: bool = False
    fields: frozenset[str] | None = None
    rank: int | None = None
    modules: frozenset[str] | None = None

    @property
    def proves(self) -> bool:
        """It compares each tensor with a checksum, and serves none that differs."""
        return "expected_checksums" in (self.fields or ())


class SGLangLoRAClient(SGLangClient):
    """Calls the LoRA routes as well."""

    def load_fields(self, deadline: Deadline) -> frozenset[str] | None:
        """The fields of a load request; None when the server does not publish them."""
        body = json_of(self._ask("/openapi.json", "connect", deadline))
        try:
            schema = body["components"]["schemas"]["LoadLoRAAdapterFromTensorsReqInput"]
            return frozenset(schema["properties"])
        except (KeyError, TypeError):
            return None

    def load_adapter(self, body: dict[str, Any], deadline: Deadline) -> None:
        """Loads an adapter of a name that is free."""
        self._post(LOAD_ROUTE, "transfer", deadline, body, flag=True, late=_LATE_SECONDS)

    def unload_adapter(self, name: str, deadline: Deadline) -> None:
        """Unloads an adapter once no request uses it; one that is not loaded is no error."""
        try:
            self._post("/unload_lora_adapter", "transfer", deadline, {"lora_name": name}, flag=True)
        except EngineRejected as error:
            if "does not exist" not in error.message:
                raise


class SGLangAdapterEngine(SGLangEngine):
    """One SGLang server whose adapter is replaced; release 0.5.8 or later.

    Args:
        url: Base URL.
        options: Keys, TLS and proxies.
        courier: Brings the adapter of the update that runs.
    """

    def __init__(self, url: str, options: HttpOptions, courier: AdapterCourier) -> None:
        super().__init__(url, options)
        self._client: SGLangLoRAClient = SGLangLoRAClient(url, options)
        self._courier = courier
        self._support = LoRASupport()
        self._held = HeldAdapter()

    def inspect(self, deadline: Deadline) -> None:
        """Learns release, layout and what the server says of adapters."""
        super().inspect(deadline)
        info = self._client.server_info(deadline)
        has_route = self._client.has(LOAD_ROUTE, deadline) is not False
        fields = self._client.load_fields(deadline) if has_route else None
        self._support = read_support(info, fields, route=has_route)
        self._held = HeldAdapter()

    @property
    def intake(self) -> Intake:
        """An adapter is cast and cut by the server; the base model says nothing about it."""
        return Intake(any_shape=True)

    def check_names(self, names: Sequence[str], deadline: Deadline) -> NameCheck:
        """The server checks an adapter as a whole, when it loads it."""
        return NameCheck()

    def first_values(self, name: str, deadline: Deadline) -> tuple[float, ...] | None:
        """Adapters cannot be read back."""
        return None

    def digests(self, deadline: Deadline) -> Digests | None:
        """The checksums that the server confirmed when it loaded the adapter."""
        sums = self._held.sums
        if not self._support.proves or sums is None:
            return None
        return Digests(ranks=(sums,), parts=({name: Part() for name in sums},))

    def objection(self, mode: PauseMode) -> str | None:
        """Why this server cannot take the adapter under a pause mode; None when it can."""
        if mode != "abort":
            return (
                f"an adapter is replaced once no request uses it, and under pause_mode={mode!r} "
                "those in flight never end; use 'abort'"
            )
        release = self.capabilities.release
        return (
            super().objection(mode)
            or why_not(self._support, release)
            or why_not_served(self._courier.config or {}, self._support)
        )

    def can_flush(self, mode: PauseMode) -> bool:
        """Prefixes are kept apart by adapter, so that none of the one before can be served."""
        return True

    def flushes_with_update(self, mode: PauseMode) -> bool:
        """A new adapter begins without prefixes, and those of the base model stay valid."""
        return True

    def session(self, way: Way) -> AdapterSession:  # type: ignore[override]
        """A session for one update."""
        desk = _Desk(self._client, self._support, self.ranks or 1)
        return AdapterSession(desk, self._courier, self._held)


@dataclass(frozen=True)
class _Desk:
    """Where the adapters of one server are loaded and unloaded."""

    client: SGLangLoRAClient
    support: LoRASupport
    ranks: int

    def load(self, name: str, parcel: AdapterParcel, deadline: Deadline) -> None:
        body = load_request(parcel, self.support, self.ranks)
        self.client.load_adapter({**body, "lora_name": name}, deadline)

    def unload(self, name: str, deadline: Deadline) -> None:
        self.client.unload_adapter(name, deadline)


def read_support(
    info: Mapping[str, Any], fields: frozenset[str] | None, *, route: bool
) -> LoRASupport:
    """What a ``/server_info`` answer says of adapters.

    Example:
        >>> read_support({"enable_lora": True, "max_lora_rank": 8}, None, route=True).rank
        8
    """
    rank, modules = info.get("max_lora_rank"), info.get("lora_target_modules")
    known = isinstance(modules, list) and modules and "all" not in modules
    return LoRASupport(
        route=route,
        enabled=info.get("enable_lora") is True,
        replicated=info.get("enable_dp_attention") is True,
        fields=fields,
        rank=rank if isinstance(rank, int) else None,
        modules=frozenset(map(str, modules)) if known and modules else None,
    )


def why_not(support: LoRASupport, release: str) -> str | None:
    """Why a server takes no adapters at all; None when it does."""
    if not support.route:
        known = release or "(release unknown)"
        return (
            f"SGLang {known} has no route that loads adapters from tensors, as releases from 0.5.8 "
            f"on have (the reference engine has none either); {MERGE}"
        )
    if not support.enabled:
        return f"it was started without --enable-lora; restart it with it, or {MERGE}"
    if support.replicated:
        return f"its attention is data parallel, and adapters cannot be replaced there; {MERGE}"
    return None


def why_not_served(config: Mapping[str, Any], support: LoRASupport) -> str | None:
    """Why a server would refuse an adapter, or compute something else with it.

    Example:
        >>> why_not_served({"r": 16}, LoRASupport(rank=8))
        "the adapter's rank is 16 and --max-lora-rank is 8; restart it with more, or push with..."
    """
    features = [words for key, words in _NOT_SERVED.items() if config.get(key)]
    if config.get("bias", "none") != "none":
        features.append(f"bias={config['bias']!r}")
    if features:
        return f"SGLang does not serve an adapter with {', '.join(features)}; {MERGE}"
    rank = config.get("r")
    if rank is not None and support.rank is not None and rank > support.rank:
        return (
            f"the adapter's rank is {rank} and --max-lora-rank is {support.rank}; restart it with "
            f"more, or {MERGE}"
        )
    lacking = ", ".join(_untaken(config.get("target_modules"), support))
    if lacking:
        return f"--lora-target-modules lacks {lacking}; restart it with them, or {MERGE}"
    return None


def _untaken(targets: Any, support: LoRASupport) -> list[str]:
    """Modules that the server keeps no adapters for, where both sides name them plainly."""
    if support.modules is None or not isinstance(targets, list):
        return []
    return sorted({str(target).rpartition(".")[2] for target in targets} - support.modules)


def served_config(config: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """The config as the server reads it: plain module names, and a scale of alpha / r.

    It knows neither patterns nor rsLoRA's scale, and would serve another model without a word.

    Example:
        >>> config = {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ".*up.*"}
        >>> served_config(config, {"model.layers.0.up_proj.lora_A.weight": None})["lora_alpha"]
        16.0
    """
    rs = bool(config.get("use_rslora"))
    alpha = config["lora_alpha"] * config["r"] ** 0.5 if rs else config["lora_alpha"]
    targets = modules_of(names)
    return {**config, "lora_alpha": alpha, "use_rslora": False, "target_modules": targets}


def load_request(parcel: AdapterParcel, support: LoRASupport, ranks: int) -> dict[str, Any]:
    """The body of a load request, less the name.

    Releases before 0.5.19 or so read one blob from ``serialized_tensors``, later ones a blob a
    rank from ``serialized_named_tensors``. A server that does not say which gets both: none
    minds a field that it does not know.
    """
    fields = support.fields or {"serialized_tensors", "serialized_named_tensors"}
    body: dict[str, Any] = {"config_dict": served_config(parcel.config, parcel.tensors)}
    if "serialized_named_tensors" in fields:
        body["serialized_named_tensors"] = [parcel.pickled] * ranks
    if "serialized_tensors" in fields:
        body["serialized_tensors"] = parcel.pickled
    if support.proves:
        body["expected_checksums"] = parcel.sums
    return body
