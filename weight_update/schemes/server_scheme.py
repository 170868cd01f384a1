"""What the schemes of all servers share: URLs, options, and the sender they make."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from weight_update.options import Strategy, UpdateOptions, check_choice, parse_server_urls
from weight_update.schemes.sender import SGLangWeightSender
from weight_update.schemes.torchrl_adapter import CollectorScheme, torchrl_logger
from weight_update.schemes.transport import SGLangCollectiveTransport


class ServerScheme(CollectorScheme):
    """A scheme for servers that are reached by URL.

    Args:
        server_url: URL of a server, or a sequence of several that are updated together.
        strategy: ``"tensordict"`` or ``"state_dict"``.
        options: Everything that shapes an update.

    Raises:
        ConfigurationError: The URL or the strategy cannot work.
    """

    def __init__(
        self, server_url: str | Sequence[str], strategy: Strategy, options: UpdateOptions
    ) -> None:
        check_choice("strategy", strategy, Strategy)
        super().__init__(strategy)
        urls = parse_server_urls(server_url)
        self.server_url = urls[0] if isinstance(server_url, str) else list(urls)
        self.strategy_name = self.strategy_str = strategy
        self.options = options

    def __getattr__(self, name: str) -> Any:
        """Every constructor argument but the keys is an attribute of the same name."""
        options = self.__dict__.get("options")
        for holder in (options, getattr(options, "http", None)):
            if name in getattr(holder, "__dataclass_fields__", {}) and "api_key" not in name:
                return getattr(holder, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.server_url!r}, strategy={self.strategy_name!r})"

    @abstractmethod
    def create_transport(self, **ignored: Any) -> SGLangCollectiveTransport:
        """A transport with the scheme's settings, as rank 0."""

    def create_sender(self) -> SGLangWeightSender:
        """A sender for the training side."""
        return SGLangWeightSender(self)

    def create_receiver(self, *args: Any, **kwargs: Any) -> None:
        """None: the servers own the receivers."""
        torchrl_logger.info("the servers own their receivers; there is none to create")
