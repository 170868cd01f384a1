"""What keeps a vLLM server from taking an update: pure functions over facts."""

from __future__ import annotations

from collections.abc import Iterator

from weight_update.cli.findings import Finding
from weight_update.engines.probing import ServerFacts
from weight_update.engines.vllm.capabilities import (
    DEVELOPMENT_MODE,
    NO_CONTROL,
    PROBED_ROUTES,
    VLLMCapabilities,
    is_too_old,
    read_capabilities,
)
from weight_update.engines.vllm.client import PAUSE_ROUTE, VLLMClient
from weight_update.engines.vllm.engine import wrong_backend
from weight_update.engines.vllm.shared import EXTENSION
from weight_update.errors import ConfigurationError
from weight_update.options import Backend, Transport

_DEVICES = {"nccl": "cuda", "weight_update_gloo": "cpu"}
_UNTRIED = {"pp": "pipeline stages", "dp": "data-parallel replicas"}


def capabilities_of_vllm(server: ServerFacts) -> VLLMCapabilities | None:
    """What its release can do; None when that is not enough, or not known."""
    if not server.routes.get(PAUSE_ROUTE):
        return None
    try:
        return _capabilities(server)
    except ConfigurationError:
        return None


def _capabilities(server: ServerFacts) -> VLLMCapabilities:
    routes = {route: bool(server.routes.get(route)) for route in PROBED_ROUTES}
    return read_capabilities(_release(server), routes, url=server.url)


def vllm_findings(
    server: ServerFacts, *, transport: Transport, backend: Backend
) -> Iterator[Finding]:
    """Everything about one vLLM server but keys, addresses and weights.

    Args:
        server: The server.
        transport: How the bytes would travel.
        backend: What a broadcast would go by.
    """
    stopped = next(_stopped(server), None)
    if stopped is not None:
        yield stopped
        return
    yield from _start_findings(server)
    yield from _way_findings(server, transport, backend)
    yield from _state_findings(server)


def _stopped(server: ServerFacts) -> Iterator[Finding]:
    """What keeps everything else from being found out, or from mattering."""
    release = f"vLLM {_release(server)}"
    if server.dead:
        what = "its engine is gone, and only its HTTP front answers (/health says so)"
        yield _problem(server, what, "restart it, and look at its log")
    elif not _release(server):  # only who names the engine gets as far as this
        yield _problem(server, VLLMClient.stranger, f"{VLLMClient.address}; or --engine auto")
    elif is_too_old(_release(server)):
        what = f"{release} opens and closes no updates"
        yield _problem(server, what, "serve with vLLM 0.23 or later (0.32.0 was run)")
    elif not server.routes.get(PAUSE_ROUTE):
        yield _problem(server, f"{release} {NO_CONTROL}", DEVELOPMENT_MODE)
    elif server.busy:
        what = "its workers do not answer: they may be in another update, or hang"
        yield _problem(server, what, "wait and ask again; if it stays so, restart it")


def _start_findings(server: ServerFacts) -> Iterator[Finding]:
    """Release and start arguments that no update can work with."""
    try:
        can = _capabilities(server)
    except ConfigurationError as error:
        yield _problem(server, error.message, error.remedy)
        return
    objection = can.objection(lora=bool(server.info.get("lora")))
    if objection:
        what, _, remedy = objection.partition("; ")
        yield _problem(server, what, remedy)
    quantization = server.info.get("quantization")
    if quantization:
        what = f"it quantises its weights ({quantization}), and takes no new ones like that"
        yield _problem(server, what, "serve the unquantised model for rollouts")
    if not can.labels:
        what = f"vLLM {can.release} has no version label: it cannot say which weights it serves"
        yield Finding("warning", what, server.url, "serve with vLLM 0.27 or later")


def _way_findings(server: ServerFacts, transport: Transport, backend: Backend) -> Iterator[Finding]:
    """Whether the bytes get to its workers."""
    if transport == "ipc":
        yield from _memory_findings(server)
    else:
        yield from _broadcast_findings(server, "nccl" if backend == "nccl" else "gloo")
    for size, parts in _UNTRIED.items():
        count = server.info.get(f"{size}_size")
        if isinstance(count, int) and count > 1:
            what = f"it runs {count} {parts}, which were not tried with vLLM"
            yield Finding("warning", what, server.url, "compare its output after the first update")


def _broadcast_findings(server: ServerFacts, backend: Backend) -> Iterator[Finding]:
    has = server.info.get("backend")
    wrong = wrong_backend(backend, has)
    if has is None:
        what = "which weight transfer it was started with: /server_info does not say"
        yield Finding("unknown", what, server.url)
    elif wrong is not None:
        device = _DEVICES.get(has)
        other = f", or push with --device {device}" if device else ""
        yield _problem(server, wrong[0], f"{wrong[1]}{other}")
    elif backend == "nccl" and server.info.get("device") == "cpu":
        what = "it computes on a CPU, and its weight transfer is NCCL's, which needs GPUs"
        yield _problem(server, what, (wrong_backend("gloo", has) or ("", ""))[1])


def _memory_findings(server: ServerFacts) -> Iterator[Finding]:
    extension, replicas = server.info.get("extension"), server.info.get("dp_size")
    if extension is None:
        what = "whether its workers can open memory: /server_info does not say"
        yield Finding("unknown", what, server.url)
    elif not extension:
        what = "its workers cannot open memory: it was started without the worker extension"
        yield _problem(
            server,
            what,
            f"start it with --worker-extension-cls {EXTENSION}, and the folder that holds "
            "weight_update on PYTHONPATH",
        )
    elif extension != EXTENSION:
        what = f"whether its worker extension, {extension}, can open memory"
        yield Finding("unknown", what, server.url)
    if isinstance(replicas, int) and replicas > 1:
        what = f"it runs {replicas} data-parallel replicas, not all of which can be told of memory"
        yield _problem(server, what, "use --transport broadcast")


def _state_findings(server: ServerFacts) -> Iterator[Finding]:
    """What runs on it now."""
    paused = "another update may be running, or failed"
    resumes = "a push of a whole checkpoint resumes it"
    if server.ready is False and server.info.get("asleep") and not server.info.get("never_sleeps"):
        what = f"it sleeps, or is only paused (it answers the same to both): {paused}"
        remedy = f"wake it up first if it was put to sleep (POST /wake_up); else {resumes}"
        yield Finding("warning", what, server.url, remedy)
    elif server.ready is False:
        yield Finding("warning", f"it is paused: {paused}", server.url, resumes)
    elif server.ready is None:
        yield Finding("unknown", "whether it is paused: it does not say", server.url)
    yield Finding("unknown", "whether another trainer left an update open on it", server.url)


def _problem(server: ServerFacts, what: str, remedy: str) -> Finding:
    return Finding("problem", what, server.url, remedy)


def _release(server: ServerFacts) -> str:
    return str(server.info.get("version") or "")
