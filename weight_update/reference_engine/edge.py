"""The outermost HTTP layer: the request log, authentication, and faults in answers."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weight_update.reference_engine.faults import ACTIVE, Fault, FaultBoard, die, freeze

_LOGGED_BYTES = 64 * 1024
OPEN_PATHS = ("/health", "/ready", "/metrics")


@dataclass(frozen=True)
class Keys:
    """Who may call what.

    Args:
        api_key: Needed by every route but the health ones.
        admin_api_key: If set, the routes in ``admin_paths`` need this key, and only this.
        admin_paths: The control routes.
    """

    api_key: str | None = None
    admin_api_key: str | None = None
    admin_paths: frozenset[str] = frozenset()

    def allows(self, scope: Scope) -> bool:
        """Return whether the caller's bearer token is good enough."""
        if scope["method"] == "OPTIONS" or scope["path"].startswith(OPEN_PATHS):
            return True
        admin = scope["path"] in self.admin_paths and self.admin_api_key
        needed = self.admin_api_key if admin else self.api_key
        return needed is None or hmac.compare_digest(_bearer(scope), needed.encode())


def _bearer(scope: Scope) -> bytes:
    value = bytes(dict(scope["headers"]).get(b"authorization", b""))
    return value[7:] if value.lower().startswith(b"bearer ") else b""


class RequestLog:
    """What was asked, when, and how it was answered; never a header."""

    def __init__(self, path: Path | None = None) -> None:
        self.records: list[dict[str, Any]] = []
        self._file = None if path is None else path.open("a", buffering=1)

    def start(self, method: str, path: str, summary: Any) -> dict[str, Any]:
        """Note that a request came in; ``summary`` is what to keep of its body."""
        record = {
            "id": len(self.records),
            "method": method,
            "path": path,
            "json": summary,
            "status": None,
            "t0": time.time(),
            "t1": None,
        }
        self.records.append(record)
        self._write(record)
        return record

    def end(self, record: dict[str, Any], status: int | None) -> None:
        """Note that it was answered, or that its connection was dropped (status None)."""
        change = {"status": status, "t1": time.time()}
        record.update(change)
        self._write({"id": record["id"]} | change)

    def _write(self, change: dict[str, Any]) -> None:
        """Append what changed of a record; a reader puts the changes of each id together."""
        if self._file is not None:
            self._file.write(json.dumps(change) + "\n")


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _summary(data: Any, size: int) -> Any:
    """Return what to keep of JSON: of a large one, lists are told by their length."""
    if size <= _LOGGED_BYTES or not isinstance(data, dict):
        return data
    return {key: len(item) if isinstance(item, list) else item for key, item in data.items()}


class Edge:
    """Wraps the application.

    Args:
        app: What answers.
        board: Faults that strike before or after it does.
        log: Is told of every request.
        keys: Who may call what.
        delay: Seconds by which every answer leaves later, as over a long line.
    """

    def __init__(
        self, app: ASGIApp, board: FaultBoard, log: RequestLog, keys: Keys, delay: float = 0.0
    ) -> None:
        self._app = app
        self._board = board
        self._log = log
        self._keys = keys
        self._delay = delay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        body = await _read(receive)
        scope["parsed"] = data = _parsed(body)  # once: an update names thousands of tensors
        record = self._log.start(scope["method"], scope["path"], _summary(data, len(body)))
        status: list[int] = []

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])
                if self._delay:
                    await asyncio.sleep(self._delay)
                if (b"content-length", b"0") in message.get("headers", ()):
                    self._log.end(record, status[0])  # the headers are all that the client awaits
            # Noted before the last byte leaves: who has the answer finds it in the log.
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._log.end(record, status[0])
            await send(message)

        answer = _Answer(scope, _replay(body, receive), noted, _transport(send))
        if not self._keys.allows(scope):
            await answer.give(JSONResponse({"error": "Unauthorized"}, 401))
        else:
            # A probe (OPTIONS) runs nothing, so it uses up no fault.
            probe = scope["method"] == "OPTIONS"
            await self._serve(answer, () if probe else self._board.take(scope["path"]))
        if record["t1"] is None:
            self._log.end(record, None)

    async def _serve(self, answer: _Answer, faults: Sequence[Fault]) -> None:
        ACTIVE.set(tuple(fault for fault in faults if fault.inside_update))
        for fault in faults:
            if fault.when == "before_join" and await _EFFECTS[fault.kind](fault, answer):
                return
        late = [fault for fault in faults if fault.when == "before_answer"]
        if not late:
            await self._app(answer.scope, answer.receive, answer.send)
            return
        kept: list[Message] = []
        await self._app(answer.scope, answer.receive, _keeper(kept))
        for fault in late:
            if await _EFFECTS[fault.kind](fault, answer):
                return
        for message in kept:
            await answer.send(message)


@dataclass(frozen=True)
class _Answer:
    scope: Scope
    receive: Receive
    send: Send
    transport: Any

    async def give(self, response: Response) -> bool:
        await response(self.scope, self.receive, self.send)
        return True


def _transport(send: Send) -> Any:
    """The connection below ``send``; ASGI has no way to drop one, uvicorn keeps it here."""
    cycle: Any = send
    return cycle.__self__.transport


def _keeper(kept: list[Message]) -> Send:
    async def keep(message: Message) -> None:
        kept.append(message)

    return keep


async def _read(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body again, then waits for the client to go."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return left.pop() if left else await receive()

    return replay


# Each effect returns whether the call is over.


async def _refuse(fault: Fault, answer: _Answer) -> bool:
    body = {"success": False, "message": fault.message}
    return await answer.give(JSONResponse(body, fault.status))


async def _hang(fault: Fault, answer: _Answer) -> bool:
    await asyncio.Event().wait()
    return True


async def _die(fault: Fault, answer: _Answer) -> bool:
    die()
    return True


async def _stop(fault: Fault, answer: _Answer) -> bool:
    freeze()
    return False


async def _slow(fault: Fault, answer: _Answer) -> bool:
    await asyncio.sleep(fault.seconds)
    return False


async def _close(fault: Fault, answer: _Answer) -> bool:
    answer.transport.abort()
    return True


async def _non_json(fault: Fault, answer: _Answer) -> bool:
    page = f"<html><body><h1>{fault.message}</h1></body></html>"
    return await answer.give(HTMLResponse(page, fault.status))


async def _success_false(fault: Fault, answer: _Answer) -> bool:
    return await answer.give(JSONResponse({"success": False, "message": fault.message}))


async def _lie(fault: Fault, answer: _Answer) -> bool:
    message = "Succeeded to update parameter online."
    return await answer.give(JSONResponse({"success": True, "message": message}))


_EFFECTS: dict[str, Callable[[Fault, _Answer], Awaitable[bool]]] = {
    "refuse": _refuse,
    "hang": _hang,
    "die": _die,
    "stop": _stop,
    "slow": _slow,
    "close": _close,
    "non_json": _non_json,
    "success_false": _success_false,
    "lie": _lie,
}
