"""From what was found to what is wrong with it: pure functions over facts."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args
from urllib.parse import urlsplit

from weight_update.cli.doctor_facts import AddressFacts, Facts
from weight_update.cli.doctor_link import link_findings
from weight_update.cli.doctor_vllm import capabilities_of_vllm, vllm_findings
from weight_update.cli.doctor_weights import model_findings, weight_findings
from weight_update.cli.findings import Finding
from weight_update.engines.probing import KeyState, ServerFacts
from weight_update.engines.sglang.capabilities import (
    SGLangCapabilities,
    SGLangLayout,
    read_capabilities,
    read_layout,
)
from weight_update.errors import ConfigurationError
from weight_update.options import PauseMode

_KEYS = "set WEIGHT_UPDATE_API_KEY, and WEIGHT_UPDATE_ADMIN_API_KEY if the server has an admin key"


@dataclass(frozen=True)
class Diagnosis:
    """What was found, judged.

    Attributes:
        servers: One JSON object a server.
        problems: What keeps an update from working.
    """

    servers: tuple[dict[str, Any], ...]
    problems: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether an update would work, as far as that can be known."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain JSON values."""
        problems = [finding.to_dict() for finding in self.problems]
        return {"ok": self.ok, "servers": list(self.servers), "problems": problems}


def diagnose(facts: Facts) -> Diagnosis:
    """Judges everything that was found."""
    general = [*address_findings(facts.address), *model_findings(facts.model)]
    by_server = {server.url: findings_of(server, facts) for server in facts.servers}
    problems = [*(f for each in by_server.values() for f in each), *general]
    return Diagnosis(
        servers=tuple(describe(server, facts, by_server[server.url]) for server in facts.servers),
        problems=tuple(finding for finding in problems if finding.level == "problem"),
    )


def misfits(facts: Facts) -> list[Finding]:
    """What servers say that keeps the checkpoint from fitting; of those that could be asked."""
    return [
        finding
        for server in facts.servers
        if not any(reach_findings(server)) and server.status == 200
        for finding in _fit_findings(server, facts)
        if finding.level == "problem"
    ]


def _fit_findings(server: ServerFacts, facts: Facts) -> Iterator[Finding]:
    """How the checkpoint fits a server, if there is one that can be read."""
    model = facts.model
    if model is not None and model.specs is not None:
        served = facts.served.get(server.url)
        yield from weight_findings(server, model, served)


def findings_of(server: ServerFacts, facts: Facts) -> list[Finding]:
    """Everything about one server; where it cannot be asked, only why."""
    blocked = list(reach_findings(server))
    if blocked:
        return blocked
    found = [*key_findings(server), *wire_findings(server, has_keys=facts.has_keys)]
    if server.status != 200:
        return found
    if server.service == "vllm":
        found += vllm_findings(server, transport=facts.transport, backend=facts.backend)
    else:
        found += release_findings(server, facts.pause_mode)
        found += state_findings(server)
        found += link_findings(server, facts.nccl)
    found += way_back_findings(server, facts.address)
    found += _fit_findings(server, facts)
    return found


# -- can it be asked? ---------------------------------------------------------------------


def reach_findings(server: ServerFacts) -> Iterator[Finding]:
    """Why nothing more can be found out about a server."""
    if server.unreachable:
        yield Finding("problem", server.unreachable, server.url, server.advice)
    elif server.redirect is not None:
        yield Finding(
            "problem",
            f"it redirects to {server.redirect or 'another place'}, which is not followed: "
            "the keys would go there too",
            server.url,
            "name the server's final URL",
        )
    elif server.service in ("router", "other"):
        yield _other_service(server)
    elif server.status == 404:  # only who names the engine gets as far as this
        yield Finding(
            "problem",
            "no SGLang server answers here: /model_info is missing",
            server.url,
            "give the server's root URL (without /v1), and not another service's; or --engine auto",
        )
    elif server.status not in (200, 401, 403):
        yield Finding(
            "problem",
            f"/model_info answered {server.status}: {server.words}",
            server.url,
            "a gateway may answer in the server's place: ask the server directly"
            if server.status >= 500
            else "look at the server's log",
        )


def _other_service(server: ServerFacts) -> Finding:
    if server.service == "router":
        return Finding(
            "warning",
            f"this is a router ({server.why}): an update goes to each of them, and none was "
            "looked at",
            server.url,
            "name the URL of each server behind it to have it looked at",
        )
    return Finding(
        "problem",
        f"no SGLang server and no vLLM server answers here: {server.why}",
        server.url,
        "give the server's root URL (without /v1), and not another service's",
    )


