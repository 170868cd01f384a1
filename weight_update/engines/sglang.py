"""SGLang as an engine: what it can do, and the session that its update requests run in."""

from __future__ import annotations

import time
from itertools import count

from weight_update.engines.sglang_capabilities import (
    PROBED_ROUTES,
    SGLangCapabilities,
    SGLangLayout,
    read_capabilities,
    read_layout,
    running_requests,
)
from weight_update.engines.sglang_client import SGLangClient, update_request
from weight_update.errors import ConfigurationError, EngineRejected, UpdateTimeout
from weight_update.options import HttpOptions, PauseMode
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket

_POLL_SECONDS = 0.02
_FROZEN_POLLS = 10
_FLUSH_BACKOFF = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class SGLangEngine:
    """One SGLang server, release 0.5.6 or later.

    What it can do is asked once, by :meth:`inspect`, and never after a pause.

    Args:
        url: Base URL.
        options: Keys, TLS and proxies.
    """

    flush_skipped = "Skipping the SGLang radix-cache flush"
    # Every SGLang loader skips rotary tables: it computes them itself.
    harmless_name = "model.layers.0.self_attn.rotary_emb.inv_freq"

    def __init__(self, url: str, options: HttpOptions) -> None:
        self.url = url
        self._client = SGLangClient(url, options)
        self._capabilities: SGLangCapabilities | None = None
        self._layout = SGLangLayout(ranks=None, disaggregated=False)

    def inspect(self, deadline: Deadline) -> None:
        """Learns release, routes and layout; the only place where capabilities are decided.

        Raises:
            ConfigurationError: The release or the layout cannot take online updates.
            EngineRejected: The server wants another key.
        """
        info = self._client.server_info(deadline)
        routes = {route: self._client.has(route, deadline) for route in PROBED_ROUTES}
        release = info.get("version")
        self._layout = read_layout(info, url=self.url)
        self._capabilities = read_capabilities(
            release if isinstance(release, str) else "", routes, url=self.url
        )

    @property
    def capabilities(self) -> SGLangCapabilities:
        """What :meth:`inspect` found."""
        if self._capabilities is None:
            raise ConfigurationError("the engine was not inspected yet", engine=self.url)
        return self._capabilities

    @property
    def ranks(self) -> int | None:
        """Ranks that join the group, or None when the server does not say."""
        return self._layout.ranks

    def label(self, deadline: Deadline) -> str | None:
        """The version label that the server shows now; None when it shows none."""
        return self._client.label(deadline)

    def objection(self, mode: PauseMode) -> str | None:
        """Why this server cannot be updated under a pause mode; None when it can."""
        if self._layout.disaggregated and mode != "abort":
            return f"pause_mode={mode!r} is not safe on a disaggregated server; use 'abort'"
        return None

    def join(
        self,
        *,
        address: str,
        port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        deadline: Deadline,
    ) -> None:
        """Has the server's ranks join a group; returns when they have."""
        bracketed = ":" in address and self.capabilities.brackets_ipv6
        body = {
            "master_address": f"[{address}]" if bracketed else address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        self._client.init_group(body, deadline)

    def leave(self, group_name: str, deadline: Deadline) -> None:
        """Has the server drop a group; one that it does not know is no error."""
        self._client.destroy_group(group_name, deadline)

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Pauses generation; requests in flight are aborted, retracted or frozen."""
        self._client.pause(mode, deadline)

    def drain(self, mode: PauseMode, deadline: Deadline) -> None:
        """Waits until no request runs, where waiting tells anything.

        Frozen requests never end, so ``in_place`` waits for nothing. Under ``retract``, a
        release with sessions shows a snapshot that stands still, and command order does the
        rest; older ones are waited for as long as their count moves.

        Raises:
            UpdateTimeout: Requests still run at the deadline.
        """
        route = self.capabilities.loads_route
        if mode == "in_place" or route is None:
            return
        if mode == "abort":
            self._wait_until_idle(route, None, deadline)
        elif self.capabilities.live_loads:
            self._wait_until_idle(route, _FROZEN_POLLS, deadline)

    def resume(self, deadline: Deadline) -> None:
        """Continues generation; harmless when it was not paused."""
        self._client.resume(deadline)

    def can_flush(self, mode: PauseMode) -> bool:
        """Whether the prefix cache can be flushed while paused by ``mode``."""
        return mode == "abort" or (mode == "retract" and self.capabilities.flush_under_retract)

    def flushes_with_update(self, mode: PauseMode) -> bool:
        """Whether the last update request may carry the flush.

        Before sessions, a flush that is refused inside an update ends the whole server.
        """
        return mode == "abort" and self.capabilities.sessions

    def flush(self, deadline: Deadline) -> None:
        """Flushes the prefix cache; a busy engine is asked again with growing pauses.

        Raises:
            UpdateTimeout: Still refused at the deadline; the text has the last answer.
        """
        for attempt in count():
            response = self._client.flush(deadline)
            if response.status_code == 200:
                return
            if response.status_code in (401, 403, 404):
                raise self._client.rejection(response, "flush")
            pause = _FLUSH_BACKOFF[min(attempt, len(_FLUSH_BACKOFF) - 1)]
            if deadline.remaining() <= pause:
                raise UpdateTimeout(
                    f"/flush_cache was refused until the deadline: {self._client.words(response)}",
                    engine=self.url,
                    phase="flush",
                )
            time.sleep(pause)

    def flush_once(self, deadline: Deadline) -> bool:
        """Asks for one flush; whether it was done."""
        return self._client.flush(deadline).status_code == 200

    def stamp(self, label: str, deadline: Deadline) -> None:
        """Writes the version label, without aborting requests."""
        self._client.stamp(label, deadline)

    def session(self) -> SGLangSession:
        """A session for one update."""
        return SGLangSession(self._client, needed=self.capabilities.sessions)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _wait_until_idle(self, route: str, patience: int | None, deadline: Deadline) -> None:
        seen, repeats = None, 0
        while running := running_requests(self._client.loads(route, deadline)):
            repeats = repeats + 1 if running == seen else 0
            seen = running
            if patience is not None and repeats >= patience:
                return
            if deadline.expired():
                raise UpdateTimeout(
                    f"{running} request(s) still run", engine=self.url, phase="drain"
                )
            time.sleep(_POLL_SECONDS)


class SGLangSession:
    """One update of one server: open, apply buckets, close; or recover.

    Args:
        client: The server.
        needed: Whether the release has sessions; without, opening and closing do nothing.
    """

    def __init__(self, client: SGLangClient, *, needed: bool) -> None:
        self._client = client
        self._needed = needed

    def open(self, deadline: Deadline) -> bool:
        """Begins the update; returns whether another one was open.

        A trainer that died leaves its session open, and with it weights that may be partly
        its own: it is closed, and the caller must not take the weights for clean.
        """
        if not self._needed:
            return False
        try:
            self._client.begin(deadline)
            return False
        except EngineRejected as error:
            if "already open" not in error.message:
                raise
        self._client.end(deadline)
        self._client.begin(deadline)
        return True

    def apply(self, bucket: Bucket, *, group_name: str, flush: bool, deadline: Deadline) -> None:
        """Announces a bucket and returns when the server has loaded it.

        Args:
            bucket: What is broadcast meanwhile.
            group_name: The group it is broadcast in.
            flush: Whether the server flushes its cache after loading.
            deadline: Bound of the call.

        Raises:
            EngineRejected: Refused; its ``applied`` says how much was loaded all the same.
        """
        body = update_request(bucket, group_name=group_name, flush=flush)
        self._client.update(body, deadline)

    def close(self, deadline: Deadline) -> None:
        """Ends the update."""
        if self._needed:
            self._client.end(deadline)

    def recover(self, deadline: Deadline) -> None:
        """After a failure: leaves no session open, so that the server may continue."""
        if not self._needed:
            return
        try:
            self._client.end(deadline)
        except EngineRejected as error:
            if "no weight-update session" not in error.message:
                raise
