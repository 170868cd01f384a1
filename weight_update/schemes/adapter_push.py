"""What differs when a LoRA adapter travels by itself: source, engines, group and packer."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from weight_update.engines.lora import AdapterCourier
from weight_update.engines.sglang_lora import SGLangAdapterEngine
from weight_update.errors import ConfigurationError
from weight_update.options import UpdateOptions
from weight_update.transports.in_request import NoGroup, RequestPacker
from weight_update.update.updater import Updater
from weight_update.weights.lora.export import Adapter, adapter_of
from weight_update.weights.specs import Weight


class AdapterPush:
    """Pushes the active adapter of a model instead of its merged weights.

    Args:
        options: Those of the sender.
    """

    def __init__(self, options: UpdateOptions) -> None:
        self._options = options
        self._courier = AdapterCourier(options.lora_name)

    def updater(self, urls: Sequence[str]) -> Updater:
        """The one updater, whose bytes travel in requests: no group, and all in one bucket."""
        options, courier = self._options, self._courier
        return Updater(
            urls,
            lambda url: SGLangAdapterEngine(url, options.http, courier),
            lambda *_: NoGroup(),
            lambda _: RequestPacker(courier.pack),
            replace(options, backend="gloo", device="cpu", bucket_bytes=sys.maxsize),
        )

    def extract(self, source: Any) -> tuple[Weight, ...]:
        """The adapter's weights; engines are told what kind of adapter comes.

        Raises:
            ConfigurationError: There is no one adapter to send.
        """
        adapter = _adapter(source)
        self._courier.announce(adapter.config)
        return adapter.weights

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
