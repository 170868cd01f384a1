"""The vLLM client: one method an endpoint, each a yes or a typed error."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import requests

from weight_update.engines.answers import AnswerReader, json_of
from weight_update.engines.calls import Body, Calls
from weight_update.engines.http import EngineHttp
from weight_update.errors import EngineRejected, Phase
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket

LOAD_ROUTE = "/v1/load_lora_adapter"
MODELS_ROUTE = "/v1/models"
PAUSE_ROUTE = "/pause"
RESUME_ROUTE = "/resume"
PAUSED_ROUTE = "/is_paused"
WEIGHT_INFO_ROUTE = "/weight_info"
RANKS_ROUTE = "/get_world_size"
FLUSH_ROUTE = "/reset_prefix_cache"
INIT_ROUTE = "/init_weight_transfer_engine"
LEAVE_ROUTE = "/shutdown_weight_transfer_engine"
START_ROUTE = "/start_weight_update"
UPDATE_ROUTE = "/update_weights"
FINISH_ROUTE = "/finish_weight_update"
LABEL_ROUTE = "/update_weight_version"
ENCODER_CACHE_ROUTE = "/reset_encoder_cache"
RPC_ROUTE = "/collective_rpc"

SleepLevel = Literal[1, 2]

# Words of refusals that came before anything was received: the order of calls, or keys.
_UNTOUCHED = ("start_weight_update must be called before", "Invalid update_info")


class VLLMClient:
    """Calls the control routes of one vLLM server.

    Args:
        url: Base URL.
        options: Keys, TLS and proxies.

    Attributes:
        asleep: This client put it to sleep and did not wake it up fully since.
        stranger: What is wrong where something else answers.
        address: Which URL is wanted.
    """

    stranger = "no vLLM server answers here"
    address = (
        "give the server's root URL (without /v1); an SGLang server takes SGLangWeightSyncScheme "
        "or SGLangGeneration"
    )

    def __init__(self, url: str, options: HttpOptions) -> None:
        self.url = url
        self.asleep = False
        self._calls: Calls = EngineHttp(url, options)
        self._answers = AnswerReader(url, options)

    # -- what it is -----------------------------------------------------------------------

    def has(self, route: str, deadline: Deadline) -> bool:
        """Whether a route exists, without running it."""
        response = self._calls.call("OPTIONS", route, phase="connect", deadline=deadline)
        return response.status_code != 404

    def release(self, deadline: Deadline) -> str | None:
        """The release; None when this is no vLLM server."""
        return _text(self._get("/version", "connect", deadline), "version")

    def server_info(self, deadline: Deadline, phase: Phase = "connect") -> dict[str, Any]:
        """Its configuration; empty where it does not say."""
        body = self._get("/server_info?config_format=json", phase, deadline)
        config = body.get("vllm_config")
        return config if isinstance(config, dict) else {}

    def models(self, deadline: Deadline) -> list[dict[str, Any]]:
        """What it serves: the model that it was started with, and adapters."""
        data = self._get(MODELS_ROUTE, "connect", deadline).get("data")
        return [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []

    def ranks(self, deadline: Deadline) -> int | None:
        """Workers of the server."""
        ranks = self._get(f"{RANKS_ROUTE}?include_dp=true", "connect", deadline).get("world_size")
        return ranks if isinstance(ranks, int) else None

    def healthy(self, deadline: Deadline) -> bool:
        """Whether its engine lives, even while an update blocks its workers."""
        response = self._calls.call(
            "GET", "/health", phase="plan", deadline=deadline, control=False
        )
        return response.status_code == 200

    def label(self, deadline: Deadline) -> str | None:
        """The version label; waits while an update blocks the workers."""
        return _text(self._get(WEIGHT_INFO_ROUTE, "plan", deadline), "weight_version")

    def paused(self, deadline: Deadline) -> bool | None:
        """Whether it is paused; waits while an update blocks the workers."""
        paused = self._get(PAUSED_ROUTE, "plan", deadline).get("is_paused")
        return paused if isinstance(paused, bool) else None

    # -- generation -----------------------------------------------------------------------

    def pause(self, mode: str, deadline: Deadline, *, clear_cache: bool) -> None:
        """Pauses generation; requests in flight are aborted or kept.

        With ``clear_cache``, those that are kept are computed anew when they go on.
        """
        clear = str(clear_cache).lower()
        self._post(f"{PAUSE_ROUTE}?mode={mode}&clear_cache={clear}", "pause", deadline)

    def resume(self, deadline: Deadline) -> None:
        """Continues generation; harmless when it was not paused."""
        self._post(RESUME_ROUTE, "continue", deadline)

    def reset_prefix_cache(self, deadline: Deadline, *, running: bool = False) -> bool:
        """Asks for an empty prefix cache; whether it is, whatever the status.

        Args:
            deadline: Bound of the call.
            running: Whether requests that run lose theirs too, and are computed anew.
        """
        query = "?reset_running_requests=true" if running else ""
        answer = json_of(self._post(f"{FLUSH_ROUTE}{query}", "flush", deadline))
        return isinstance(answer, dict) and answer.get("success") is True

    def reset_encoder_cache(self, deadline: Deadline) -> None:
        """Empties the cache of what a vision tower computed."""
        self._post(ENCODER_CACHE_ROUTE, "flush", deadline)

    # -- weights --------------------------------------------------------------------------

    def init_transfer(self, init_info: Mapping[str, Any], deadline: Deadline) -> None:
        """Has all workers join a group; answers when they have."""
        self._post(INIT_ROUTE, "connect", deadline, {"init_info": dict(init_info)})

    def leave_transfer(self, deadline: Deadline) -> None:
        """Has all workers leave their group; none is no error."""
        self._post(LEAVE_ROUTE, "connect", deadline)

    def start_update(self, deadline: Deadline) -> None:
        """Opens an update: the layers wait for their weights, and nothing may be generated."""
        # Releases around 0.23 want to read this; later ones look at no body.
        self._post(START_ROUTE, "begin", deadline, {"is_checkpoint_format": True})

    def update(self, body: bytes, deadline: Deadline) -> None:
        """Announces weights; answers when all workers have received and loaded them.

        Args:
            body: Made by :func:`update_request`.
            deadline: Bound of the call.

        Raises:
            EngineRejected: Its ``applied`` is ``"unknown"`` unless nothing was received.
        """
        try:
            self._post(UPDATE_ROUTE, "transfer", deadline, body)
        except EngineRejected as error:
            schema = error.response is not None and error.response.status_code in (400, 404, 422)
            untouched = schema or any(words in error.message for words in _UNTOUCHED)
            error.applied = "nothing" if untouched else "unknown"
            raise

    def finish_update(self, deadline: Deadline) -> None:
        """Ends an update: what was not brought is as it was."""
        self._post(FINISH_ROUTE, "end", deadline)

    def stamp(self, label: str, deadline: Deadline) -> None:
        """Writes the version label."""
        self._post(LABEL_ROUTE, "stamp", deadline, {"new_version": label})

    def rpc(
        self,
        method: str,
        deadline: Deadline,
        *,
        kwargs: Mapping[str, Any] | None = None,
        phase: Phase = "transfer",
    ) -> list[Any]:
        """Calls a method of every worker, and of its extension; their answers, worker by worker."""
        body = {"method": method, "args": [], "kwargs": dict(kwargs or {})}
        answer = json_of(self._post(RPC_ROUTE, phase, deadline, body))
        results = answer.get("results") if isinstance(answer, dict) else None
        return results if isinstance(results, list) else []

    # -- memory ---------------------------------------------------------------------------

    def sleep(self, level: SleepLevel, deadline: Deadline, *, mode: str = "abort") -> None:
        """Frees memory: 1 keeps the weights in memory of the host, 2 forgets them."""
        self.asleep = True  # before the call leaves
        self._post(f"/sleep?level={level}&mode={mode}", "pause", deadline)

    def wake_up(self, deadline: Deadline, *, tags: Sequence[str] = ()) -> bool:
        """Takes memory back, all of it or what ``tags`` name; whether it is fully awake."""
        query = "?" + "&".join(f"tags={tag}" for tag in tags) if tags else ""
        answer = json_of(self._post(f"/wake_up{query}", "continue", deadline))
        if isinstance(answer, dict):
            awake = answer.get("status") == "awake"
        else:  # 0.27 does not say
            awake = self.sleeping(deadline) is False
        self.asleep = self.asleep and not awake
        return awake

    def sleeping(self, deadline: Deadline) -> bool | None:
        """Whether it sleeps, or is only paused: 0.32.0 answers the same to both."""
        sleeping = self._get("/is_sleeping", "plan", deadline).get("is_sleeping")
        return sleeping if isinstance(sleeping, bool) else None

    # -- adapters -------------------------------------------------------------------------

    def check_key(self, deadline: Deadline) -> None:
        """Raises EngineRejected if routes of adapters, unlike those of weights, want another key.

        They are guarded as all below ``/v1`` are, and this one only looks.
        """
        response = self._calls.call("GET", MODELS_ROUTE, phase="connect", deadline=deadline)
        if response.status_code in (401, 403):
            raise self._answers.rejection(response, phase="connect")

    def load_adapter(self, name: str, path: str, deadline: Deadline) -> None:
        """Loads an adapter from a folder, under a name that is free."""
        body = {"lora_name": name, "lora_path": path}
        self._post(LOAD_ROUTE, "transfer", deadline, body)

    def unload_adapter(self, name: str, deadline: Deadline) -> None:
        """Takes a name away; requests that use the adapter end with it. None is no error."""
        body = {"lora_name": name}
        self._post("/v1/unload_lora_adapter", "transfer", deadline, body, absent=404)

    def close(self) -> None:
        """Closes the connections."""
        self._calls.close()

    def _get(self, route: str, phase: Phase, deadline: Deadline) -> dict[str, Any]:
        response = self._ask(route, phase, deadline)
        body = json_of(response)
        return body if response.status_code == 200 and isinstance(body, dict) else {}

    def _ask(self, route: str, phase: Phase, deadline: Deadline) -> requests.Response:
        return self._calls.call("GET", route, phase=phase, deadline=deadline, control=False)

    def _post(
        self,
        route: str,
        phase: Phase,
        deadline: Deadline,
        body: Body | None = None,
        *,
        absent: int | None = None,
    ) -> requests.Response:
        response = self._calls.call("POST", route, phase=phase, deadline=deadline, body=body or {})
        if response.status_code >= 500:
            # What a worker raises ends the connection after its answer: the next request, sent at
            # once, would meet it as it closes.
            self._calls.close()
        if response.status_code not in (200, absent):
            raise self._answers.rejection(response, phase=phase)
        return response


def lacks_method(error: EngineRejected) -> bool:
    """Whether a call of workers was refused since they, or their extension, have no such method."""
    return "has no attribute" in error.message


def update_request(bucket: Bucket, packing: Mapping[str, Any]) -> bytes:
    """The body of an update request, encoded.

    Args:
        bucket: The weights.
        packing: What a release wants to be told of packing with every request.

    Example:
        >>> update_request(Bucket(()), {"packed": True})
        b'{"update_info": {"names": [], "dtype_names": [], "shapes": [], "packed": true}}'
    """
    info = {
        "names": [spec.name for spec in bucket.specs],
        "dtype_names": [spec.dtype_name for spec in bucket.specs],
        "shapes": [spec.shape for spec in bucket.specs],
        **packing,
    }
    return json.dumps({"update_info": info}).encode()


def _text(body: Mapping[str, Any], key: str) -> str | None:
    value = body.get(key)
    return value if isinstance(value, str) else None
