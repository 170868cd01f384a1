"""What a diagnosis rests on: servers, the address for the rendezvous, the checkpoint."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from weight_update.engines.sglang_probe import ServerFacts, probe
from weight_update.errors import ConfigurationError, WeightUpdateError
from weight_update.options import HttpOptions
from weight_update.transports.address import check_address, choose_address, listen
from weight_update.waiting import spawn
from weight_update.weights.checkpoint import Checkpoint, read_config
from weight_update.weights.specs import TensorSpec

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
        path: Its folder.
        specs: Its weights, by name; None when it cannot be read.
        config: Its ``config.json``.
        error: Why it cannot be read.
        remedy: What to do about it.
    """

    path: str
    specs: Mapping[str, TensorSpec] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    remedy: str = ""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelFacts:
        """What a checkpoint that could be read tells."""
        specs = {spec.name: spec for spec in checkpoint.specs}
        return cls(str(checkpoint.directory), specs, checkpoint.config())

    @classmethod
    def at(cls, path: Path) -> ModelFacts:
        """What a folder tells, be it only why it cannot be read."""
        try:
            return cls.of(Checkpoint(path))
        except WeightUpdateError as error:
            config = read_config(path)
            return cls(str(path), config=config, error=error.message, remedy=error.remedy)


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
    """

    servers: tuple[ServerFacts, ...]
    address: AddressFacts = AddressFacts()
    model: ModelFacts | None = None
    served: Mapping[str, ModelFacts] = field(default_factory=dict)
    pause_mode: str = "retract"
    has_keys: bool = False


def gather(
    urls: Sequence[str],
    http: HttpOptions,
    *,
    seconds: float,
    pause_mode: str,
    address: tuple[str | None, int | None] = (None, None),
    model: ModelFacts | None = None,
) -> Facts:
    """Asks all servers at once; changes nothing on any of them.

    Args:
        urls: The servers.
        http: Keys, TLS and proxies.
        seconds: Time for each server.
        pause_mode: How an update would pause.
        address: Address and port of the rendezvous, as far as they were chosen.
        model: The checkpoint to compare with, if any.
    """
    vectors = None if model is None or model.specs is None else vectors_of(model.specs)
    calls = [spawn(lambda url=url: probe(url, http, seconds, vectors=vectors)) for url in urls]
    servers = tuple(call.result(seconds + _GRACE_SECONDS) for call in calls)
    return Facts(
        servers=servers,
        address=address_facts(urls, *address),
        model=model,
        served=served_models(servers) if model else {},
        pause_mode=pause_mode,
        has_keys=bool(http.api_key or http.admin_api_key),
    )


def vectors_of(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Names of short one-dimensional weights, norms first."""
    flat = [spec.name for spec in specs.values() if len(spec.shape) == 1 and spec.nbytes < 1 << 20]
    return sorted(flat, key=lambda name: "norm" not in name)[:8]


def address_facts(urls: Sequence[str], address: str | None, port: int | None) -> AddressFacts:
    """Chooses the address as an update would, and listens on it for a moment."""
    servers = {url: found for url in urls if (found := _resolved(url))}
    try:
        chosen = check_address(address) if address else choose_address(urls)
        listen(chosen, port).close()
    except ConfigurationError as error:
        return AddressFacts(address or "", port, error.message, servers)
    return AddressFacts(chosen, port, servers=servers)


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
