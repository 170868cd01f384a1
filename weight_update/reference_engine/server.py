"""The server: the routes of a release, and the reference engine's own."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from weight_update.reference_engine import bodies, routes
from weight_update.reference_engine.edge import Edge, Keys, RequestLog
from weight_update.reference_engine.faults import Fault, FaultBoard
from weight_update.reference_engine.front import Front, ServerInfo
from weight_update.reference_engine.generating import Generating
from weight_update.reference_engine.information import Information
from weight_update.reference_engine.routes import Endpoint
from weight_update.reference_engine.scheduler import Scheduler
from weight_update.reference_engine.updating import Updating


class Server:
    """Answers HTTP calls; everything that touches the model is handed to the scheduler."""

    def __init__(self, scheduler: Scheduler, info: ServerInfo, board: FaultBoard, log: RequestLog):
        self._front = front = Front(scheduler, info)
        self._parts = Information(front), Generating(front), Updating(front)
        self._board = board
        self._log = log

    def endpoints(self) -> list[Endpoint]:
        """Return the routes of the release in force."""
        table = [endpoint for part in self._parts for endpoint in part.endpoints()]
        table.append(Endpoint("/openapi.json", ("GET",), self.openapi))
        return [e for e in table if e.path not in self._front.info.release.missing_routes]

    def application(self, keys: Keys, delay: float = 0.0) -> Edge:
        """Return the ASGI application, whose answers all leave ``delay`` seconds later."""
        endpoints, faults, log = self.endpoints(), "/_reference/faults", "/_reference/requests"
        look = "/_reference/weights"
        own = [
            Route(faults, self.arm_faults, methods=["POST"]),
            Route(faults, self.clear_faults, methods=["DELETE"]),
            Route(log, self.request_log, methods=["GET"]),
            Route(look, self.look, methods=["GET"]),
        ]
        admin = {endpoint.path for endpoint in endpoints if endpoint.admin}
        admin |= {faults, log, look}
        keys = replace(keys, admin_paths=frozenset(admin))
        return Edge(routes.application(endpoints, own), self._board, self._log, keys, delay)

    async def openapi(self, _: bodies.NoBody) -> Response:
        """The routes, their methods and fields."""
        return JSONResponse(routes.openapi(self.endpoints(), self._front.info.release))

    async def arm_faults(self, request: Request) -> Response:
        """Arm one fault, or a list of them."""
        try:
            data = await request.json()
            items = data if isinstance(data, list) else [data]
            faults = [Fault.from_dict(item) for item in items]
        except (ValueError, TypeError) as error:
            return JSONResponse({"detail": str(error)}, 400)
        for fault in faults:
            self._board.arm(fault)
        return JSONResponse({"armed": len(faults)})

    async def clear_faults(self, _: Request) -> Response:
        """Disarm all faults."""
        self._board.clear()
        return JSONResponse({"armed": 0})

    async def request_log(self, _: Request) -> Response:
        """The requests so far."""
        return JSONResponse(self._log.records)

    async def look(self, _: Request) -> Response:
        """Sums and addresses of each rank's parameters."""
        return JSONResponse({"ranks": await self._front.ask(self._front.scheduler.look)})
