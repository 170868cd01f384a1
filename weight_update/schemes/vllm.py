"""The vLLM scheme: one LoRA adapter, through a directory that trainer and servers see."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from weight_update.delivery.adapter_push import AdapterPush
from weight_update.errors import ConfigurationError
from weight_update.options import (
    HttpOptions,
    Lora,
    OnFailure,
    PauseMode,
    Quorum,
    UpdateOptions,
    Verify,
    WhenBusy,
    check_choice,
)
from weight_update.schemes.sender import SGLangWeightSender
from weight_update.schemes.server_scheme import ServerScheme
from weight_update.schemes.transport import SGLangCollectiveTransport

VLLMWeightSender = SGLangWeightSender
"""There is one sender, whatever the servers."""


class VLLMWeightSyncScheme(ServerScheme):
    """How a LoRA adapter gets from a trainer into vLLM servers (shown on 0.32.0).

    Full updates of vLLM are not there yet: ``lora="adapter"`` is the one that works. Servers are
    started on the base model, with ``--enable-lora``, ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=True``
    and ``VLLM_SERVER_DEV_MODE=1``. vLLM cannot prove what it holds, so reports say
    ``unverified``.

    Args:
        server_url: URL of a server, or a sequence of several that are updated together.
        lora: What is sent; must be ``"adapter"``.
        adapter_directory: Where adapters are written for the servers to read: a directory that
            they see under the same path. The last three are kept.
        lora_name: The name that requests give as their ``model``.
        pause_mode: What becomes of requests in flight: ``"abort"`` ends them early;
            ``"retract"`` and ``"in_place"`` freeze them, and they end whole, on the adapter that
            they began with. None means ``"abort"``.
        timeout: Seconds for a whole update; overrun by 2 s at most.
        api_key: Key of ordinary routes (or ``WEIGHT_UPDATE_API_KEY``).
        admin_api_key: Key of control routes (or ``WEIGHT_UPDATE_ADMIN_API_KEY``); ``api_key``
            when not given.
        tls_verify: Whether certificates are checked.
        ca_file: Certificate authority to check them against.
        use_proxies: Whether HTTP proxies of the environment apply.
        check_finite: Whether NaN and infinity are refused before anything is paused.
        on_failure: What becomes of a server without an adapter: ``"hold"`` keeps it paused until
            a push heals it, ``"resume"`` lets it generate all the same.
        quorum: ``"all"``, or how many servers must take an update for it to succeed.
        initial_version: The version that a resumed run stands at; None starts after the highest
            label.
        verify: ``"auto"`` and ``"off"`` both work; a proof that is demanded is refused.
        when_busy: Whether an update waits while another one of a server runs, or is refused.

    Raises:
        ConfigurationError: An argument cannot work; it is a ``ValueError`` too.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as shared:
        ...     scheme = VLLMWeightSyncScheme(
        ...         "http://127.0.0.1:8000", lora="adapter", adapter_directory=shared
        ...     )
        >>> sender = scheme.create_sender()
    """

    def __init__(
        self,
        server_url: str | Sequence[str],
        *,
        lora: Lora = "merge",
        adapter_directory: str | os.PathLike[str] | None = None,
        lora_name: str = "policy",
        pause_mode: PauseMode | None = None,
        timeout: float = 300.0,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        tls_verify: bool = True,
        ca_file: str | None = None,
        use_proxies: bool = False,
        check_finite: bool = False,
        on_failure: OnFailure = "hold",
        quorum: Quorum = "all",
        initial_version: int | None = None,
        verify: Verify = "auto",
        when_busy: WhenBusy = "wait",
    ) -> None:
        _check_lora(lora)
        self.adapter_directory = _writable(adapter_directory)
        options = UpdateOptions(
            lora=lora,
            lora_name=lora_name,
            # Not left to the options: they would read a variable that is SGLang's.
            pause_mode="abort" if pause_mode is None else pause_mode,
            timeout=timeout,
            check_finite=check_finite,
            on_failure=on_failure,
            quorum=quorum,
            initial_version=initial_version,
            verify=verify,
            when_busy=when_busy,
            http=HttpOptions.read(
                api_key,
                admin_api_key,
                tls_verify=tls_verify,
                ca_file=ca_file,
                use_proxies=use_proxies,
            ),
        )
        super().__init__(server_url, "tensordict", options)

    def create_transport(self, **ignored: Any) -> SGLangCollectiveTransport:
        """A transport with the scheme's settings, as rank 0."""
        return SGLangCollectiveTransport(
            self.server_url,
            options=self.options,
            open_deployment=partial(AdapterPush.to_vllm, directory=self.adapter_directory),
        )


def _check_lora(lora: Lora) -> None:
    check_choice("lora", lora, Lora)
    if lora == "merge":
        raise ConfigurationError(
            "full updates of vLLM, which lora='merge' asks for, are not there yet",
            remedy="push a LoRA adapter by itself: lora='adapter', adapter_directory=...",
        )


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
