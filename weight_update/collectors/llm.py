"""Driving TorchRL's ``LLMCollector``, whose constructor takes no ``weight_sync_schemes``."""

from __future__ import annotations

from typing import Any

from torchrl import logger as torchrl_logger
from torchrl.collectors.llm import LLMCollector, RayLLMCollector

from weight_update.collectors.collector_scheme import CollectorScheme
from weight_update.collectors.torchrl_adapter import drive, schemes_of
from weight_update.errors import ConfigurationError


def attach(scheme: CollectorScheme, collector: LLMCollector) -> None:
    """Has ``collector.update_policy_weights_()`` push to the scheme's engines.

    1. The group is made now; nothing is sent.
    2. Each ``update_policy_weights_()`` sends what it is given, or else the model of
       ``scheme.register_model()``, and moves the collector's version by one once every engine
       has it; a failed one raises and leaves the version.
    3. ``collector.shutdown()`` or ``scheme.shutdown()`` gives the group up; the scheme may be
       attached to another collector then.

    Without it TorchRL's ``LLMCollector.update_policy_weights_()`` counts an update although no
    engine was sent anything.

    Args:
        scheme: One that drives no other collector.
        collector: An ``LLMCollector`` of this process.

    Raises:
        ConfigurationError: It is another kind of collector, or one of both is in use already.
        WeightUpdateError: The engines cannot be reached; attaching again is the way on.
    """
    _check_kind(collector)
    _check_unused(scheme, collector)
    if not scheme.initialized_on_sender:
        scheme.init_on_sender(model_id="policy", context=collector)
    scheme.connect()
    drive(collector, scheme)
    _warn_of_other_numbers(scheme, collector)


def _check_kind(collector: Any) -> None:
    if isinstance(collector, RayLLMCollector):
        raise ConfigurationError(
            "a RayLLMCollector's updates run in its actor, where the training model is not",
            remedy="use scheme.create_sender() and sender.register_collector(collector)",
        )
    if not isinstance(collector, LLMCollector):
        raise ConfigurationError(
            f"a {type(collector).__name__} is no LLMCollector",
            remedy='pass weight_sync_schemes={"policy": scheme} to its constructor',
        )


def _check_unused(scheme: CollectorScheme, collector: LLMCollector) -> None:
    if schemes_of(collector) or collector.weight_updater is not None:
        raise ConfigurationError(
            "the collector's updates go through a scheme or a weight updater already: each "
            "would be counted twice",
            remedy="attach once, and pass no weight_updater",
        )
    elsewhere = scheme.initialized_on_sender and scheme.context is not collector
    if elsewhere or scheme.synchronized_on_sender:
        raise ConfigurationError(
            "the scheme drives another collector already",
            remedy="make a scheme for each, or let one sender count for all: "
            "scheme.create_sender().register_collector(collector)",
        )


def _warn_of_other_numbers(scheme: CollectorScheme, collector: LLMCollector) -> None:
    """A collector may have counted updates that no engine got, before it was attached."""
    counted, sent = collector.policy_version, scheme.sender_transports[0].version
    if isinstance(counted, int) and counted != sent:
        torchrl_logger.warning(
            f"the collector counts from {counted}, the engines' labels from {sent}: updates before "
            'attach() reached no engine of this scheme; ("weight_versions", "first") has the labels'
        )
