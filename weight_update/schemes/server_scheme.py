"""What the schemes of all servers share: URLs, options, and the sender they make."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torchrl import logger as torchrl_logger

from weight_update.collectors.collector_scheme import CollectorScheme
from weight_update.collectors.self_counting import counted_by
from weight_update.delivery.sections import EngineKind
from weight_update.errors import ConfigurationError
from weight_update.options import (
    Strategy,
    UpdateOptions,
    check_choice,
    parse_server_urls,
    place_of,
)
from weight_update.report import UpdateReport
from weight_update.schemes.hooks import PostHook
from weight_update.schemes.listeners import Listeners
from weight_update.schemes.sender import SGLangWeightSender
from weight_update.schemes.transport import SGLangCollectiveTransport


class ServerScheme(CollectorScheme):
    """A scheme for servers that are reached by URL.

    Args:
        server_url: URL of a server, or a sequence of several that are updated together.
        strategy: ``"tensordict"`` or ``"state_dict"``.
        options: Everything that shapes an update.

    Attributes:
        kind: What the servers are.
        urls: Where they are.
        listeners: Who hears of its updates.

    Raises:
        ConfigurationError: The URL or the strategy cannot work.
    """

    kind: EngineKind

    def __init__(
        self, server_url: str | Sequence[str], strategy: Strategy, options: UpdateOptions
    ) -> None:
        check_choice("strategy", strategy, Strategy)
        super().__init__(strategy)
        self.urls = parse_server_urls(server_url)
        self.server_url = self.urls[0] if isinstance(server_url, str) else list(self.urls)
        self.strategy_name = self.strategy_str = strategy
        self.options = options
        self.listeners = Listeners()

    def __getattr__(self, name: str) -> Any:
        """Every constructor argument but the keys is an attribute of the same name."""
        options = self.__dict__.get("options")
        for holder in (options, getattr(options, "http", None)):
            if name in getattr(holder, "__dataclass_fields__", {}) and "api_key" not in name:
                return getattr(holder, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.server_url!r}, strategy={self.strategy_name!r})"

    @property
    def world_size(self) -> int:
        """1 + ``num_gpus``.

        Raises:
            ConfigurationError: ``num_gpus`` is None, so only the servers know.
        """
        if self.options.num_gpus is None:
            raise ConfigurationError(
                "num_gpus is None: the world size is known once the servers were asked",
                remedy="read transport.world_size after init_all_workers_group()",
            )
        return 1 + self.options.num_gpus

    def attach(self, collector: Any) -> None:
        """Drives a collector that takes no ``weight_sync_schemes``, as ``LLMCollector``."""
        from weight_update.collectors.llm import attach  # with all that torchrl has for LLMs

        attach(self, collector)

    def warn_of_stranger(self, engine: Any) -> None:
        """Warns of an engine object that is none of the servers: it would serve old weights."""
        url = getattr(engine, "server_url", None)
        ours = isinstance(url, str) and place_of(url) in map(place_of, self.urls)
        if engine is not None and not ours:
            where = f" at {url}" if isinstance(url, str) else ", which has no server_url,"
            torchrl_logger.warning(
                f"the {type(engine).__name__}{where} gets no weights from here: only "
                f"{', '.join(self.urls)} do"
            )

    def register_post_hook(self, hook: PostHook) -> None:
        """Has a function called after each update that succeeded, whoever asked for it.

        Updates that a collector drives are heard, and those of the scheme's senders. Otherwise
        as :meth:`SGLangWeightSender.register_post_hook`. It outlives :meth:`shutdown`, as the
        registered model does, and stays with this process.

        Raises:
            ConfigurationError: It cannot be called so, or makes a collector count, which those
                that drive a scheme do by themselves.
        """
        if counted_by(hook) is not None:
            raise ConfigurationError(
                "a collector that drives a scheme counts by itself, and this hook counts for it",
                remedy="leave it out; of a collector that drives none, "
                "sender.register_collector(collector)",
            )
        self.listeners.hooks.add(hook)

    def register_logger(self, logger: Any) -> None:
        """Has the numbers of every update written, whoever asked for it, of failed ones too.

        As :meth:`SGLangWeightSender.register_logger`, of all updates that
        :meth:`register_post_hook` hears of. A logger that is registered here and with a sender
        writes once.

        Raises:
            ConfigurationError: It has no ``log_scalar``.
        """
        self.listeners.loggers.add(logger)

    def tell(self, push: Callable[[], UpdateReport]) -> None:
        """Runs an update of a collector's, of which hooks and loggers hear."""
        self.listeners.hear(push, self.sender_transports[0].version)

    def shutdown(self) -> None:
        """Gives the group up, and stops counting; safe to call twice.

        The scheme may be given to another collector afterwards. Loggers have a second to write.
        """
        super().shutdown()
        self.listeners.loggers.settle()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "listeners": Listeners()}

    @abstractmethod
    def create_transport(self, **ignored: Any) -> SGLangCollectiveTransport:
        """A transport with the scheme's settings, as rank 0."""

    def create_sender(self) -> SGLangWeightSender:
        """A sender for the training side."""
        return SGLangWeightSender(self)

    def create_receiver(self, *args: Any, **kwargs: Any) -> None:
        """None: the servers own the receivers."""
        torchrl_logger.info("the servers own their receivers; there is none to create")
