"""The SGLang scheme: configuration of an update, and what TorchRL's collectors drive."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from weight_update.collectors.torchrl_adapter import register_backend
from weight_update.delivery.arguments import read_options
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
    TrainerRanks,
    Transport,
    Verify,
    WhenBusy,
)
from weight_update.schemes.server_scheme import ServerScheme
from weight_update.schemes.transport import SGLangCollectiveTransport


@register_backend("sglang")
class SGLangWeightSyncScheme(ServerScheme):
    """How weights get from a trainer into SGLang servers (release 0.5.6 or later).

    Args:
        server_url: URL of a server, or a sequence of several that are updated together.
        master_address: Address of this host that the servers reach. None chooses the one
            that routes to them (or ``WEIGHT_UPDATE_MASTER_ADDRESS``).
        master_port: Port of the rendezvous; None takes a free one when it is bound.
        num_gpus: Ranks of all servers together (tensor parallel sizes summed up). None asks
            the servers; a number is checked against them before any socket opens.
        strategy: ``"tensordict"`` or ``"state_dict"``; both send the same flat, dotted names
            of parameters and persistent buffers, LoRA merged.
        device: Device of the transfer, as an index, a string or a torch device; None follows
            the model. CUDA uses NCCL, everything else is staged on the CPU and uses gloo.
        flush_cache_on_update: Whether the prefix (radix) cache is flushed. None flushes
            wherever the release can; True needs ``pause_mode="abort"``. The variable
            ``TORCHRL_SGLANG_WEIGHT_SYNC_FLUSH_CACHE`` overrides it when set.
        pause_mode: ``"retract"`` (requests in flight are recomputed and continue on the new
            weights), ``"in_place"`` (they continue on their old KV cache) or ``"abort"``
            (they end early). None reads ``TORCHRL_SGLANG_PAUSE_GENERATION_MODE``, else
            ``"retract"``. With ``lora="adapter"`` the default is ``"abort"``, and others are
            refused.
        backend: ``"auto"`` (by device, and gloo with a warning where NCCL cannot connect the two
            ends), ``"nccl"`` or ``"gloo"``; sent to the servers.
        bucket_bytes: A bucket is closed before it exceeds this; None means 64 MiB on the CPU and
            on CUDA 2 GiB, less where memory is short (or ``WEIGHT_UPDATE_BUCKET_BYTES``). Two
            buffers of the largest packed bucket stay allocated on the trainer between updates.
        load_format: ``"flattened_bucket"`` (one buffer a bucket), ``"tensors"`` (one
            broadcast a tensor), or ``"auto"``: over NCCL what costs less, which the report
            explains, and over gloo buckets for small tensors, which cost less copied.
        transport: ``"broadcast"`` (NCCL or gloo), ``"ipc"`` (memory that a server on the same GPU,
            or on the same host's CPU, opens), ``"disk"`` (safetensors that servers read), or
            ``"auto"``: a broadcast wherever the servers can take one; the report says why.
        directory: Where ``"disk"`` writes: trainer and servers see it under the same path. None
            takes this host's memory (``/dev/shm``) if all servers run here (or
            ``WEIGHT_UPDATE_DIRECTORY``).
        trainer_ranks: ``"node"`` has all ranks of the trainer on this host join the group, so
            that every network card carries bytes; all of them then call ``update_weights()``.
        dtype: Floating tensors are cast to it on the way: a torch dtype, or ``"engine"`` for the
            one that the servers compute with. None sends them as they are.
        name_map: Names of the checkpoint to names of the servers, after everything else was
            named: a function (None leaves the weight out), or a table of regular expressions
            and replacements, each applied in turn.
        trim_vocabulary: Whether rows of the embedding and the output layer beyond the servers'
            vocabulary (padding of the trainer) are cut off; without it they are refused.
        check_finite: Whether every value is looked at before anything is paused, and NaN or
            infinity refused. It reads all weights once more.
        lora: What is sent of a model with PEFT adapters: ``"merge"`` sends merged weights,
            ``"adapter"`` the adapter alone, to servers that were started with LoRA.
        lora_name: The name under which requests ask for an adapter that was sent by itself.
        timeout: Seconds for a whole connect or update; overrun by 2 s at most.
        api_key: Key of ordinary routes (or ``WEIGHT_UPDATE_API_KEY``).
        admin_api_key: Key of control routes (or ``WEIGHT_UPDATE_ADMIN_API_KEY``); ``api_key``
            when not given.
        tls_verify: Whether certificates are checked.
        ca_file: Certificate authority to check them against.
        use_proxies: Whether HTTP proxies of the environment apply; off, since control calls
            stay inside a cluster.
        on_failure: What becomes of an engine whose weights are mixed: ``"hold"`` keeps it
            paused until a full push heals it, ``"resume"`` lets it generate all the same.
        quorum: ``"all"``, or how many servers must take an update for it to succeed. Those that
            fail are left out, reported, and taken back by a full push once they answer.
        initial_version: The version that a resumed run stands at; the first update is one
            more. It wins over the labels that servers show. None starts after the highest label.
        verify: How a server must prove that it holds what was sent, before it continues:
            ``"checksum"`` (digests of all weights, compared with another server of equal
            layout), ``"sample"`` (some weights are read back), ``"auto"`` (whatever it can
            do; the report says ``unverified`` otherwise) or ``"off"``, which also skips the
            comparison of names before the pause.
        when_busy: Whether an update waits while another one of a server runs, or is refused.
        stale_cache: Whether a server that cannot flush its prefix cache under the pause mode is
            updated with a warning, or refused before anything is paused.

    Raises:
        ConfigurationError: An argument or variable cannot work, or an argument would be passed
            over in silence; it is a ``ValueError`` too.

    Example:
        >>> scheme = SGLangWeightSyncScheme("http://127.0.0.1:30000/", pause_mode="retract")
        >>> scheme.server_url, scheme.strategy_name, scheme.num_gpus
        ('http://127.0.0.1:30000', 'tensordict', None)
        >>> sender = scheme.create_sender()
    """

    kind = "sglang"

    def __init__(
        self,
        server_url: str | Sequence[str],
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
        directory: str | os.PathLike[str] | None = None,
        trainer_ranks: TrainerRanks = "one",
        dtype: DTypeLike = None,
        name_map: NameMap | None = None,
        trim_vocabulary: bool = False,
        check_finite: bool = False,
        lora: Lora = "merge",
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
    ) -> None:
        super().__init__(server_url, strategy, read_options(locals()))

    def create_transport(self, **ignored: Any) -> SGLangCollectiveTransport:
        """A transport with the scheme's settings, as rank 0."""
        return SGLangCollectiveTransport(self.server_url, options=self.options)
