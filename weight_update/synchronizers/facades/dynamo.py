"""vLLM engines that NVIDIA Dynamo serves, as a synchronizer's generation side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from weight_update.engines.vllm.client import VLLMClient
from weight_update.engines.vllm.dynamo import DynamoClient, DynamoOptions, DynamoRoutes
from weight_update.errors import NotSupported
from weight_update.options import PauseMode, Transport, check_choice, check_positive
from weight_update.synchronizers.facades.served import ServerOptions
from weight_update.synchronizers.facades.vllm import VLLMGeneration


class DynamoGeneration(VLLMGeneration):
    """Workers of a Dynamo deployment, each a vLLM engine behind a system port of its own.

    Weights take vLLM's native transfer: each worker joins the group at an offset, counted in the
    order of the URLs, and opens, receives and closes an update. Which workers there are is fixed:
    Dynamo may start and stop others, and those are not updated. Requests come through Dynamo's
    frontend, which knows nothing of an update.

    What a worker offers was read from Dynamo's documentation and sources, and shown against vLLM's
    own API behind a stand-in; no Dynamo was run. What it does not say of itself is given here.

    Args:
        urls: System URL of each worker (``DYN_SYSTEM_PORT``; the ``system_url`` that
            ``/v1/rl/workers`` lists), and not the frontend's.
        engine_world_size: Ranks of one worker's engine: tensor by pipeline by data parallel.
        vllm_release: The release of vLLM inside, since what it wants to be told differs.
        routes: ``"sidecar"`` (``/engine/control/...`` and ``/engine/update/...``, of vLLM's native
            sidecar), ``"worker"`` (``/engine/...``, of Dynamo's Python worker started with
            ``--enable-rl``), or None, which asks the worker.
        pause_generation_mode: What becomes of requests in flight; see :class:`VLLMGeneration`.
        options: As :class:`~weight_update.VLLMWeightSyncScheme` takes them.

    Raises:
        ConfigurationError: An argument cannot work; it is a ``ValueError`` too.

    Example:
        >>> generation = DynamoGeneration("http://10.0.0.12:8081", engine_world_size=2)
        >>> generation.get_inference_world_size()
        2
    """

    backends = ("dynamo",)

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        engine_world_size: int = 1,
        vllm_release: str = "0.32.0",
        routes: DynamoRoutes | None = None,
        pause_generation_mode: PauseMode = "retract",
        **options: Unpack[ServerOptions],
    ) -> None:
        check_positive("engine_world_size", engine_world_size)
        if routes is not None:
            check_choice("routes", routes, DynamoRoutes)
        self.dynamo = DynamoOptions(engine_world_size, vllm_release, routes)
        super().__init__(urls, pause_generation_mode=pause_generation_mode, **options)

    def get_inference_world_size(self) -> int:
        """How many ranks all workers have together, as given."""
        return len(self.urls) * self.dynamo.engine_world_size

    def _transport(self, *, colocated: bool) -> Transport:
        if colocated:
            raise NotSupported(
                "colocated engines are not there for dynamo, whose routes reach no memory",
                remedy="use colocated=False, or vLLM servers with backend 'vllm'",
            )
        return super()._transport(colocated=False)

    def _make_client(self, url: str) -> VLLMClient:
        return DynamoClient(url, self.options.http, self.dynamo)
