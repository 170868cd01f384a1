"""SGLang servers, or Ray actors that hold engines, as a synchronizer's generation side."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, Unpack, cast

from weight_update.delivery.ranks import Ranks
from weight_update.delivery.sglang import SGLangDeployment
from weight_update.engines.sglang.actor import SCHEME, ActorCalls, is_actor, name_of, url_of
from weight_update.engines.sglang.engine import SGLangEngine
from weight_update.engines.sglang.session import SGLangSession
from weight_update.errors import ConfigurationError, UpdateTimeout
from weight_update.options import (
    PauseMode,
    Transport,
    UpdateOptions,
    check_choice,
    parse_server_urls,
)
from weight_update.synchronizers.facades.served import (
    Part,
    ServedGeneration,
    ServerOptions,
    options_of,
)
from weight_update.synchronizers.quantization import check_scheme
from weight_update.waiting import Deadline

_log = logging.getLogger("weight_update")

KvPolicy = Literal["flush", "keep", "auto"]

# What SGLang calls the memory of each part.
_TAGS: dict[Part, tuple[str, ...]] = {
    "weights": ("weights",),
    "kv_cache": ("kv_cache", "cuda_graph"),
}

_LOST = "its weights went with the memory that it freed"


class SGLangGeneration(ServedGeneration["SGLangServed"]):
    """SGLang servers that generate with a policy's weights.

    Args:
        engines: URL of a server, or a sequence of several; Ray actors that hold engines, or that
            started servers, may stand in place of URLs.
        pause_generation_mode: What becomes of requests in flight: ``"retract"``, ``"abort"`` or
            ``"in_place"``; None reads ``TORCHRL_SGLANG_PAUSE_GENERATION_MODE``, else
            ``"retract"``.
        kv_policy: What becomes of prefixes that older weights left in a cache. ``"flush"``: every
            server drops them, and one that cannot do it under the pause mode is refused before
            anything is paused. ``"auto"``: they are dropped wherever a server can, else there is a
            warning. ``"keep"``: they stay, for those who keep requests clear of them.
        needs_offload: Whether the servers free their memory in :meth:`finish_generation` and take
            it back in :meth:`prepare_for_generation`. It takes ``--enable-memory-saver``.
        quantization: How a policy is to quantise weights on the way, if it asks for that.
        engine_gpu_offsets: For each engine, the trainer's rank that shares a GPU with its first;
            the others of a colocated engine follow in order. None: engines fill the trainer's
            GPUs one after the other.
        options: As :class:`~weight_update.SGLangWeightSyncScheme` takes them.

    Attributes:
        backends: What the factory calls them.
        kv_policy: As given.
        rollout_engine_lock: For policies that keep each other away from the engines.

    Raises:
        ConfigurationError: An argument cannot work; it is a ``ValueError`` too.

    Example:
        >>> generation = SGLangGeneration(["http://a:30000", "http://b:30000"], timeout=60.0)
        >>> generation.urls, generation.pause_generation_mode
        (('http://a:30000', 'http://b:30000'), 'retract')
        >>> SGLangGeneration("http://a:30000", pause_generation_mode="in_place")
        Traceback (most recent call last):
        weight_update.errors.ConfigurationError: no server can drop its prefixes while ...
    """

    backends = ("sglang",)

    def __init__(
        self,
        engines: Any,
        *,
        pause_generation_mode: PauseMode | None = None,
        kv_policy: KvPolicy = "flush",
        needs_offload: bool = False,
        quantization: Mapping[str, Any] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        **options: Unpack[ServerOptions],
    ) -> None:
        check_choice("kv_policy", kv_policy, KvPolicy)
        if pause_generation_mode is not None:
            check_choice("pause_generation_mode", pause_generation_mode, PauseMode)
        given = options_of(
            {"directory": None, **options},
            pause_mode=pause_generation_mode,
            flush_cache_on_update=False if kv_policy == "keep" else None,
            stale_cache="refuse" if kv_policy == "flush" else "warn",
        )
        _refuse_stale(kv_policy, given)
        self.kv_policy = kv_policy
        self.rollout_engine_lock = threading.Lock()
        self._quantization = _checked_quantization(quantization)
        self._engines = _by_name(engines, given)
        self._offsets = _offsets_of(self._engines, engine_gpu_offsets)
        self._met: dict[str, str | None] = {}
        self._seen: dict[str, str | None] = {}
        super().__init__(
            tuple(self._engines),
            given,
            lambda name: SGLangServed(self._open(name), self._doubt),
            needs_offload=needs_offload,
        )

    @property
    def sglang_cfg(self) -> Mapping[str, Any]:
        """The part of a generation's configuration that synchronizers and policies look at."""
        return {
            "sglang_cfg": {"quantization": dict(self._quantization)},
            "sglang_server_config": {"needs_offload": self.needs_offload},
        }

    @property
    def cfg(self) -> Mapping[str, Any]:
        """The same."""
        return self.sglang_cfg

    def _transport(self, *, colocated: bool) -> Transport:
        given = self.options.transport
        if given != "auto" and colocated != (given == "ipc"):
            whose = "open the trainer's memory" if colocated else "are told to have devices apart"
            raise ConfigurationError(
                f"transport={given!r} does not go with colocated={colocated}: the engines {whose}",
                remedy=f"leave transport='auto', or say colocated={not colocated}",
            )
        return "ipc" if colocated else given

    def _deployment(self, options: UpdateOptions, ranks: Ranks) -> SGLangDeployment:
        actors = {name: e for name, e in self._engines.items() if name.startswith(SCHEME)}
        return SGLangDeployment(options, ranks, actors=actors, offsets=self._offsets)

    def _doubt(self, name: str, why: str) -> None:
        if self._delivery is not None:
            self._delivery.doubt(name, why)

    def _open(self, name: str) -> SGLangEngine:
        http = self.options.http
        calls = ActorCalls(self._engines[name]) if name.startswith(SCHEME) else None
        return SGLangEngine(name, http, calls)

    # -- for policies that talk to the engines themselves ---------------------------------

    def get_updatable_engines_and_lock(
        self,
    ) -> tuple[list[Any], threading.Lock, int, list[int], list[int]]:
        """The engines as given, the lock, how many are new, and GPUs and first GPU of each.

        New is who was not there, or started anew, since
        :meth:`clear_updatable_num_new_engines`: it has to be joined.
        """
        seen = self._on_all(lambda o, d: o.engine.look(d))
        self._seen = {name: start for name, (start, _) in zip(self.urls, seen, strict=True)}
        counts = [ranks for _, ranks in seen]
        new = sum(name not in self._met or self._met[name] != s for name, s in self._seen.items())
        offsets = list(self._offsets.values()) or [0, *accumulate(counts)][:-1]
        return list(self._engines.values()), self.rollout_engine_lock, new, counts, offsets

    def clear_updatable_num_new_engines(self) -> None:
        """Counts none of those as new that were there at the last look."""
        self._met = dict(self._seen)

    def pause_generation(self, mode: PauseMode | None = None) -> None:
        """Pauses all servers.

        Args:
            mode: What becomes of requests in flight; None takes ``pause_generation_mode``.
        """
        wanted = self.pause_generation_mode if mode is None else mode
        check_choice("mode", wanted, PauseMode)
        self._on_all(lambda o, d: o.engine.pause(wanted, d))

    def continue_generation(self) -> None:
        """Lets all servers generate again; harmless when they do."""
        self._on_all(lambda o, d: o.engine.resume_generation(d))

    def begin_weight_update(self) -> None:
        """Opens the update that requests need from 0.5.21 on; one that is open is closed first."""
        self._on_all(lambda o, d: o.engine.begin(d))

    def end_weight_update(self) -> None:
        """Closes the update."""
        self._on_all(lambda o, d: o.engine.end(d))