def key_findings(server: ServerFacts) -> Iterator[Finding]:
    """Keys that lack, that are refused, or that are not allowed to do what an update does."""
    kinds: dict[str, KeyState] = {"ordinary": server.ordinary_key, "control": server.control_key}
    for kind, state in kinds.items():
        if server.status != 200 and kind == "control":
            continue  # it was not asked
        if server.service == "vllm" and kind == "ordinary":
            yield from _served_key_findings(server, state)
        elif state == "missing":
            yield Finding("problem", f"its {kind} routes need a key (401)", server.url, _KEYS)
        elif state == "refused":
            yield Finding("problem", f"its {kind} routes refuse this key (401)", server.url, _KEYS)
        elif state == "forbidden":
            yield Finding(
                "problem",
                f"its {kind} routes forbid this caller whatever the key (403)",
                server.url,
                "a gateway in front of the server may do so: ask the server directly",
            )
        elif state == "unknown":
            yield Finding("unknown", f"whether its {kind} routes take the key", server.url)


def _served_key_findings(server: ServerFacts, state: KeyState) -> Iterator[Finding]:
    """Of vLLM, whose key guards what is under /v1, and no route that changes weights."""
    if state in ("missing", "refused", "forbidden"):
        what = "its /v1 routes do not take this key; an update of whole weights needs none of them"
        yield Finding("warning", what, server.url, _KEYS)


def wire_findings(server: ServerFacts, *, has_keys: bool) -> Iterator[Finding]:
    """Keys that anybody on the way can read."""
    parts = urlsplit(server.url)
    if has_keys and parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
        yield Finding(
            "warning",
            "keys travel over plain HTTP, where anybody on the way can read them",
            server.url,
            "give the server a certificate and write https://",
        )


# -- would it take an update? -------------------------------------------------------------


def capabilities_of(server: ServerFacts) -> SGLangCapabilities | None:
    """What its release can do; None when that is not enough, or not known."""
    if not server.routes:
        return None
    try:
        return read_capabilities(str(server.info.get("version", "")), server.routes, url=server.url)
    except ConfigurationError:
        return None


def release_findings(server: ServerFacts, pause_mode: PauseMode) -> Iterator[Finding]:
    """Release, layout and start arguments that no update can work with."""
    if server.busy:
        yield Finding(
            "problem",
            "its scheduler does not answer: it may sit in another update, or hang",
            server.url,
            "wait and ask again; if it stays so, look at the server's log and restart it",
        )
        return
    release = str(server.info.get("version", ""))
    try:
        read_capabilities(release, server.routes, url=server.url)
    except ConfigurationError as error:
        yield Finding("problem", error.message, server.url, error.remedy)
    yield from layout_findings(server, pause_mode)
    yield from argument_findings(server)


def layout_findings(server: ServerFacts, pause_mode: PauseMode) -> Iterator[Finding]:
    """How its ranks can be reached, and paused."""
    layout = read_layout(server.info)
    if layout.offline is not None:
        yield Finding(
            "warning",
            f"it {layout.offline}: an update goes by disk",
            server.url,
            "set WEIGHT_UPDATE_DIRECTORY to a folder that it sees under the same path, if it is "
            "on another host",
        )
    elif layout.ranks is None:
        yield Finding(
            "unknown", "how many ranks it has: /server_info does not say tp_size", server.url
        )
    objection = layout.objection(pause_mode)
    if objection is not None:
        yield Finding("problem", objection, server.url, "use --pause-mode abort")


def argument_findings(server: ServerFacts) -> Iterator[Finding]:
    """Start arguments that an update runs into."""
    cache = server.info.get("weight_cache_mode")
    if cache not in (None, "off"):
        yield Finding(
            "problem",
            f"its weight cache is on ({cache}), and an update would end the server",
            server.url,
            "start it with --weight-cache-mode off",
        )
    quantization = server.info.get("quantization")
    if quantization:
        yield Finding(
            "warning",
            f"it quantises its weights ({quantization}): whether it can load new ones depends "
            "on the method",
            server.url,
            "try it on a server that serves nobody, and compare its output",
        )


