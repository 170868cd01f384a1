"""What the endpoints about health, the model and the load do and answer."""

from __future__ import annotations

import asyncio
import time

from starlette.responses import JSONResponse, Response

from weight_update.reference_engine import bodies
from weight_update.reference_engine.front import Front
from weight_update.reference_engine.routes import Endpoint


class Information:
    """Answers what the server says of itself."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._scheduler, self._gate, self._info = front.scheduler, front.gate, front.info
        self._started_from = front.info.arguments.get("model_path")

    def endpoints(self) -> list[Endpoint]:
        """Return the routes of all releases."""
        get = ("GET",)
        return [
            Endpoint("/health", get, self.health),
            Endpoint("/health_generate", get, self.health),
            Endpoint("/ping", get, self.ping),
            Endpoint("/ready", get, self.ready),
            Endpoint("/model_info", get, self.model_info),
            Endpoint("/get_model_info", get, self.model_info),
            Endpoint("/server_info", get, self.server_info),
            Endpoint("/get_server_info", get, self.server_info),
            Endpoint("/v1/loads", get, self.loads),
            Endpoint("/get_load", get, self.get_load),
        ]

    async def health(self, _: bodies.NoBody) -> Response:
        """200 once the scheduler has answered; 503 while it is paused or blocked."""
        probe = self._gate.wait_unpaused(lambda: self._front.ask(self._scheduler.measure))
        try:
            await asyncio.wait_for(probe, self._info.health_timeout)
        except TimeoutError:
            return Response(status_code=503)
        return Response()

    async def ready(self, _: bodies.NoBody) -> Response:
        """200 unless paused."""
        return Response(status_code=503 if self._gate.paused else 200)

    async def ping(self, _: bodies.NoBody) -> Response:
        """200."""
        return Response()

    async def model_info(self, _: bodies.NoBody) -> Response:
        """The model and the live weight version; never waits for the scheduler."""
        arguments = self._info.arguments
        body = {
            "model_path": arguments["model_path"],
            "served_model_name": arguments["served_model_name"],
            "tokenizer_path": self._started_from,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self._front.weight_version,
            "load_format": arguments["load_format"],
        }
        return JSONResponse(body | self._info.model)

    async def server_info(self, _: bodies.NoBody) -> Response:
        """The start arguments and the scheduler's state; waits for the scheduler."""
        load = await self._front.ask(self._scheduler.measure)
        size = self._info.arguments["tp_size"]
        states = [{"world_size": size, "num_running_reqs": load["running"]}]
        version = {"version": self._info.release.name, "frontend": "reference_engine"}
        return JSONResponse(self._info.arguments | {"internal_states": states} | version)

    async def loads(self, _: bodies.NoBody) -> Response:
        """How much there is to do."""
        load = await self._load()
        entry = {
            "dp_rank": 0,
            "num_running_reqs": load["running"],
            "num_waiting_reqs": load["waiting"],
            "num_total_tokens": load["tokens"],
            "queues": {"waiting": load["waiting"], "grammar": 0, "paused": 0, "retracted": 0},
        }
        version = self._info.release.name
        return JSONResponse({"timestamp": time.time(), "version": version, "loads": [entry]})

    async def get_load(self, _: bodies.NoBody) -> Response:
        """The older form of the same."""
        load = await self._load()
        entry = {
            "dp_rank": 0,
            "num_reqs": load["running"] + load["waiting"],
            "num_waiting_reqs": load["waiting"],
            "num_tokens": load["tokens"],
        }
        return JSONResponse([entry])

    async def _load(self) -> dict[str, int]:
        """Ask the scheduler, or take what it left: frozen while it is paused or blocked."""
        if self._info.release.live_loads:
            load: dict[str, int] = await self._front.ask(self._scheduler.measure)
            return load
        return self._scheduler.load
