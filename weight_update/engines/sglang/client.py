"""The SGLang client: one method an endpoint, each a yes or a typed error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import requests

from weight_update.engines.answers import AnswerReader, is_there, json_of, text_of
from weight_update.engines.calls import Body, Calls
from weight_update.engines.http import EngineHttp
from weight_update.engines.sglang.router import WORKER_ROUTES, is_list_of_workers, read_workers
from weight_update.errors import Applied, EngineRejected, EngineUnreachable, Phase
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket

# An answer that comes while a failed update is being given up still tells what the engine
# holds, so an update request outlives its deadline by this much.
_LATE_SECONDS = 1.0
# What a proxy or gateway answers in the server's place.
_NOT_THE_SERVERS_OWN = (502, 503, 504)
# How a server says that it could not even begin to load a checkpoint.
_NOT_BEGUN = (
    "Failed to get weights iterator",
    "Failed to get model loader",
    "Online weight updates are not supported",
)
_WHY_IT_ENDED = (
    "the server ended, as SGLang does with memory that it cannot open or load: it runs in another "
    "container or on another host, its CUDA_VISIBLE_DEVICES hides the trainer's GPU, or a weight "
    "is not what its model takes; see its log, or use transport='broadcast'"
)
# How a server says that it has no such route, method, action or weight.
_CANNOT = (400, 404, 405, 422)


class SGLangClient:
    """Calls the weight-update routes of one SGLang server.

    Args:
        url: Base URL.
        options: Keys, TLS and proxies.
        calls: Calls the routes, where that is not by HTTP.
    """

    def __init__(self, url: str, options: HttpOptions, calls: Calls | None = None) -> None:
        self.url = url
        self._calls = calls or EngineHttp(url, options)
        self._answers = AnswerReader(url, options)

    def has(self, route: str, deadline: Deadline) -> bool | None:
        """Whether a route exists, without running it; None when the answer does not tell."""
        return is_there(self._calls.call("OPTIONS", route, phase="connect", deadline=deadline))

    def server_info(self, deadline: Deadline, phase: Phase = "connect") -> dict[str, Any]:
        """Release, layout and start; empty when the server has no such route.

        The answer holds the server's own keys: it is read here and passed to nobody. It comes
        from the scheduler, and so not while that is stuck.
        """
        return self._info("/server_info", "/get_server_info", phase, deadline)

    def model_info(self, deadline: Deadline, phase: Phase = "plan") -> dict[str, Any]:
        """The model and the version label; empty when the server has no such route."""
        return self._info("/model_info", "/get_model_info", phase, deadline)

    def _info(self, route: str, older: str, phase: Phase, deadline: Deadline) -> dict[str, Any]:
        response = self._get(route, older, phase, deadline)
        body = json_of(response)
        if response.status_code == 404:
            return {}
        if response.status_code != 200 or not isinstance(body, dict):
            raise self._answers.rejection(response, phase=phase)
        return body

    def ready(self, deadline: Deadline) -> bool | None:
        """Whether the server generates; None before 0.5.20, which does not say."""
        status = self._ask("/ready", "plan", deadline).status_code
        return {200: True, 503: False}.get(status)

    def workers(self, deadline: Deadline) -> tuple[str, ...]:
        """URLs of the servers behind this one, if it is a router."""
        for route in WORKER_ROUTES:
            response = self._ask(route, "connect", deadline)
            body = json_of(response)
            if response.status_code == 200 and is_list_of_workers(route, body):
                return read_workers(route, body, url=self.url)
            if response.status_code not in (200, 404, 405):
                raise self._answers.rejection(response, phase="connect")
        return ()

    def checksums(self, deadline: Deadline, phase: Phase) -> Any:
        """Digests of all weights, as JSON; None when the release or its device has none."""
        body = {"action": "checksum"}
        return self._answer("/weights_checker", body, phase, deadline)

    def first_row(self, name: str, deadline: Deadline) -> Any:
        """The first row of a weight, as JSON; None when the server does not show it."""
        body = {"name": name, "truncate_size": 1}
        return self._answer("/get_weights_by_name", body, "verify", deadline)

    def loads(self, route: str, deadline: Deadline) -> Any:
        """The JSON of ``/v1/loads`` or ``/get_load``; None when it is something else."""
        response = self._calls.call("GET", route, phase="drain", deadline=deadline, control=False)
        return json_of(response) if response.status_code == 200 else None

    def init_group(self, body: dict[str, Any], deadline: Deadline) -> None:
        """Joins a weight-update group; answers when all ranks of the server have."""
        self._post("/init_weights_update_group", "connect", deadline, body, flag=True)

    def destroy_group(self, group_name: str, deadline: Deadline) -> None:
        """Drops a group; one that the server does not know is no error."""
        self._call("/destroy_weights_update_group", "connect", deadline, {"group_name": group_name})

    def pause(self, mode: str, deadline: Deadline) -> None:
        """Pauses generation."""
        self._post("/pause_generation", "pause", deadline, {"mode": mode})

    def resume(self, deadline: Deadline) -> None:
        """Continues generation; harmless when it was not paused."""
        self._post("/continue_generation", "continue", deadline, {"torch_empty_cache": True})

    def begin(self, deadline: Deadline, selector: str | None = None) -> None:
        """Opens the session that update requests need from 0.5.21 on.

        Args:
            deadline: Bound of the call.
            selector: Which of the server's models it is for; None for all.
        """
        body = {} if selector is None else {"selector": selector}
        self._post("/begin_weight_update", "begin", deadline, body, flag=True)

    def end(self, deadline: Deadline) -> None:
        """Closes the session; the server post-processes the weights."""
        self._post("/end_weight_update", "end", deadline, {}, flag=True)

    def update(self, body: bytes, deadline: Deadline) -> None:
        """Announces a bucket; answers when it was received and loaded.

        Raises:
            EngineRejected: Refused; its ``applied`` says how much was loaded all the same.
        """
        self._update("/update_weights_from_distributed", body, deadline)

    def open_tensors(self, body: dict[str, Any], deadline: Deadline) -> None:
        """Has every rank open shared memory; answers when it was copied and closed again.

        Raises:
            EngineRejected: Refused; its ``applied`` says how much was loaded all the same.
            EngineUnreachable: The server ended, as it does whatever is wrong with the memory.
        """
        try:
            self._update("/update_weights_from_tensor", body, deadline)
        except EngineUnreachable as error:
            error.remedy = _WHY_IT_ENDED
            raise

    def _update(self, route: str, body: Body, deadline: Deadline) -> None:
        try:
            self._post(route, "transfer", deadline, body, flag=True, late=_LATE_SECONDS)
        except EngineRejected as error:
            error.applied = _applied(error)
            raise

    def load(self, folder: str, deadline: Deadline, *, flush: bool) -> None:
        """Has the server load a checkpoint from a folder; answers when all replicas have.

        Raises:
            EngineRejected: Refused; its ``applied`` says how much was loaded all the same.
        """
        # Left to its default, a server that started without weights would make some up.
        body = {
            "model_path": folder,
            "load_format": "auto",
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        route = "/update_weights_from_disk"
        try:
            self._post(route, "transfer", deadline, body, flag=True, late=_LATE_SECONDS)
        except EngineRejected as error:
            error.applied = loaded(error.response)
            raise

    def flush(self, deadline: Deadline) -> requests.Response:
        """Flushes the prefix cache; 200 is a yes and anything else a no, whatever the text.

        No ``timeout`` is passed on: with one, the server waits for an empty queue, which a
        retracted batch never leaves.
        """
        return self._call("/flush_cache", "flush", deadline, {})

    def release_memory(self, tags: Sequence[str], deadline: Deadline) -> None:
        """Frees memory of an idle server, as far as it has a memory saver; a busy one ends."""
        self._occupy("/release_memory_occupation", "pause", tags, deadline)

    def resume_memory(self, tags: Sequence[str], deadline: Deadline) -> None:
        """Takes memory back; a server that did not free it ends."""
        self._occupy("/resume_memory_occupation", "continue", tags, deadline)

    def _occupy(self, route: str, phase: Phase, tags: Sequence[str], deadline: Deadline) -> None:
        response = self._call(route, phase, deadline, {"tags": list(tags)})
        if response.status_code != 200:  # its body is null
            raise self._answers.rejection(response, phase=phase)

    def stamp(self, label: str, deadline: Deadline) -> None:
        """Writes the version label; left to its default, the server would abort all requests."""
        body = {"new_version": label, "abort_all_requests": False}
        self._post("/update_weight_version", "stamp", deadline, body, flag=True)

    def rejection(self, response: requests.Response, phase: Phase) -> EngineRejected:
        """The error that an answer means."""
        return self._answers.rejection(response, phase=phase)

    def words(self, response: requests.Response) -> str:
        """What an answer says."""
        return self._answers.words(response)

    def close(self) -> None:
        """Closes the connections."""
        self._calls.close()

    def _get(self, route: str, older: str, phase: Phase, deadline: Deadline) -> requests.Response:
        response = self._ask(route, phase, deadline)
        return self._ask(older, phase, deadline) if response.status_code == 404 else response

    def _ask(self, route: str, phase: Phase, deadline: Deadline) -> requests.Response:
        return self._calls.call("GET", route, phase=phase, deadline=deadline, control=False)

    def _answer(self, route: str, body: dict[str, Any], phase: Phase, deadline: Deadline) -> Any:
        """The JSON of an answer to a question by POST; None when the server cannot answer it."""
        response = self._call(route, phase, deadline, body)
        if response.status_code in _CANNOT:
            return None
        if response.status_code != 200:
            raise self._answers.rejection(response, phase=phase)
        return json_of(response)

    def _call(
        self,
        route: str,
        phase: Phase,
        deadline: Deadline,
        body: Body,
        *,
        late: float = 0.0,
    ) -> requests.Response:
        return self._calls.call("POST", route, phase=phase, deadline=deadline, body=body, late=late)

    def _post(
        self,
        route: str,
        phase: Phase,
        deadline: Deadline,
        body: Body,
        *,
        flag: bool = False,
        late: float = 0.0,
    ) -> None:
        """Posts and raises unless the answer is a yes; with ``flag`` it must say so itself."""
        response = self._call(route, phase, deadline, body, late=late)
        if response.status_code != 200 or not _says_yes(response, flag=flag):
            raise self._answers.rejection(response, phase=phase)


def flushed(response: requests.Response) -> bool:
    """Whether an answer to a flush is a yes; its text is free, but for an explicit no."""
    answer = json_of(response)
    refused = isinstance(answer, dict) and answer.get("success") is False
    return response.status_code == 200 and not refused


def _says_yes(response: requests.Response, *, flag: bool) -> bool:
    # The body stays in here: it may repeat a key, and reporters send a traceback's variables.
    answer = json_of(response)
    return isinstance(answer, dict) and answer.get("success", not flag) is True


def update_request(
    bucket: Bucket, *, group_name: str, flush: bool, selector: str | None = None
) -> bytes:
    """The body of an update request, encoded.

    Requests in flight are never aborted, and no version is written: the label moves once,
    after every engine has everything.

    Example:
        >>> json.loads(update_request(Bucket(()), group_name="g", flush=False))["load_format"]
        'flattened_bucket'
    """
    rest: dict[str, Any] = {
        "group_name": group_name,
        "flush_cache": flush,
        "abort_all_requests": False,
        **({} if selector is None else {"selector": selector}),
        **({"load_format": "flattened_bucket"} if bucket.flat else {}),
    }
    return f"{bucket.announcement[:-1]}, {json.dumps(rest)[1:]}".encode()


def _is_anothers(response: requests.Response) -> bool:
    page = text_of(response).lstrip().startswith("<")
    return page or response.status_code in _NOT_THE_SERVERS_OWN


def loaded(response: requests.Response | None) -> Applied:
    """How much of a checkpoint was loaded by a request that was refused.

    Replicas answer in one text. One that failed half-way went back to what it read from the same
    folder, which is not what it served before.
    """
    if response is None or _is_anothers(response):
        return "unknown"
    answer = json_of(response)
    told = isinstance(answer, dict) and answer.get("success") is False
    if not told:
        return "nothing" if 400 <= response.status_code < 500 else "unknown"
    kinds = {_kind_of(text) for text in str(answer.get("message", "")).split(" | ")}
    return kinds.pop() if len(kinds) == 1 else "partly"


def _kind_of(text: str) -> Applied:
    if text.startswith(_NOT_BEGUN):
        return "nothing"
    if text.startswith(("Succeeded to update", "Weights were updated")):
        return "all"
    return "partly" if "Rolling back" in text else "unknown"


def _applied(error: EngineRejected) -> Applied:
    """How much a refused update request had loaded, from the server's own words."""
    response = error.response
    text = error.message if response is None else text_of(response)
    if "Weights were updated" in text:
        return "all"
    # Ranks answer in one text: one may have loaded what another refused.
    if "partially updated" in text or "Succeeded to update" in text:
        return "partly"
    if response is not None and _is_anothers(response):
        return "unknown"
    if response is not None and response.status_code == 200:
        body = json_of(response)
        return "nothing" if isinstance(body, dict) and body.get("success") is False else "unknown"
    return "nothing"
