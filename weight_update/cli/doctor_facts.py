"""What a diagnosis rests on: servers, the address for the rendezvous, the checkpoint."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from weight_update.engines.probing import ServerFacts
from weight_update.engines.recognition import EngineName, probe
from weight_update.errors import ConfigurationError, WeightUpdateError
from weight_update.options import Backend, PauseMode, Transport, UpdateOptions, parse_device
from weight_update.transports.address import check_address, choose_address, listen
from weight_update.update.ways import nccl_settings
from weight_update.waiting import Deadline, spawn
from weight_update.weights.checkpoint import Checkpoint, read_config
from weight_update.weights.saved_state_dict import SavedStateDict, open_weights
from weight_update.weights.specs import TensorSpec

T = TypeVar("T")

# Past a server's own time, so that it is the probe that ends, and says why.
_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class AddressFacts:
    """Where the servers would be told to come.

    Attributes:
        address: The address; empty when there is none.
        port: The port that was asked for.
        error: Why it cannot be used.
        servers: The address of each server, by URL; a name that does not resolve is left out.
    """

    address: str = ""
    port: int | None = None
    error: str = ""
    servers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelFacts:
    """A checkpoint as far as its headers and its configuration tell.

    Attributes:
        path: Its folder, or its file.
        specs: Its weights, by name; None when it cannot be read.
        config: Its ``config.json``.
        error: Why it cannot be read.
        remedy: What to do about it.
        trims: Whether rows beyond a server's vocabulary are cut off on the way.
        casts: Whether floating weights are cast to a server's dtype on the way.
    """

    path: str
    specs: Mapping[str, TensorSpec] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    remedy: str = ""
    trims: bool = False
    casts: bool = False

    @classmethod
    def of(cls, checkpoint: Checkpoint | SavedStateDict) -> ModelFacts:
        """What a checkpoint that could be read tells."""
        specs = {spec.name: spec for spec in checkpoint.specs}
        return cls(str(path_of(checkpoint)), specs, checkpoint.config())

    @classmethod
    def at(cls, path: Path) -> ModelFacts:
        """What a folder or a file tells, be it only why it cannot be read."""
        try:
            return cls.of(open_weights(path))
        except WeightUpdateError as error:
            config = read_config(path)
            return cls(str(path), config=config, error=error.message, remedy=error.remedy)


def path_of(checkpoint: Checkpoint | SavedStateDict) -> Path:
    """Where a checkpoint is."""
    return checkpoint.path if isinstance(checkpoint, SavedStateDict) else checkpoint.directory


@dataclass(frozen=True)
class Facts:
    """Everything that was found.

    Attributes:
        servers: In the order they were named.
        address: The rendezvous.
        model: The checkpoint, if one was named.
        served: By URL, the folder that the server says it loaded, where this host sees it too.
        pause_mode: How an update would pause.
        has_keys: Whether we send keys.
        nccl: What this process tells NCCL.
        transport: How the bytes would travel.
        backend: What a broadcast would go by.
    """

    servers: tuple[ServerFacts, ...]
    address: AddressFacts = AddressFacts()
    model: ModelFacts | None = None
    served: Mapping[str, ModelFacts] = field(default_factory=dict)
    pause_mode: PauseMode = "retract"
    has_keys: bool = False
    nccl: Mapping[str, str] = field(default_factory=dict)
    transport: Transport = "auto"
    backend: Backend = "gloo"


def check_facts(
    urls: Sequence[str],
    options: UpdateOptions,
    model: ModelFacts | None = None,
    engine: EngineName = "auto",
) -> Facts:
    """Asks all servers at once; changes nothing on any of them.

    Args:
        urls: The servers.
        options: How an update would be done; ``timeout`` is the time for each server.
        model: The checkpoint to compare with, if any.
        engine: What the servers are, for those who know.
    """
    vectors = None if model is None or model.specs is None else vectors_of(model.specs)
    answers = ask_all(
        urls,
        lambda url: _ask(url, options, vectors, engine),
        lambda url: (_silent(url), None),
        options.timeout,
    )
    servers = tuple(server for server, _ in answers)
    return Facts(
        servers=servers,
        address=_rendezvous({server.url: at for server, at in answers if at}, options),
        model=model,
        served=served_models(servers) if model else {},
        pause_mode=options.effective_pause_mode(),
        has_keys=bool(options.http.api_key or options.http.admin_api_key),
        nccl=nccl_settings(os.environ),
        transport=options.transport,
        backend=_backend(options),
    )


def ask_all(
    urls: Sequence[str], ask: Callable[[str], T], otherwise: Callable[[str], T], seconds: float
) -> list[T]:
    """Asks all servers at once.

    Args:
        urls: The servers.
        ask: Asks one; look-ups of names have no time limit of their own, so it may hang.
        otherwise: What stands for an answer that did not come in time.
        seconds: Time that ``ask`` takes by itself at most.
    """
    patience = Deadline(seconds + _GRACE_SECONDS)
    calls = {url: spawn(ask, url) for url in urls}
    return [_settled(call, patience, otherwise(url)) for url, call in calls.items()]


def _backend(options: UpdateOptions) -> Backend:
    if options.backend != "auto":
        return options.backend
    device = parse_device(options.device)
    return "nccl" if device is not None and device.type == "cuda" else "gloo"


def _ask(
    url: str, options: UpdateOptions, vectors: Sequence[str] | None, engine: EngineName
) -> tuple[ServerFacts, str | None]:
    """What a server says, and its address; a look-up of a name has no time limit of its own."""
    deadline = Deadline(options.timeout)
    address = _resolved(url)
    seconds = deadline.remaining()
    return probe(url, options.http, seconds, engine=engine, vectors=vectors), address


def _silent(url: str) -> ServerFacts:
    return ServerFacts(
        url, unreachable="no answer in time", advice="check the name and the network"
    )


def _settled(call: Future[T], patience: Deadline, otherwise: T) -> T:
    try:
        return call.result(patience.remaining())
    except TimeoutError:
        return otherwise


def _rendezvous(servers: Mapping[str, str], options: UpdateOptions) -> AddressFacts:
    address, port = options.master_address, options.master_port
    late = AddressFacts(address or "", port, "its name is not looked up in time", servers)
    call = spawn(address_facts, servers, address, port)
    return _settled(call, Deadline(_GRACE_SECONDS), late)


def vectors_of(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Names of short one-dimensional weights, norms first."""
    flat = [spec.name for spec in specs.values() if len(spec.shape) == 1 and spec.nbytes < 1 << 20]
    return sorted(flat, key=lambda name: "norm" not in name)[:8]


