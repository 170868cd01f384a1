"""The SGLang transport: assembles engines, group and packer into the one updater."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weight_update.engines.sglang.engine import SGLangEngine
from weight_update.errors import ConfigurationError, WeightUpdateError
from weight_update.options import UpdateOptions, parse_device, parse_server_urls
from weight_update.report import EngineOutcome, ProgressHook, UpdateReport
from weight_update.schemes.adapter_push import AdapterPush
from weight_update.schemes.ranks import Ranks
from weight_update.transports.broadcast import BucketPacker
from weight_update.transports.disk import DiskPacker, open_no_group
from weight_update.transports.folders import VersionFolders
from weight_update.transports.process_group import open_group
from weight_update.transports.shared_memory import SharedMemoryWay
from weight_update.update.planning import Payload
from weight_update.update.reader import nobody_else
from weight_update.update.rehearsal import Rehearsal
from weight_update.update.updater import Push, Updater
from weight_update.update.ways import Ends
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Plan
from weight_update.weights.checkpoint import Checkpoint
from weight_update.weights.extract import Metadata, match_metadata
from weight_update.weights.extraction_cache import ExtractionCache
from weight_update.weights.lora.export import Adapter
from weight_update.weights.name_map import renamed
from weight_update.weights.saved_state_dict import SavedStateDict
from weight_update.weights.specs import Weight
from weight_update.weights.stream import Stream

Counted = Callable[[int], Sequence[str]]
OpenAdapterPush = Callable[[UpdateOptions], AdapterPush]


class SGLangCollectiveTransport:
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
        open_adapter_push: Says how an adapter gets to the servers when it travels by itself.

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
        open_adapter_push: OpenAdapterPush = AdapterPush.to_sglang,
    ) -> None:
        self._urls = list(parse_server_urls(server_url))
        self._one = isinstance(server_url, str)
        self.rank = rank
        self._options = options or UpdateOptions(
            master_address=master_address,
            master_port=master_port,
            num_gpus=_ranks_of(world_size),
            device=device,
            timeout=timeout,
            flush_cache_on_update=flush_cache_on_update,
            pause_mode=pause_mode,
        )
        self._metadata: Metadata | None = None
        self._extraction = ExtractionCache()
        self._model_device: Callable[[], torch.device | None] = _default_device
        self._ranks = Ranks(self._options.trainer_ranks)
        self._process = os.getpid()
        by_itself = self._options.lora == "adapter"
        self._open_adapter_push = open_adapter_push
        self._adapter = open_adapter_push(self._options) if by_itself else None
        directory = self._options.directory
        self._shared = SharedMemoryWay(self._options.load_format)
        self._folders = VersionFolders(None if directory is None else Path(directory))
        self._updater = (
            self._broadcasts() if self._adapter is None else self._adapter.updater(self._urls)
        )

    def _broadcasts(self) -> Updater:
        shared = self._shared
        return Updater(
            self._urls,
            lambda url: SGLangEngine(url, self._options.http),
            {
                "broadcast": self._ranks.ends(
                    Ends(open_group, lambda device: BucketPacker(device, self._options.load_format))
                ),
                "ipc": Ends(
                    lambda urls, _, __, device: shared.open_group(urls, device),
                    shared.open_packer,
                ),
                "disk": Ends(
                    lambda urls, options, *_: open_no_group(urls, options),
                    lambda _: DiskPacker(self._folders),
                ),
            },
            self._options,
        )

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
    def timeout(self) -> float:
        """Seconds for a whole connect or update."""
        return self._options.timeout

    @property
    def flush_cache_on_update(self) -> bool | None:
        """As given."""
        return self._options.flush_cache_on_update

    @property
    def pause_mode(self) -> str:
        """The effective pause mode, environment included."""
        return self._options.effective_pause_mode()

    @property
    def engines(self) -> Mapping[str, EngineOutcome]:
        """What is known of each engine, by URL."""
        return self._updater.engines

    @property
    def version(self) -> int:
        """The last version that was counted; before the first, ``initial_version`` or 0."""
        return self._updater.version

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
        self._refuse_fork()
        self._metadata = None if model_metadata is None else dict(model_metadata)
        self._connect(device)

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

    def update(
        self,
        source: Callable[[], Any],
        counted: Counted | None = None,
        *,
        whole: bool | None = None,
        progress: ProgressHook | None = None,
    ) -> UpdateReport:
        """Runs one update; makes the group first if there is none.

        Args:
            source: Returns what to send; matched with the metadata if there is one.
            counted: Called with the new version before any engine continues.
            whole: Whether it is a whole model, and not some weights only: servers with mixed
                weights are healed by a whole one. None tells by the kind of source.
            progress: Told of each phase and of each confirmed bucket.
        """
        self._refuse_fork()
        counted = counted or _nothing

        def count(version: int) -> Sequence[str]:
            if self._adapter is not None:
                self._adapter.forget()
            self._folders.keep_newest()
            return counted(version)

        def push(
            read: Callable[[], Payload], check_readers: Callable[[], None] = nobody_else
        ) -> UpdateReport:
            return self._updater.update(Push(read, count, progress, check_readers))

        def followed(report: UpdateReport) -> None:
            self._updater.version = report.version
            counted(report.version)

        return self._ranks.update(
            lambda: provided(source()),
            lambda given: self._payload(given, whole),
            push,
            followed,
            Deadline(self.timeout),
            self._urls,
        )

    def snapshot(self, source: Any) -> Any:
        """A copy of the weights, on their device, which training does not change.

        Args:
            source: What an update takes; a checkpoint on disk is returned as it is.

        Raises:
            ConfigurationError: It is read while it is sent.
        """
        if self._adapter is not None:
            return self._adapter.snapshot(source)
        if isinstance(source, (Checkpoint, SavedStateDict)):
            return source
        if isinstance(source, Stream):
            raise ConfigurationError(
                "a stream is read while it is sent, and cannot be copied beforehand",
                phase="plan",
                remedy="pass snapshot=False, and weights that do not change meanwhile",
            )
        return {weight.spec.name: weight.read().clone() for weight in self._extract(source)}

    def recover(
        self,
        source: Callable[[], Any],
        counted: Counted | None = None,
        *,
        progress: ProgressHook | None = None,
    ) -> UpdateReport:
        """Waits for engines that do not answer, for half the time-out, then pushes a whole model.

        Args:
            source: Returns the model or checkpoint to send.
            counted: Called with the new version before any engine continues.
            progress: Told of each phase and of each confirmed bucket.
        """
        self._refuse_fork()
        self._updater.await_return()
        return self.update(source, counted, progress=progress)

    def add_engine(self, url: str) -> None:
        """Adds a server from the next update on."""
        self._refuse_fork()
        (url,) = parse_server_urls(url)
        self._updater.add_engine(url)
        self._urls.append(url)

    def remove_engine(self, url: str) -> None:
        """Takes a server out of the fleet; it drops the group and is asked nothing any more."""
        self._refuse_fork()
        (url,) = parse_server_urls(url)
        self._updater.remove_engine(url)
        self._urls = [known for known in self._urls if known != url]

    def plan(self, source: Any) -> Plan:
        """What an update would send, in which requests; no server is asked.

        Args:
            source: A mapping of names to tensors, a TensorDict, a module or a checkpoint.
        """
        return self._updater.plan(self._extract(source))

    @property
    def harmless_name(self) -> str:
        """The name of a weight that no server keeps."""
        return self._updater.roster.members[0].engine.harmless_name

    def rehearse(self, plan: Plan) -> Rehearsal:
        """Sends a plan of harmless names, in a short pause; no weight and no label changes.

        Raises:
            RuntimeError: No group was made, or a server failed.
        """
        self._refuse_fork()
        return self._updater.rehearse(plan)

    def _payload(self, source: Any, whole: bool | None) -> Payload:
        whole = is_whole(source) if whole is None else whole
        if isinstance(source, Stream):
            return Payload((), whole, source)
        return Payload(self._extract(source), whole)

    def _extract(self, source: Any) -> tuple[Weight, ...]:
        extracting = self._extraction if self._adapter is None else self._adapter
        extracted = extracting.extract(source)
        if self._options.name_map is not None:
            extracted = tuple(renamed(extracted, self._options.name_map))
        if self._metadata is None or self._adapter is not None:  # it tells of merged weights
            return extracted
        return match_metadata(extracted, self._metadata)

    def check_connection(self) -> bool:
        """Whether a group exists, of this rank or of one that it follows."""
        return self._updater.connected or self._ranks.followed

    def flush_cache(self) -> bool:
        """Flushes the prefix cache of every server; False if one did not (the log says why)."""
        self._refuse_fork()
        return self._updater.flush_cache()

    def shutdown(self) -> None:
        """Gives the group up on both ends, and removes what it wrote; never raises.

        After a fork it does nothing: the group is still the parent's.
        """
        if os.getpid() == self._process:
            self._ranks.close()
            self._updater.shutdown()
            self._folders.close()
            self._shared.close()

    def _refuse_fork(self) -> None:
        # A fork shares the parent's sockets but has none of its threads: half an update would
        # leave the parent's engines paused.
        if os.getpid() != self._process:
            raise ConfigurationError(
                f"this transport belongs to process {self._process} and does not survive a fork",
                remedy="create the sender in the process that uses it, or pickle it",
            )

    # TorchRL's collectors call these two around the first update.

    def setup_connection_and_weights_on_sender(self) -> None:
        """Makes the group; sends nothing."""
        self._refuse_fork()
        self._connect(self._model_device())

    def _connect(self, device: torch.device | None) -> None:
        def connect() -> None:
            self._updater.connect(device or _default_device())

        self._ranks.connect(connect, Deadline(self.timeout), self._urls)

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
        resumed = self._options.initial_version is not None  # it counts on by itself, not by labels
        options = replace(self._options, initial_version=self.version) if resumed else self._options
        return (_rebuild, (self.server_url, self.rank, options, self._open_adapter_push))


def provided(source: Any) -> Any:
    """What a source is: a function is asked for it, and an iterator becomes a stream."""
    known = isinstance(source, (nn.Module, type))
    given = source() if callable(source) and not known else source
    return Stream(given) if isinstance(given, Iterator) else given


def is_whole(source: Any) -> bool:
    """Whether a source is a whole model, and not a mapping that may hold some weights only."""
    if isinstance(source, Stream):
        return source.whole
    return isinstance(source, (nn.Module, Checkpoint, SavedStateDict, Adapter))


def _rebuild(
    server_url: str | list[str],
    rank: int,
    options: UpdateOptions,
    open_adapter_push: OpenAdapterPush,
) -> SGLangCollectiveTransport:
    return SGLangCollectiveTransport(
        server_url, rank=rank, options=options, open_adapter_push=open_adapter_push
    )


def _nothing(_: int) -> Sequence[str]:
    return ()


def _ranks_of(world_size: Any) -> int | None:
    if world_size is None:
        return None
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 2:
        raise ConfigurationError(f"world_size={world_size!r} must be a whole number above one")
    return world_size - 1


def _default_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
