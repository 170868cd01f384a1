"""What a vLLM server says of itself, as plain facts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weight_update.engines.intake import intake_of as intake_told
from weight_update.engines.model_folder import read_config, read_shapes
from weight_update.engines.names import compare_names
from weight_update.facts import Intake, NameCheck

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_DRAFTS = re.compile(r"(?:^|\.)mtp\.")
# Scales of an fp8 KV cache, which a checkpoint may lack; an engine without such a cache has no
# place for them, and fails half-way.
_CACHE_SCALE = re.compile(r"\.[qkv]_scale$")


@dataclass(frozen=True)
class VLLMFacts:
    """What a server is started with.

    Attributes:
        backend: Of its weight transfer; empty when it has none, None when it does not say.
        extension: The class that its workers were extended by; empty when none.
        lora: Whether it wraps layers for adapters.
        intake: How it takes weights.
        loaded: Names of the weights in its model's folder that it loads; empty when unknown.
        tied: Whether its output layer is its embedding.
        fp8_cache: Whether its KV cache is in fp8, so that there are scales.
    """

    backend: str | None = None
    extension: str = ""
    lora: bool = False
    intake: Intake = field(default_factory=Intake)
    loaded: frozenset[str] = frozenset()
    tied: bool = False
    fp8_cache: bool = False

    def check_names(self, names: Sequence[str]) -> NameCheck:
        """Compares the names of a push with those in the model's folder.

        Example:
            >>> VLLMFacts(loaded=frozenset({"a"})).check_names(["a", "b", "attn.k_scale"]).unknown
            ('b', 'attn.k_scale')
        """
        scales = tuple(name for name in names if _CACHE_SCALE.search(name))
        misplaced = scales if not self.fp8_cache else ()
        if not self.loaded:
            return NameCheck(bool(misplaced), misplaced)
        weights = [name for name in names if not _CACHE_SCALE.search(name)] if scales else names
        unknown, lacking = compare_names(weights, self.loaded, tied=self.tied)
        return NameCheck(True, (*unknown, *misplaced), tuple(lacking))


def read_facts(info: Mapping[str, Any], cards: Iterable[Mapping[str, Any]]) -> VLLMFacts:
    """Facts from ``/server_info`` and ``/v1/models``; the model's folder is read where it can be.

    Example:
        >>> facts = read_facts({"weight_transfer_config": {"backend": "nccl"}}, [])
        >>> facts.backend, facts.check_names(["a"]).known
        ('nccl', False)
    """
    model, parallel = _object(info, "model_config"), _object(info, "parallel_config")
    folder = folder_of(info, cards)
    config = read_config(folder)
    dummy = _object(info, "load_config").get("load_format") == "dummy"
    shapes = {} if dummy else read_shapes(folder)
    loaded = frozenset(_loaded(shapes, _of_text(config, "num_hidden_layers")))
    return VLLMFacts(
        backend=_backend(info),
        extension=str(parallel.get("worker_extension_cls") or ""),
        lora=bool(_object(info, "lora_config")),
        intake=_intake(info, model, config, shapes, unread=bool(folder) and not config),
        loaded=loaded,
        tied=bool(_of_text(config, "tie_word_embeddings")),
        fp8_cache="fp8" in str(_object(info, "cache_config").get("cache_dtype")),
    )


def instance_of(info: Mapping[str, Any]) -> str | None:
    """What this start of the server has of its own."""
    instance = info.get("instance_id")
    return str(instance) if instance else None


def keeps_memory(info: Mapping[str, Any]) -> bool:
    """Whether a server says that it was started without what frees memory while it sleeps.

    Example:
        >>> keeps_memory({"model_config": {"enable_sleep_mode": False}}), keeps_memory({})
        (True, False)
    """
    return _object(info, "model_config").get("enable_sleep_mode") is False


def _backend(info: Mapping[str, Any]) -> str | None:
    if not info:
        return None
    return str(_object(info, "weight_transfer_config").get("backend") or "")


def folder_of(info: Mapping[str, Any], cards: Iterable[Mapping[str, Any]]) -> Any:
    """The path of the model that was served from the start; adapters name it as their parent."""
    named = _object(info, "model_config").get("model")
    return named or next((card.get("root") for card in cards if not card.get("parent")), None)


def _intake(
    info: Mapping[str, Any],
    model: Mapping[str, Any],
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    unread: bool,
) -> Intake:
    told = {
        "dtype": str(model.get("dtype") or "").removeprefix("torch."),
        "quantization": model.get("quantization"),
        "speculative_algorithm": "draft" if info.get("speculative_config") else None,
    }
    intake = intake_told(told, {"architectures": config.get("architectures")}, config)
    kind = intake.quantization
    return replace(
        intake,
        # How vLLM quantises anew was tried for no kind: all are refused.
        quantization=None if kind is None else f"{kind} in vLLM",
        block=None,
        partial_modules=False,
        whole_layers=True,
        shapes={} if kind else shapes,
        unread=unread and kind is None and not info,
    )


def _loaded(names: Iterable[str], layers: Any) -> Iterable[str]:
    """Without those of draft models, which are kept beside and served by nobody."""
    for name in names:
        found = _LAYER.search(name)
        beyond = found and isinstance(layers, int) and int(found[1]) >= layers
        if not beyond and not _DRAFTS.search(name):
            yield name


def _of_text(config: Mapping[str, Any], key: str) -> Any:
    return config.get(key, _object(config, "text_config").get(key))


def _object(holder: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = holder.get(key)
    return found if isinstance(found, dict) else {}
