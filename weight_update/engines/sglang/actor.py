"""SGLang engines that are Ray actors: a route is a method of the same name, its body the arguments.

Frameworks wrap an engine, or a server that they started, in an actor whose methods are named
like the server's routes. What such a method returns is read as the answer that the server would
have given; a method that is not there is a route that is not there.

Nothing here imports Ray before it is given a handle.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import requests

from weight_update.engines.answers import Answer, response_of, text_of
from weight_update.engines.calls import Body
from weight_update.errors import EngineUnreachable, Phase, UpdateTimeout
from weight_update.waiting import Deadline

SCHEME = "ray-actor"

_INFO = ("get_server_info", "server_info")
_MODEL = ("get_model_info", "model_info")
# The first method that an actor has answers.
_METHODS: dict[str, tuple[str, ...]] = {
    "/server_info": _INFO,
    "/get_server_info": _INFO,
    "/model_info": _MODEL,
    "/get_model_info": _MODEL,
    "/v1/loads": ("loads",),
    "/get_load": ("get_load",),
    "/weights_checker": ("weights_checker", "check_weights"),
    **{
        f"/{name}": (name,)
        for name in (
            *("pause_generation", "continue_generation", "flush_cache", "ready"),
            *("begin_weight_update", "end_weight_update", "update_weight_version"),
            *("init_weights_update_group", "destroy_weights_update_group"),
            *("update_weights_from_distributed", "update_weights_from_tensor"),
            *("update_weights_from_disk", "get_weights_by_name"),
            *("release_memory_occupation", "resume_memory_occupation"),
        )
    },
}
# What a method may do without: it means the same by itself.
_MAY_BE_LEFT_OUT = (
    ("abort_all_requests", False),
    ("torch_empty_cache", True),
    ("load_format", None),
    ("mode", "abort"),
)
# As SGLang's own ``Engine`` calls them.
_OTHER_NAMES = {"serialized_named_tensors": "named_tensors", "new_version": "weight_version"}
# How Ray says what of the arguments a method does not take, and what it lacks.
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")
_MISSING = re.compile(r"missing a required argument: '(\w+)'")
_HANDLE = re.compile(r"Actor\((?P<kind>\w*).*?(?P<id>[0-9a-f]{8})[0-9a-f]*\)")
_WORDS = 300


class ActorCalls:
    """Calls methods of one actor, as others call routes of a server.

    Args:
        handle: The actor.
    """

    def __init__(self, handle: Any) -> None:
        self.url = name_of(handle)
        self._handle = handle

    def call(
        self,
        method: str,
        route: str,
        *,
        phase: Phase,
        deadline: Deadline,
        body: Body | None = None,
        control: bool = True,  # noqa: ARG002 - an actor has no keys
        late: float = 0.0,
    ) -> requests.Response:
        """Calls the method of a route, and returns what it answered; see :class:`Calls`.

        Raises:
            EngineUnreachable: The actor is dead.
            UpdateTimeout: No answer before the deadline.
        """
        if deadline.expired():
            raise UpdateTimeout(f"no time left for {route}", engine=self.url, phase=phase)
        found = self._method(route)
        if found is None:
            return self._response(method, route, 404, {"message": f"{self.url} has no {route}"})
        if method == "OPTIONS":
            return self._response(method, route, 204, {})
        arguments: dict[str, Any] = json.loads(body) if isinstance(body, bytes) else body or {}
        try:
            reference = _told(found, arguments)
        except TypeError as error:
            return self._response(method, route, 422, {"message": str(error)})
        status, answer = self._answer(reference, route, phase, deadline, late)
        return self._response(method, route, status, answer)

    def close(self) -> None:
        """Nothing: whoever made the actor ends it."""

    def _method(self, route: str) -> Any:
        names = _METHODS.get(route, ())
        return next((m for name in names if (m := getattr(self._handle, name, None))), None)

    def _answer(
        self, reference: Any, route: str, phase: Phase, deadline: Deadline, late: float
    ) -> tuple[int, Any]:
        import ray
        from ray import exceptions

        try:
            return answer_of(ray.get(reference, timeout=deadline.remaining() + late))
        except exceptions.GetTimeoutError as error:
            text = f"no answer to {route} within {deadline.seconds:.1f} s"
            raise UpdateTimeout(text, engine=self.url, phase=phase) from error
        except exceptions.RayTaskError as error:
            return _answer_of_error(error.cause)
        except exceptions.RayError as error:
            raise EngineUnreachable(
                f"{route} got no answer: {_in_one_line(error)}",
                engine=self.url,
                phase=phase,
                remedy="look why the actor ended, and start it again",
            ) from error

    def _response(self, method: str, route: str, status: int, answer: Any) -> requests.Response:
        data = json.dumps(answer, default=str).encode()
        told = Answer(status, "", [("Content-Type", "application/json")], data)
        return response_of(told, method, f"{self.url}{route}")


def is_actor(engine: Any) -> bool:
    """Whether something is a handle of a Ray actor.

    Example:
        >>> is_actor("http://127.0.0.1:30000")
        False
    """
    actor: Any = sys.modules.get("ray.actor")  # who has no Ray has no handle
    return actor is not None and isinstance(engine, actor.ActorHandle)


def name_of(handle: Any) -> str:
    """What reports and errors call an actor, where they would name a server's URL."""
    found = _HANDLE.search(repr(handle))
    if found is None:
        return f"{SCHEME}://{id(handle):x}"
    return f"{SCHEME}://{found['kind'] or 'actor'}.{found['id']}"


