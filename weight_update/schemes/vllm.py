"""The vLLM scheme: whole models through vLLM's weight transfer, or one LoRA adapter by itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from weight_update.collectors.torchrl_adapter import register_backend
from weight_update.delivery.adapter_push import AdapterPush
from weight_update.delivery.arguments import read_options
from weight_update.delivery.deployment import OpenDeployment
from weight_update.delivery.vllm import VLLMDeployment
from weight_update.errors import ConfigurationError
from weight_update.options import (
    Backend,
    DeviceLike,
    DTypeLike,
    LoadFormat,
    Lora,
    NameMap,
    OnFailure,
    PauseMode,
    Quorum,
    StaleCache,
    Strategy,
    Transport,
    Verify,
    WhenBusy,
    check_choice,
    check_positive,
    parse_server_urls,
)
from weight_update.schemes.sender import SGLangWeightSender
from weight_update.schemes.server_scheme import ServerScheme
from weight_update.schemes.transport import SGLangCollectiveTransport

VLLMWeightSender = SGLangWeightSender
"""There is one sender, whatever the servers."""


@register_backend("vllm")
class VLLMWeightSyncScheme(ServerScheme):
    """How weights get from a trainer into vLLM servers (0.23 or later; shown on 0.32.0).

    Whole models take vLLM's own weight transfer. Servers are started with
    ``VLLM_SERVER_DEV_MODE=1`` and a backend for it: ``--weight-transfer-config '{"backend":
    "nccl"}'``, or, where there is no GPU, ``"weight_update_gloo"`` with ``--worker-extension-cls
    weight_update.vllm_worker.WorkerExtension``. An adapter by itself (``lora="adapter"``) needs
    neither, but ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=True``. vLLM cannot prove
    what it holds, so reports say ``unverified``.

    Args:
        server_url: URL of a server, or a sequence of several that are updated together. It must be
            given: TorchRL's scheme does without, since it speaks to its engine's Ray actors.
        master_address: Address of this host that the servers reach. None chooses the one
            that routes to them (or ``WEIGHT_UPDATE_MASTER_ADDRESS``).
        master_port: Port of the rendezvous; None takes a free one when it is bound.
        num_gpus: Ranks of all servers together. None asks the servers; a number is checked
            against them before any socket opens.
        strategy: ``"tensordict"`` or ``"state_dict"``; both send the same names.
        device: Device of the transfer; None follows the model. CUDA uses NCCL, everything else is
            staged on the CPU and uses gloo.
        flush_cache_on_update: Whether the prefix cache is emptied. None does it wherever the pause
            mode allows; True needs ``pause_mode="abort"``.
        pause_mode: What becomes of requests in flight. ``"retract"`` freezes them, and they are
            computed anew, on the new weights, when they go on; ``"in_place"`` has them go on from
            the KV cache of the old weights; ``"abort"`` ends them early. None means ``"retract"``.
            An adapter is taken by later requests only: under ``"retract"`` and ``"in_place"``
            those in flight end whole on the one that they began with; None means ``"abort"``.
        backend: ``"auto"`` (by device), ``"nccl"`` or ``"gloo"``; the servers' must be the same.
        bucket_bytes: A bucket is closed before it exceeds this; see
            :class:`~weight_update.SGLangWeightSyncScheme` (or ``WEIGHT_UPDATE_BUCKET_BYTES``).
        load_format: ``"flattened_bucket"`` (one broadcast a bucket), ``"tensors"`` (one a tensor),
            or ``"auto"``, which is the first.
        transport: ``"broadcast"``, or ``"ipc"`` (memory that a server on the same GPU, or on the
            same host's CPU, opens; it needs the worker extension), or ``"auto"``: a broadcast.
        dtype: Floating tensors are cast to it on the way: a torch dtype, or ``"engine"`` for the
            one that the servers compute with. None sends them as they are.
        name_map: Names of the checkpoint to names of the servers: a function, or a table of
            regular expressions and replacements.
        trim_vocabulary: Whether rows beyond the servers' vocabulary are cut off.
        check_finite: Whether NaN and infinity are refused before anything is paused.
        lora: What is sent of a model with PEFT adapters: ``"merge"`` sends merged weights,
            ``"adapter"`` the adapter alone.
        adapter_directory: Where adapters are written for the servers to read: a directory that
            they see under the same path. The last three are kept. Only with ``lora="adapter"``.
        lora_name: The name that requests give as their ``model``, for an adapter by itself.
        timeout: Seconds for a whole update; overrun by 2 s at most.
        api_key: Key of ordinary routes (or ``WEIGHT_UPDATE_API_KEY``).
        admin_api_key: Key of control routes (or ``WEIGHT_UPDATE_ADMIN_API_KEY``); ``api_key``
            when not given.
        tls_verify: Whether certificates are checked.
        ca_file: Certificate authority to check them against.
        use_proxies: Whether HTTP proxies of the environment apply.
        on_failure: What becomes of a server whose weights are mixed, or that lacks its adapter:
            ``"hold"`` keeps it paused until a full push heals it, ``"resume"`` lets it generate
            all the same, if it can: a server whose layers wait for weights is held in any case.
        quorum: ``"all"``, or how many servers must take an update for it to succeed.
        initial_version: The version that a resumed run stands at; None starts after the highest
            label.
        verify: ``"auto"`` and ``"off"`` both work; a proof that is demanded is refused.
        when_busy: Whether an update waits while another one of a server runs, or is refused.
        stale_cache: Whether ``pause_mode="in_place"``, under which no cache can be emptied, is
            warned about, or refused before anything is paused.
        gpus_per_replica: As in TorchRL's scheme, whose ``num_replicas`` times this is ``num_gpus``.
        num_replicas: Likewise; None is the number of servers.

    Raises:
        ConfigurationError: An argument cannot work; it is a ``ValueError`` too.

    Example:
        >>> scheme = VLLMWeightSyncScheme("http://127.0.0.1:8000/", timeout=60.0)
        >>> scheme.server_url, scheme.lora, scheme.num_gpus
        ('http://127.0.0.1:8000', 'merge', None)
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as shared:
        ...     scheme = VLLMWeightSyncScheme(
        ...         "http://127.0.0.1:8000", lora="adapter", adapter_directory=shared
        ...     )
        >>> sender = scheme.create_sender()
    """

    kind = "vllm"

    def __init__(
        self,
        server_url: str | Sequence[str] | None = None,
        master_address: str | None = None,
        master_port: int | None = None,
        num_gpus: int | None = None,
        strategy: Strategy = "tensordict",
        device: DeviceLike = None,
        flush_cache_on_update: bool | None = None,
        pause_mode: PauseMode | None = None,
        *,
        backend: Backend = "auto",
        bucket_bytes: int | None = None,
        load_format: LoadFormat = "auto",
        transport: Transport = "auto",
        dtype: DTypeLike = None,
        name_map: NameMap | None = None,
        trim_vocabulary: bool = False,
        check_finite: bool = False,
        lora: Lora = "merge",
        adapter_directory: str | os.PathLike[str] | None = None,
        lora_name: str = "policy",
        timeout: float = 300.0,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        tls_verify: bool = True,
        ca_file: str | None = None,
        use_proxies: bool = False,
        on_failure: OnFailure = "hold",
        quorum: Quorum = "all",
        initial_version: int | None = None,
        verify: Verify = "auto",
        when_busy: WhenBusy = "wait",
        stale_cache: StaleCache = "warn",
        gpus_per_replica: int | None = None,
        num_replicas: int | None = None,
    ) -> None:
        servers = _servers(server_url)
        check_choice("lora", lora, Lora)
        _refuse_disk(transport)
        self.adapter_directory = _adapter_directory(adapter_directory, lora)
        self.gpus_per_replica, self.num_replicas = gpus_per_replica, num_replicas
        num_gpus = _ranks_of(num_gpus, gpus_per_replica, num_replicas, len(servers))
        super().__init__(
            server_url or (), strategy, read_options({**locals(), "reads_variables": False})
        )

    def create_transport(self, **ignored: Any) -> SGLangCollectiveTransport:
        """A transport with the scheme's settings, as rank 0."""
        return SGLangCollectiveTransport(
            self.server_url, options=self.options, open_deployment=self._open_deployment()
        )

    def _open_deployment(self) -> OpenDeployment:
        if self.adapter_directory is None:
            return VLLMDeployment
        return partial(AdapterPush.to_vllm, directory=self.adapter_directory)


def _servers(server_url: str | Sequence[str] | None) -> tuple[str, ...]:
    """The servers; who changed the import only is told what is wanted, since TorchRL's has none."""
    if server_url is None:
        raise ConfigurationError(
            "server_url is missing: TorchRL's VLLMWeightSyncScheme calls the Ray actors of a "
            "vllm_engine, and this one updates vLLM servers by their URLs",
            remedy="serve with `vllm serve` (see docs/vllm.md) and pass server_url=['http://host:"
            "8000', ...]; master_address=, strategy= and device= keep their meaning, "
            "master_port=, gpus_per_replica= and num_replicas= may be left out",
        )
    return parse_server_urls(server_url)


def _ranks_of(
    num_gpus: int | None,
    gpus_per_replica: int | None,
    num_replicas: int | None,
    servers: int,
) -> int | None:
    """Ranks of all servers, as they are named here or in TorchRL's way; None asks the servers."""
    check_positive("gpus_per_replica", gpus_per_replica)
    check_positive("num_replicas", num_replicas)
    if num_replicas not in (None, servers):
        raise ConfigurationError(
            f"num_replicas={num_replicas}, and server_url names {servers} server(s)",
            remedy="name the URL of each, and leave num_replicas=None",
        )
    if gpus_per_replica is None:
        return num_gpus
    told = gpus_per_replica * servers
    if num_gpus not in (None, told):
        raise ConfigurationError(
            f"num_gpus={num_gpus}, but gpus_per_replica={gpus_per_replica} on {servers} server(s) "
            f"makes {told}",
            remedy="leave both out to ask the servers",
        )
    return told


def _refuse_disk(transport: Transport) -> None:
    if transport == "disk":
        raise ConfigurationError(
            "transport='disk' does not go with vLLM, which reads no weights from files while it "
            "runs",
            remedy="leave transport='auto', or take 'ipc' where trainer and servers share devices",
        )


def _adapter_directory(directory: str | os.PathLike[str] | None, lora: Lora) -> Path | None:
    """Where adapters are written; None where whole models are sent."""
    if lora == "adapter":
        return _writable(directory)
    if directory is not None:
        raise ConfigurationError(
            f"adapter_directory={str(directory)!r} is for adapters that are sent by themselves, "
            f"and lora={lora!r} merges them",
            remedy="leave it out, or push the adapter by itself: lora='adapter'",
        )
    return None


def _writable(directory: str | os.PathLike[str] | None) -> Path:
    """The absolute path of a directory in which a file can be made."""
    if not directory or not isinstance(directory, (str, os.PathLike)):
        raise ConfigurationError(
            f"adapter_directory={directory!r} must be a directory: vLLM reads adapters from there",
            remedy="name one that trainer and servers see under the same path",
        )
    path = Path(directory).absolute()
    try:
        with TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise ConfigurationError(
            f"adapter_directory='{path}' cannot be written to: {error.strerror}",
            remedy="name an existing directory that trainer and servers see under the same path",
        ) from error
