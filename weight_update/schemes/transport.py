"""The transport of TorchRL's face: a delivery under the names that its trainers call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weight_update.delivery.adapter_push import AdapterPush
from weight_update.delivery.arguments import unusual
from weight_update.delivery.delivery import Delivery, default_device
from weight_update.delivery.deployment import Deployment, OpenDeployment
from weight_update.delivery.ranks import Ranks
from weight_update.delivery.sglang import SGLangDeployment
from weight_update.errors import ConfigurationError, WeightUpdateError
from weight_update.options import UpdateOptions, parse_device, parse_server_urls
from weight_update.report import UpdateReport
from weight_update.weights.extract import Metadata


def to_sglang(options: UpdateOptions, ranks: Ranks) -> Deployment:
    """SGLang servers, which get whole weights or an adapter by itself."""
    by_itself = options.lora == "adapter"
    return AdapterPush.to_sglang(options, ranks) if by_itself else SGLangDeployment(options, ranks)


class SGLangCollectiveTransport(Delivery):
    """Broadcasts weights to SGLang servers over a TCP-rendezvous process group.

    The trainer is rank 0 of the group and the servers hold the other ranks. Usually
    :meth:`SGLangWeightSyncScheme.create_transport` makes it.

    Args:
        server_url: URL of the server, or of several that are updated together.
        master_address: Address of this host that the servers reach; None chooses the one
            that routes to them.
        master_port: Port of the rendezvous; None takes a free one when it is bound.
        rank: Must be 0: only the trainer's rank 0 talks to the servers.
        world_size: 1 + the ranks of all servers; None asks them.
        device: Device of the transfer; None follows the model.
        timeout: Seconds for a whole connect or update.
        flush_cache_on_update: See :class:`SGLangWeightSyncScheme`.
        pause_mode: See :class:`SGLangWeightSyncScheme`.
        options: All of the above and more in one, as the scheme passes them.
        open_deployment: Says what is sent to which kind of server.

    Raises:
        ConfigurationError: An argument cannot work.

    Example:
        >>> transport = SGLangCollectiveTransport("http://127.0.0.1:30000", None, None, 0, 2)
        >>> transport.check_connection()
        False
    """

    def __init__(
        self,
        server_url: str | Sequence[str],
        master_address: str | None = None,
        master_port: int | None = None,
        rank: int = 0,
        world_size: int | None = None,
        device: int | str | torch.device | None = None,
        timeout: float = 300.0,
        flush_cache_on_update: bool | None = None,
        pause_mode: Any = None,
        *,
        options: UpdateOptions | None = None,
        open_deployment: OpenDeployment = to_sglang,
    ) -> None:
        urls = parse_server_urls(server_url)
        told = {
            "master_address": master_address,
            "master_port": master_port,
            "num_gpus": _ranks_of(world_size),
            "device": device,
            "timeout": timeout,
            "flush_cache_on_update": flush_cache_on_update,
            "pause_mode": pause_mode,
        }
        super().__init__(urls, _one_of(options, told), open_deployment)
        self._one = isinstance(server_url, str)
        self.rank = rank
        self._model_device: Callable[[], torch.device | None] = default_device

    @property
    def server_url(self) -> str | list[str]:
        """As given, less what was removed and with what was added since."""
        return self._urls[0] if self._one and len(self._urls) == 1 else list(self._urls)

    @property
    def master_address(self) -> str | None:
        """Address of the rendezvous: the one in use, else the one asked for."""
        group = self._updater.group
        return self._options.master_address if group is None else group.address

    @property
    def master_port(self) -> int | None:
        """Port of the rendezvous: the one in use, else the one asked for."""
        group = self._updater.group
        return self._options.master_port if group is None else group.port

    @property
    def world_size(self) -> int | None:
        """1 + the ranks of all servers, or None when they were not asked yet.

        With ``trainer_ranks="node"`` the trainer's ranks in the group count instead of the 1, once
        it was made; on ranks that follow it is never known.
        """
        ranks = self._options.num_gpus
        return self._updater.world_size or (None if ranks is None else 1 + ranks)

    @property
    def device(self) -> int | torch.device:
        """CUDA index of the transfer, or the CPU device; 0 while it follows the model."""
        device = parse_device(self._options.device)
        if device is None:
            return 0
        return device.index if device.type == "cuda" else device

    @property
    def flush_cache_on_update(self) -> bool | None:
        """As given."""
        return self._options.flush_cache_on_update

    @property
    def pause_mode(self) -> str:
        """The effective pause mode, environment included."""
        return self._options.effective_pause_mode()

    def init_all_workers_group(
        self, model_metadata: Metadata | None, *, device: torch.device | None = None
    ) -> None:
        """Makes the group with all servers.

        Args:
            model_metadata: Name to (dtype, shape) that every update must match; None lets
                each update announce the model's own.
            device: Where the weights live, when no device was set.

        Raises:
            RuntimeError: Not rank 0, a server refused (with its words), or somebody did not
                come in time.
        """
        if self.rank != 0:
            raise WeightUpdateError("Only rank 0 can initialise the weight-update group")
        self.refuse_fork()
        self._metadata = None if model_metadata is None else dict(model_metadata)
        self.connect(device)

    def send_weights(self, model_id: Any, weights: Any = None) -> UpdateReport:
        """Checks the weights against the metadata, then runs one update.

        Args:
            model_id: Name of the model. Collectors call ``send_weights(weights)``, which makes
                the group if there is none and needs no metadata.
            weights: A mapping of names to tensors, a TensorDict or a module.

        Raises:
            RuntimeError: Not rank 0, no group, no metadata, or the update failed.
            ValueError: A weight is missing or has another dtype or shape.
        """
        if self.rank != 0:
            raise WeightUpdateError("Weights can be sent only from rank 0")
        if weights is None:
            return self.update(lambda: model_id)
        # A group that a failed update gave up is made anew by the next one.
        if self._updater.group is None and not self.check_connection():
            raise WeightUpdateError("Communication group not initialized")
        if self._metadata is None:
            raise WeightUpdateError("Model metadata not set")
        # Metadata of a whole model is matched in full.
        return self.update(lambda: weights, whole=True)

    # TorchRL's collectors call these around the first update.

    def setup_connection_and_weights_on_sender(self) -> None:
        """Makes the group; sends nothing."""
        self.connect(self._model_device())

    def follow(self, model_device: Callable[[], torch.device | None]) -> None:
        """Says where the weights will live, for a group that is made before any are sent."""
        self._model_device = model_device

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: Any = None,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
    ) -> None:
        """Nothing: the servers own the receivers."""

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
    ) -> None:
        """Nothing: the servers own the receivers."""

    def __reduce__(self) -> Any:
        """Pickles as configuration: sockets and groups stay with the process that made them."""
        settings = (self.server_url, self.rank, self._resumed_options(), self._open_deployment)
        return (_rebuild, settings)


def _rebuild(
    server_url: str | list[str],
    rank: int,
    options: UpdateOptions,
    open_deployment: OpenDeployment,
) -> SGLangCollectiveTransport:
    return SGLangCollectiveTransport(
        server_url, rank=rank, options=options, open_deployment=open_deployment
    )


def _one_of(options: UpdateOptions | None, told: dict[str, Any]) -> UpdateOptions:
    if options is None:
        return UpdateOptions(**told)
    beside = next(iter(unusual(told)), None)
    if beside is not None:
        raise ConfigurationError(
            f"options= holds all settings, and {beside}= is given beside it",
            remedy="leave out one of both",
        )
    return options


def _ranks_of(world_size: Any) -> int | None:
    if world_size is None:
        return None
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 2:
        raise ConfigurationError(f"world_size={world_size!r} must be a whole number above one")
    return world_size - 1
