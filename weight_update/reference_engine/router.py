"""A stand-in for ``sglang-router``: lists its workers and passes requests to generate on."""

from __future__ import annotations

import http.client
import itertools
import socket
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from weight_update.reference_engine.launcher import check_extra

_STARTUP_SECONDS = 30.0
_STOP_SECONDS = 5.0


class ReferenceRouter:
    """A router in a thread of this process.

    ``GET /workers`` lists the workers (``GET /list_workers`` does, in an ``older`` one), and
    ``POST /generate`` goes to them in turn. There is nothing else: a real router passes on much
    of the rest, so that it looks like a server.

    Args:
        workers: URLs of the engines behind it; may be changed later.
        unhealthy: Those of them that it calls unhealthy and passes nothing to; likewise.
        older: Whether it lists its workers as routers before 0.2 did.
        port: Port to listen on; 0 picks a free one.

    Example:
        >>> with ReferenceRouter(["http://127.0.0.1:1"]) as router:
        ...     router.url.startswith("http://127.0.0.1:")
        True
    """

    def __init__(
        self,
        workers: Sequence[str],
        *,
        unhealthy: Sequence[str] = (),
        older: bool = False,
        port: int = 0,
    ) -> None:
        check_extra()
        import uvicorn

        self.workers = list(workers)
        self.unhealthy = set(unhealthy)
        self._turns = itertools.count()
        self._listener = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        config = uvicorn.Config(
            self._application(older),
            lifespan="off",
            log_level="warning",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._listener],), daemon=True, name="router"
        )
        self._thread.start()
        self._wait_until_ready()

    def stop(self) -> None:
        """Stop listening."""
        self._server.should_exit = True
        self._thread.join(_STOP_SECONDS)
        self._listener.close()

    def __enter__(self) -> ReferenceRouter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _STARTUP_SECONDS
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise RuntimeError("the reference router did not start")
            time.sleep(0.01)

    def _application(self, older: bool) -> Any:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route

        async def listed(_: Any) -> Response:
            return JSONResponse({"urls": self.workers} if older else self._described())

        async def generate(request: Any) -> Response:
            status, body = await run_in_threadpool(self._pass_on, await request.body())
            return Response(body, status, media_type="application/json")

        return Starlette(
            routes=[
                Route("/list_workers" if older else "/workers", listed, methods=["GET"]),
                Route("/generate", generate, methods=["POST"]),
            ]
        )

    def _described(self) -> dict[str, Any]:
        rows = [
            {"id": str(number), "url": url, "is_healthy": url not in self.unhealthy}
            for number, url in enumerate(self.workers)
        ]
        return {"workers": rows, "total": len(rows)}

    def _pass_on(self, body: bytes) -> tuple[int, bytes]:
        """Sends a body to the worker whose turn it is; returns status and body of the answer."""
        able = [url for url in self.workers if url not in self.unhealthy]
        if not able:
            return 503, b'{"error": {"message": "No available workers"}}'
        where = urlsplit(able[next(self._turns) % len(able)])
        connection = http.client.HTTPConnection(where.hostname or "", where.port)
        try:
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError as error:
            return 502, f'{{"error": {{"message": "{type(error).__name__}"}}}}'.encode()
        finally:
            connection.close()
