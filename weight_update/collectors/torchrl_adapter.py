"""What TorchRL's collectors need of a scheme, and every torchrl name beyond the public ones.

| name | why it is needed |
|---|---|
| ``_init_on_sender_impl`` | the hook of ``init_on_sender``; the base class has none that works |
| ``_init_on_receiver_impl`` | the same for workers |
| ``_register_worker_sender`` | ``send()`` finds no transport without it |
| ``_sender_transports``, ``_receiver_transport`` | pickled by the base; ours drops them |
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torchrl import logger as torchrl_logger
from torchrl.weight_update import WeightSyncScheme

from weight_update.errors import ConfigurationError
from weight_update.options import Strategy
from weight_update.weights.extract import device_of

__all__ = ["CollectorScheme", "torchrl_logger"]


class CollectorScheme(WeightSyncScheme):  # type: ignore[misc]
    """A scheme that a collector can drive: one transport to the servers, no receivers.

    ``weight_sync_schemes={"policy": scheme}`` works with ``Collector``: its constructor makes
    the group, and ``collector.update_policy_weights_()`` sends the registered training model,
    or the collector's own policy when none was registered.
    """

    _training_model: weakref.ref[nn.Module] | None = None

    def __init__(self, strategy: Strategy) -> None:
        with warnings.catch_warnings():
            # It warns of TorchRL's own extraction, which this scheme does not use.
            warnings.filterwarnings("ignore", message="state_dict strategy is experimental")
            super().__init__(strategy)

    def register_model(self, model: nn.Module) -> None:
        """Names the training model that collectors' updates send; it is held weakly.

        A collector's own policy is usually a client without parameters.
        """
        self._training_model = weakref.ref(model)

    def prepare_weights(
        self, weights: Any, model_id: str, strategy: Any, context: Any = None
    ) -> Any:
        """Explicit weights first, then the registered model, then the collector's policy.

        Raises:
            ConfigurationError: There is nothing to send.
        """
        if weights is not None and not isinstance(weights, str):
            return weights
        model = None if self._training_model is None else self._training_model()
        if model is not None:
            return model
        policy = getattr(context, "policy", None)
        if isinstance(policy, nn.Module) and any(True for _ in policy.parameters()):
            return policy
        raise ConfigurationError(
            f"there are no weights to send: {model_id!r} of the collector has no parameters",
            phase="plan",
            remedy="call scheme.register_model(training_model) before updating",
        )

    def _init_on_sender_impl(
        self,
        model_id: str | None = None,
        context: Any = None,
        ctx: Any = None,
        remote_collectors: Any = None,
        model: nn.Module | None = None,
        **ignored: Any,
    ) -> None:
        if ctx is not None or remote_collectors is not None:
            raise ConfigurationError(
                "collectors with workers of their own are not driven by this scheme yet: their "
                "frames would carry no version",
                remedy="use scheme.create_sender() and register_collector()",
            )
        self.model_id = model_id or "policy"
        if context is not None:
            self.context = context
        if model is not None:
            self.register_model(model)
        transport = self.create_transport()
        transport.follow(self._device)
        self._register_worker_sender(worker_idx=0, transport=transport)

    def _device(self) -> torch.device | None:
        try:
            return device_of(self.prepare_weights(None, "policy", None, self.context))
        except ConfigurationError:
            return None

    def _init_on_receiver_impl(
        self, model_id: str | None = None, context: Any = None, **ignored: Any
    ) -> None:
        self.model_id = model_id or "policy"
        if context is not None:
            self.context = context

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        dropped = ("_sender_transports", "_receiver_transport", "_training_model")
        return {**state, **dict.fromkeys(dropped)}

    def shutdown(self) -> None:
        """Gives the group up and stops; safe to call twice."""
        for transport in (getattr(self, "_sender_transports", None) or {}).values():
            transport.shutdown()
        super().shutdown()