def url_of(handle: Any, seconds: float) -> str | None:
    """Where the server behind an actor listens; None of one that cannot tell.

    Actors that only start a server tell its host and port, and not what it can do: it is asked
    itself.

    Args:
        handle: The actor.
        seconds: How long it is waited for.
    """
    names = ("get_server_host", "get_server_port")
    if any(hasattr(handle, name) for name in _INFO) or not all(hasattr(handle, n) for n in names):
        return None
    import ray

    host, port = ray.get([getattr(handle, name).remote() for name in names], timeout=seconds)
    return f"http://{host}:{port}"


def answer_of(returned: Any) -> tuple[int, Any]:
    """Status and body of the answer that a method's result stands for.

    Example:
        >>> answer_of((False, "a session is already open"))
        (400, {'success': False, 'message': 'a session is already open'})
        >>> answer_of(None)
        (200, {'success': True})
    """
    if hasattr(returned, "status_code"):
        return int(returned.status_code), _json_of(returned)
    if returned is None or isinstance(returned, bool):
        body: Any = {"success": returned is not False}
    elif isinstance(returned, str):
        body = {"success": True, "message": returned}
    elif isinstance(returned, tuple) and returned and isinstance(returned[0], bool):
        body = {"success": returned[0], "message": " ".join(map(str, returned[1:2]))}
    elif not isinstance(returned, (Mapping, list)) and hasattr(returned, "success"):
        body = {"success": returned.success, "message": getattr(returned, "message", "")}
    else:
        body = returned
    refused = isinstance(body, Mapping) and body.get("success") is False
    return (400 if refused else 200), body


def _json_of(response: Any) -> Any:
    try:
        return response.json()
    except ValueError:
        return {"message": text_of(response)}


def _answer_of_error(error: BaseException) -> tuple[int, Any]:
    """An error of the server behind the actor, or the actor's own, which tells less."""
    response = getattr(error, "response", None)
    if response is not None and hasattr(response, "status_code"):
        return answer_of(response)
    return 502, {"message": f"{type(error).__name__}: {_in_one_line(error)}"}


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_WORDS]


def _told(method: Any, arguments: Mapping[str, Any]) -> Any:
    """Calls a method with the arguments that it takes; Ray compares them before anything runs.

    Raises:
        TypeError: It does not take one that matters, or needs another.
    """
    given = dict(arguments)
    while True:
        try:
            return method.remote(**given)
        except TypeError as error:
            name = _misnamed(str(error), given)
            if name is None:
                raise
            _adapt(given, name)


def _misnamed(words: str, given: Mapping[str, Any]) -> str | None:
    """The argument that Ray objects to, or that has another name than the method's."""
    found, missing = _UNEXPECTED.search(words), _MISSING.search(words)
    others = {other: name for name, other in _OTHER_NAMES.items()}
    name = found[1] if found else others.get(missing[1]) if missing else None
    return name if name in given else None


def _adapt(given: dict[str, Any], name: str) -> None:
    """Renames an argument that a method does not know, or leaves it out."""
    value, other = given.pop(name), _OTHER_NAMES.get(name)
    # Tensor by tensor, SGLang's own method takes tensors, and not payloads.
    apart = name == "serialized_named_tensors" and given.get("load_format") is None
    if other is not None and not apart:
        given[other] = value
    elif (name, value) not in _MAY_BE_LEFT_OUT:
        raise TypeError(f"the actor's method takes no {name!r}, and it was to be {value!r:.60}")