def state_findings(server: ServerFacts) -> Iterator[Finding]:
    """What runs on it now."""
    if server.ready is False:
        yield Finding(
            "warning",
            "it is paused (or still starting): another update may be running, or failed",
            server.url,
            "a push of a whole checkpoint resumes it",
        )
    if server.ready is None and not server.busy:
        yield Finding("unknown", "whether it is paused: this release does not say", server.url)
    capabilities = capabilities_of(server)
    if capabilities is not None and capabilities.sessions:
        yield Finding("unknown", "whether another trainer left an update open on it", server.url)


# -- the rendezvous -----------------------------------------------------------------------


def address_findings(address: AddressFacts) -> Iterator[Finding]:
    """An address that cannot be listened on, or that no server can come to."""
    if address.error:
        remedy = "name an address of this host (--master-address) and a free port, or neither"
        yield Finding("problem", address.error, address.address or "rendezvous", remedy)


def way_back_findings(server: ServerFacts, address: AddressFacts) -> Iterator[Finding]:
    """Whether a server can come to the address it would be told."""
    if address.error or not address.address:
        return
    theirs = address.servers.get(server.url)
    if theirs is not None and not _is_loopback(theirs):
        ours = address.address
        if _is_loopback(ours) or (_is_private(ours) and not _is_private(theirs)):
            kind = "loopback" if _is_loopback(ours) else "private"
            yield Finding(
                "problem",
                f"it would be told to come to {ours}, a {kind} address, and is at {theirs}",
                server.url,
                "name an address of this host that the server reaches: --master-address, or "
                "WEIGHT_UPDATE_MASTER_ADDRESS",
            )
            return
    port = urlsplit(server.url).port
    own = server.info.get("port")
    if _is_loopback(address.address) and isinstance(own, int) and port not in (None, own):
        yield Finding(
            "warning",
            f"it listens on port {own} and is reached through {port}: behind a tunnel or a port "
            f"mapping, {address.address} is not this host to it",
            server.url,
            "name an address of this host that the server reaches: --master-address",
        )
    yield Finding(
        "unknown",
        f"whether it can connect to {address.address}: only an update proves the way back",
        server.url,
    )


def _is_loopback(host: str) -> bool:
    return host == "localhost" or _address(host, "is_loopback")


def _is_private(host: str) -> bool:
    return _address(host, "is_private")


def _address(host: str, attribute: str) -> bool:
    try:
        return bool(getattr(ipaddress.ip_address(host.partition("%")[0]), attribute))
    except ValueError:
        return False


# -- the description ----------------------------------------------------------------------


def describe(server: ServerFacts, facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """A server as one JSON object; None stands for what is not known."""
    ranks, sessions, pause_modes = _abilities(server)
    known = server.service in ("sglang", "vllm")
    asked = not server.unreachable and server.status == 200 and known
    return {
        "url": server.url,
        "reachable": not server.unreachable,
        "service": None if server.unreachable else server.service,
        "found_by": server.why or None,
        "release": server.info.get("version"),
        "version": server.model.get("weight_version"),
        "model": server.model.get("model_path"),
        "dtype": server.info.get("dtype"),
        "device": server.info.get("device"),
        "tp": server.info.get("tp_size"),
        "pp": server.info.get("pp_size"),
        "dp": server.info.get("dp_size"),
        "backend": server.info.get("backend"),
        "ranks": ranks,
        "sessions": sessions if asked else None,
        "pause_modes": pause_modes if asked else [],
        "keys": {"ordinary": server.ordinary_key, "control": server.control_key} if asked else None,
        "paused": None if server.ready is None else not server.ready,
        "running_requests": server.running,
        "rendezvous": facts.address.address or None,
        "warnings": [f.to_dict() for f in findings if f.level == "warning"],
        "unknown": [f.what for f in findings if f.level == "unknown"],
    }


def _abilities(server: ServerFacts) -> tuple[int | None, bool | None, list[str]]:
    """How many ranks join a group, whether updates run in sessions, and under which pauses."""
    if server.service == "vllm":
        can = capabilities_of_vllm(server)
        ranks = server.info.get("ranks")
        return ranks, None if can is None else True, list(get_args(PauseMode)) if can else []
    layout, capabilities = read_layout(server.info), capabilities_of(server)
    modes = _pause_modes(layout, capabilities)
    sessions = None if capabilities is None else capabilities.sessions
    return 0 if layout.offline else layout.ranks, sessions, modes


def _pause_modes(layout: SGLangLayout, capabilities: SGLangCapabilities | None) -> list[str]:
    modes = get_args(PauseMode) if capabilities is not None else ()
    return [mode for mode in modes if layout.objection(mode) is None]
