"""Which servers a command means, sorted by the engine that they turn out to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from weight_update.cli.doctor_facts import ask_all
from weight_update.engines.recognition import EngineName, Recognised, recognise
from weight_update.errors import ConfigurationError
from weight_update.options import HttpOptions

if TYPE_CHECKING:
    from weight_update.schemes.server_scheme import ServerScheme

_NAMES = {"sglang": "SGLang", "vllm": "vLLM"}


@dataclass(frozen=True)
class Servers:
    """The servers of one command.

    Attributes:
        sglang: URLs of SGLang servers, and of routers that update the servers behind them.
        vllm: URLs of vLLM servers.
        words: A line for each that was named: what it is, and what told so.
    """

    sglang: tuple[str, ...]
    vllm: tuple[str, ...]
    words: tuple[str, ...] = ()

    @property
    def urls(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.sglang, *self.vllm)


def find_out(
    urls: Sequence[str], options: HttpOptions, seconds: float, engine: EngineName
) -> Servers:
    """Asks all servers at once what they are.

    Args:
        urls: The servers.
        options: Keys, TLS and proxies.
        seconds: Time for each of them.
        engine: What they are, for those who know; SGLang servers are not asked at all then.
    """
    if engine == "sglang":
        return Servers(tuple(urls), ())
    found = _ask(urls, options, seconds, engine)
    behind = {each.url: _ask(each.workers, options, seconds, engine) for each in found}
    return sort_out(found, behind)


def _ask(
    urls: Sequence[str], options: HttpOptions, seconds: float, engine: EngineName
) -> list[Recognised]:
    def ask(url: str) -> Recognised:
        return recognise(url, options, seconds, engine)

    return ask_all(urls, ask, lambda url: Recognised(url, None, "no answer in time"), seconds)


def sort_out(
    found: Sequence[Recognised], behind: dict[str, list[Recognised]] | None = None
) -> Servers:
    """Sorts servers by engine.

    A router is left to updates of SGLang, which find the servers behind it whenever they change;
    where vLLM servers are behind it, those that it lists now take its place. What does not answer
    is taken for what the others are.

    Example:
        >>> sort_out([Recognised("http://a", "vllm", ""), Recognised("http://b", None, "gone")])
        Servers(sglang=(), vllm=('http://a', 'http://b'), words=('http://a is vLLM', ...))
    """
    spread = [part for each in found for part in _spread(each, (behind or {}).get(each.url, []))]
    known = {"vllm" if each.service == "vllm" else "sglang" for each in spread if _is_known(each)}
    usual: Any = "vllm" if known == {"vllm"} else "sglang"
    sure = [each if _is_known(each) else replace(each, service=usual) for each in spread]
    return Servers(
        sglang=tuple(each.url for each in sure if each.service != "vllm"),
        vllm=tuple(each.url for each in sure if each.service == "vllm"),
        words=tuple(_words(each, usual) for each in spread),
    )


def _is_known(found: Recognised) -> bool:
    return found.service in ("sglang", "vllm", "router")


def _spread(found: Recognised, behind: Sequence[Recognised]) -> list[Recognised]:
    if not any(each.service == "vllm" for each in behind):
        return [found]
    return [replace(each, why=f"{each.why}; {found.url} lists it") for each in behind]


def _words(found: Recognised, usual: str) -> str:
    why = f": {found.why}" if found.why else ""
    if found.service == "router":
        return f"{found.url} is a router{why}"
    if not _is_known(found):
        return f"{found.url} is taken for {_NAMES[usual]}{why}"
    return f"{found.url} is {_NAMES[str(found.service)]}{why}"


def schemes_for(servers: Servers, **arguments: Any) -> tuple[ServerScheme, ...]:
    """A scheme of all servers, which comes first, and where they are mixed one for each engine.

    Raises:
        ConfigurationError: An argument cannot work.
    """
    from weight_update import SGLangWeightSyncScheme, VLLMWeightSyncScheme
    from weight_update.schemes.fleet import FleetWeightSyncScheme

    schemes: list[ServerScheme] = []
    if servers.sglang:
        schemes.append(SGLangWeightSyncScheme(list(servers.sglang), **arguments))
    directory = arguments.pop("directory", None)
    if servers.vllm and directory is not None and not servers.sglang:
        raise ConfigurationError(
            f"--directory {directory} is for servers that read weights from files, which vLLM "
            "does not",
            remedy="leave it out",
        )
    if servers.sglang and arguments.get("master_port") is not None:
        arguments["master_port"] += 1  # each kind comes to a port of its own
    if servers.vllm:
        schemes.append(VLLMWeightSyncScheme(list(servers.vllm), **arguments))
    return tuple(schemes) if len(schemes) == 1 else (FleetWeightSyncScheme(schemes), *schemes)