class SGLangServed:
    """One engine, as the facade speaks to it outside of our own updates.

    Args:
        engine: The engine.
        doubt: Told by URL, and why, when it has lost its weights.
    """

    def __init__(self, engine: SGLangEngine, doubt: Callable[[str, str], None]) -> None:
        self.url = engine.url
        self._engine, self._doubt = engine, doubt
        self._inspected = False
        self._maybe_paused = False
        self._session: SGLangSession | None = None

    def start_of(self, deadline: Deadline) -> str | None:
        """Something that every start of the server makes anew; None when it shows none."""
        return self._engine.observe(deadline, readiness=False).instance

    def look(self, deadline: Deadline) -> tuple[str | None, int]:
        """Which start of the server this is, and how many ranks it has."""
        self._engine.inspect(deadline)
        self._inspected = True
        return self.start_of(deadline), self._engine.ranks or 1

    def await_idle(self, deadline: Deadline) -> None:
        """Waits until the server itself says that it has nothing to do.

        It ends itself if memory is released before. What it flushes goes with the memory.
        """
        try:
            self._engine.flush(deadline)
        except UpdateTimeout as error:
            error.remedy = "finish or abort its requests before its memory is freed"
            raise

    def release(self, parts: Sequence[Part], deadline: Deadline) -> None:
        """Frees parts of its memory; without a memory saver that frees nothing."""
        self._engine.inspect(deadline)
        if not self._engine.saves_memory:
            _log.warning(
                "%s has no memory saver, so it keeps its memory: start it with "
                "--enable-memory-saver, or leave needs_offload=False",
                self.url,
            )
        tags = [tag for part in parts for tag in _TAGS[part]]
        self._engine.release_memory(tags, deadline)

    def resume(self, part: Part, deadline: Deadline) -> None:
        """Takes a part back; a server that forgot its weights is paused.

        An update of the whole model lets it go on. Should that fail, it does not generate with
        weights that are none.
        """
        if part == "weights" and self._engine.forgets_weights:
            self.pause("retract", deadline)
            self._doubt(self.url, _LOST)
        self._engine.resume_memory(_TAGS[part], deadline)

    def flush(self, deadline: Deadline) -> None:
        """Drops the prefix cache, asking again while the server is busy."""
        self._engine.flush(deadline)

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Pauses the server, and waits for requests where that is meaningful."""
        self._meet(deadline)
        again, self._maybe_paused = self._maybe_paused, True
        self._engine.pause(mode, deadline, again=again)
        self._engine.drain(mode, deadline)

    def resume_generation(self, deadline: Deadline) -> None:
        """Lets it generate again."""
        self._engine.resume(deadline)
        self._maybe_paused = False

    def begin(self, deadline: Deadline) -> None:
        """Opens an update."""
        self._meet(deadline)
        self._session = cast("SGLangSession", self._engine.session("broadcast"))
        self._session.open(deadline)

    def end(self, deadline: Deadline) -> None:
        """Closes the update that :meth:`begin` opened; without one, nothing."""
        session, self._session = self._session, None
        if session is not None:
            session.close(deadline)

    def close(self) -> None:
        """Closes connections."""
        self._engine.close()

    def _meet(self, deadline: Deadline) -> None:
        if not self._inspected:
            self.look(deadline)


def _by_name(engines: Any, options: UpdateOptions) -> dict[str, Any]:
    """Engines by URL, or by name where they have none.

    Raises:
        ConfigurationError: One is neither a URL nor an actor, or is given twice.
    """
    if not isinstance(engines, (str, Sequence)) and not is_actor(engines):
        raise ConfigurationError(f"engines={engines!r} must be a URL, an actor, or several of them")
    given = [engines] if isinstance(engines, str) or is_actor(engines) else list(engines)
    names = [_name_of(engine, options) for engine in given]
    urls = [name for name in names if not name.startswith(SCHEME)]
    if urls or not given:
        parse_server_urls(urls)  # raises if one is there twice, however it is spelled
    return dict(zip(names, given, strict=True))


def _checked_quantization(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(given, (Mapping, type(None))):
        raise ConfigurationError(f"quantization={given!r} must be a mapping with a 'scheme'")
    settings = {"scheme": "bf16", **(given or {})}
    check_scheme(settings["scheme"])
    return settings


def _offsets_of(engines: Mapping[str, Any], offsets: Sequence[int] | None) -> dict[str, int]:
    """The offsets by engine; empty where they follow from the engines' sizes.

    Raises:
        ConfigurationError: There is not one for each, or one is no rank.
    """
    if offsets is None:
        return {}
    if len(offsets) != len(engines) or any(not isinstance(n, int) or n < 0 for n in offsets):
        raise ConfigurationError(
            f"engine_gpu_offsets={list(offsets)} must be a rank for each of {len(engines)} engines"
        )
    return dict(zip(engines, offsets, strict=True))


def _name_of(engine: Any, options: UpdateOptions) -> str:
    if isinstance(engine, str):
        return parse_server_urls(engine)[0]
    if is_actor(engine):
        url = url_of(engine, options.timeout)
        return name_of(engine) if url is None else parse_server_urls(url)[0]
    raise ConfigurationError(
        f"an engine is a URL or a Ray actor, and not a {type(engine).__name__}",
        remedy="pass 'http://host:port', or the handle of an actor that holds an engine",
    )


def _refuse_stale(kv_policy: KvPolicy, options: UpdateOptions) -> None:
    mode = options.effective_pause_mode()
    if kv_policy == "flush" and mode == "in_place":
        raise ConfigurationError(
            "no server can drop its prefixes while requests stand still, so pause_generation_mode="
            "'in_place' would leave entries of older weights in use",
            remedy="use 'retract' or 'abort', or say kv_policy='keep' and salt requests",
        )
