"""The scheme of a mixed fleet: SGLang and vLLM servers behind one sender."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from weight_update.delivery.mixed import MixedDeployment
from weight_update.delivery.sections import Section, fleet_options
from weight_update.errors import ConfigurationError
from weight_update.schemes.server_scheme import ServerScheme
from weight_update.schemes.transport import SGLangCollectiveTransport


class FleetWeightSyncScheme(ServerScheme):
    """How weights get from a trainer into SGLang and vLLM servers at once: one update, one version.

    Each kind of server is described by its own scheme. Addresses, ports, keys, TLS, ``num_gpus``,
    ``pause_mode`` and ``flush_cache_on_update`` stay with their scheme; all else is of the whole
    fleet, and the schemes must agree on it (``quorum`` counts all servers). Bytes take a broadcast,
    of merged weights, in a group for each scheme.

    Args:
        schemes: Schemes of servers, each server in one of them.

    Attributes:
        schemes: As given.

    Raises:
        ConfigurationError: The schemes cannot go together; the text says in what.

    Example:
        >>> from weight_update import SGLangWeightSyncScheme, VLLMWeightSyncScheme
        >>> fleet = FleetWeightSyncScheme([
        ...     SGLangWeightSyncScheme(["http://a:30000", "http://b:30000"], timeout=120.0),
        ...     VLLMWeightSyncScheme("http://c:8000", timeout=120.0, pause_mode="abort"),
        ... ])
        >>> fleet.server_url
        ['http://a:30000', 'http://b:30000', 'http://c:8000']
        >>> sender = fleet.create_sender()
    """

    def __init__(self, schemes: Sequence[ServerScheme]) -> None:
        self.schemes = _checked(schemes)
        sections = [Section(s.kind, s.urls, s.options) for s in self.schemes]
        super().__init__(
            [url for section in sections for url in section.urls],
            _common_strategy(self.schemes),
            fleet_options(sections),
        )

    def create_transport(self, **ignored: Any) -> SGLangCollectiveTransport:
        """A transport with the schemes' settings, as rank 0."""
        return SGLangCollectiveTransport(
            self.server_url, options=self.options, open_deployment=MixedDeployment
        )


def _checked(schemes: Any) -> list[ServerScheme]:
    several = isinstance(schemes, Iterable) and not isinstance(schemes, (str, bytes))
    given = list(schemes) if several else [schemes]
    for scheme in given:
        if not isinstance(scheme, ServerScheme) or isinstance(scheme, FleetWeightSyncScheme):
            raise ConfigurationError(
                f"a fleet is made of schemes of servers, not of a {type(scheme).__name__}",
                remedy="pass SGLangWeightSyncScheme(...) and VLLMWeightSyncScheme(...)",
            )
    return given


def _common_strategy(schemes: Sequence[ServerScheme]) -> Any:
    strategies = {scheme.strategy_name for scheme in schemes}
    if len(strategies) > 1:
        raise ConfigurationError(f"strategy is {' and '.join(sorted(strategies))} at once")
    return next(iter(strategies), "tensordict")