def address_facts(
    servers: Mapping[str, str], address: str | None, port: int | None
) -> AddressFacts:
    """Chooses the address as an update would, and listens on it for a moment.

    Args:
        servers: The address of each server whose name resolves, by URL.
        address: The address that was asked for, if one was.
        port: The port likewise.
    """
    if not (address or servers):
        return AddressFacts("", port)  # each server is told to be out of reach
    try:
        chosen = check_address(address) if address else choose_address(_numeric(servers))
        listen(chosen, port).close()
    except ConfigurationError as error:
        return AddressFacts(address or "", port, error.message, servers)
    return AddressFacts(chosen, port, servers=servers)


def _numeric(servers: Mapping[str, str]) -> list[str]:
    """URLs that need no look-up.

    Example:
        >>> _numeric({"http://a:1": "10.0.0.5", "http://b": "fd00::5"})
        ['http://10.0.0.5:1', 'http://[fd00::5]:80']
    """
    hosts = {url: f"[{at}]" if ":" in at else at for url, at in servers.items()}
    return [f"http://{host}:{urlsplit(url).port or 80}" for url, host in hosts.items()]


def _resolved(url: str) -> str | None:
    try:
        found = socket.getaddrinfo(urlsplit(url).hostname, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return str(found[0][4][0])


def served_models(servers: Sequence[ServerFacts]) -> dict[str, ModelFacts]:
    """The folders that servers loaded from, where a folder of that name is here too."""
    paths = {server.url: server.model.get("model_path") for server in servers}
    here = {url: Path(path) for url, path in paths.items() if isinstance(path, str)}
    found = {url: ModelFacts.at(path) for url, path in here.items() if path.is_dir()}
    return {url: model for url, model in found.items() if model.specs or model.config}
