"""What differs when a LoRA adapter travels by itself: source, engines, group and packer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from weight_update.delivery.ranks import Ranks
from weight_update.engines.lora import AdapterCourier, AdapterFolders
from weight_update.engines.sglang.lora import SGLangAdapterEngine
from weight_update.engines.vllm.lora import VLLMAdapterEngine
from weight_update.errors import ConfigurationError
from weight_update.options import UpdateOptions
from weight_update.transports.in_request import NoGroup, RequestPacker
from weight_update.update.protocols import Engine
from weight_update.update.updater import Updater
from weight_update.update.ways import Ends
from weight_update.weights.lora.export import Adapter, adapter_of
from weight_update.weights.specs import Weight


class AdapterPush:
    """Pushes the active adapter of a model instead of its merged weights.

    Args:
        options: Those of the sender.
        courier: Brings the adapter to the engines.
        open_engine: Makes the engine at a URL.
    """

    merges = False

    def __init__(
        self,
        options: UpdateOptions,
        courier: AdapterCourier,
        open_engine: Callable[[str], Engine],
    ) -> None:
        self._options, self._courier, self._open_engine = options, courier, open_engine

    @classmethod
    def to_sglang(cls, options: UpdateOptions, _: Ranks) -> AdapterPush:
        """Pushes to SGLang servers, inside requests."""
        courier = AdapterCourier(options.lora_name)
        return cls(options, courier, lambda url: SGLangAdapterEngine(url, options.http, courier))

    @classmethod
    def to_vllm(cls, options: UpdateOptions, _: Ranks, *, directory: Path) -> AdapterPush:
        """Pushes to vLLM servers, through a directory that they and the trainer see."""
        folders = AdapterFolders(options.lora_name, directory)
        return cls(options, folders, lambda url: VLLMAdapterEngine(url, options.http, folders))

    def updater(self, urls: Sequence[str]) -> Updater:
        """The one updater, without a group, and with everything in one bucket."""
        return Updater(
            urls,
            self._open_engine,
            {"request": Ends(lambda *_: NoGroup(), lambda _: RequestPacker(self._courier.pack))},
            replace(self._options, backend="gloo", device="cpu", transport="auto"),
        )

    def extract(self, source: Any) -> tuple[Weight, ...]:
        """The adapter's weights; engines are told what kind of adapter comes.

        Raises:
            ConfigurationError: There is no one adapter to send.
        """
        adapter = _adapter(source)
        self._courier.announce(adapter.config)
        return adapter.weights

    def counted(self, urls: Sequence[str]) -> None:  # noqa: ARG002 - it keeps nothing for single engines
        """Every engine has the adapter: its values are not kept."""
        self._courier.forget()

    def close(self) -> None:
        """Nothing: the adapters that were written stay, since requests may read them again."""

    def snapshot(self, source: Any) -> Adapter:
        """A copy of the adapter which training does not change."""
        adapter = _adapter(source)
        return replace(adapter, weights=tuple(_frozen(adapter.weights)))


def _adapter(source: Any) -> Adapter:
    if isinstance(source, Adapter):
        return source
    if isinstance(source, nn.Module):
        return adapter_of(source)
    raise ConfigurationError(
        f"lora='adapter' takes a model with PEFT adapters, not a {type(source).__name__}",
        phase="plan",
        remedy="register the PEFT model, or push with lora='merge'",
    )


def _frozen(weights: Sequence[Weight]) -> Iterator[Weight]:
    for weight in weights:
        value = weight.read().clone()
        yield Weight(weight.spec, weight.device, lambda value=value: value)  # type: ignore[misc]
