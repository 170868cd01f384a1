"""What each endpoint does and answers."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from weight_update.reference_engine import bodies, routes
from weight_update.reference_engine.edge import Edge, Keys, RequestLog
from weight_update.reference_engine.faults import ACTIVE, Fault, FaultBoard
from weight_update.reference_engine.gate import Gate
from weight_update.reference_engine.generation import GenerateRequest
from weight_update.reference_engine.group import GroupAddress
from weight_update.reference_engine.releases import Release
from weight_update.reference_engine.routes import Endpoint, Handler
from weight_update.reference_engine.sampling import Limits, requests_of
from weight_update.reference_engine.scheduler import Outcome, Scheduler
from weight_update.reference_engine.weights import Announcement, digest

UPDATE_ROUTE = "/update_weights_from_distributed"


@dataclass(frozen=True)
class ServerInfo:
    """What the server says about itself.

    Args:
        release: The profile in force.
        arguments: The resolved start arguments, as ``/server_info`` shows them.
        model: ``model_type`` and ``architectures`` of the model.
        limits: What the model allows.
        tokenizer: A transformers tokenizer, or None: prompts are token ids then.
        health_timeout: How long ``/health`` waits before it says 503.
    """

    release: Release
    arguments: dict[str, Any]
    model: dict[str, Any]
    limits: Limits
    tokenizer: Any = None
    health_timeout: float = 2.0


class Server:
    """Answers HTTP calls; everything that touches the model is handed to the scheduler."""

    def __init__(self, scheduler: Scheduler, info: ServerInfo, board: FaultBoard, log: RequestLog):
        self.weight_version = "default"
        self._scheduler = scheduler
        self._info = info
        self._board = board
        self._log = log
        self._gate = Gate(info.release.continue_waits)
        self._flushing = False
        self._started_from = info.arguments.get("model_path")

    # ---- health and information

    async def health(self, _: bodies.NoBody) -> Response:
        """200 once the scheduler has answered; 503 while it is paused or blocked."""
        probe = self._gate.wait_unpaused(lambda: self._ask(self._scheduler.measure))
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
            "weight_version": self.weight_version,
            "load_format": arguments["load_format"],
        }
        return JSONResponse(body | self._info.model)

    async def server_info(self, _: bodies.NoBody) -> Response:
        """The start arguments and the scheduler's state; waits for the scheduler."""
        load = await self._ask(self._scheduler.measure)
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
            load: dict[str, int] = await self._ask(self._scheduler.measure)
            return load
        return self._scheduler.load

    async def openapi(self, _: bodies.NoBody) -> Response:
        """The routes, their methods and fields."""
        return JSONResponse(routes.openapi(self.endpoints(), self._info.release))

    # ---- generation

    async def generate(self, body: bodies.Generate) -> Response:
        """Generate for one prompt or a list of them; held while the engine is paused."""
        prompts, single = self._prompts(body)
        requests = requests_of(body, prompts, self._info.limits)
        async with self._gate.request():
            for request in requests:
                self._scheduler.post(self._scheduler.submit, request)
            futures = [asyncio.wrap_future(request.answer) for request in requests]
            answers = list(await asyncio.gather(*futures))
        for request, answer in zip(requests, answers, strict=True):
            if body.return_logprob:
                entries = zip(request.logprobs, request.output, strict=True)
                answer["meta_info"]["output_token_logprobs"] = [[p, t, None] for p, t in entries]
            if self._info.tokenizer is not None:
                answer["text"] = self._text(request)
        return JSONResponse(answers[0] if single else answers)

    def _text(self, request: GenerateRequest) -> str:
        """What the output adds to the prompt's text, without special and stop tokens."""
        decode = self._info.tokenizer.decode
        stopped = (request.finish_reason() or {}).get("type") == "stop"
        prompt, whole = request.tokens[: request.prompt_length], request.tokens
        whole = whole[:-1] if stopped else whole
        before = decode(prompt, skip_special_tokens=True)
        text: str = decode(whole, skip_special_tokens=True)
        return text[len(before) :]

    def _prompts(self, body: bodies.Generate) -> tuple[list[list[int]], bool]:
        if body.stream:
            raise bodies.RequestError("stream is not supported by the reference engine")
        given: Any = body.input_ids if body.text is None else self._encoded(body.text)
        if not given:
            raise bodies.RequestError("either input_ids or text must be given and not empty")
        single = isinstance(given[0], int)
        if single and isinstance(body.extra_key, list):
            raise bodies.RequestError("extra_key should be a string for a single request")
        return [given] if single else given, single

    def _encoded(self, text: str | list[str]) -> Any:
        if self._info.tokenizer is None:
            raise bodies.RequestError("this model has no tokenizer; send input_ids")
        return self._info.tokenizer(text)["input_ids"]

    async def abort_request(self, body: bodies.AbortRequest) -> Response:
        """Abort by id prefix, or all; answers before it has happened."""
        if body.rid or body.abort_all:
            self._scheduler.post(self._scheduler.abort, body.rid, body.abort_all)
        return Response()

    async def pause(self, body: bodies.PauseGeneration) -> Response:
        """Pause; ``abort`` ends what runs, the other modes tell the scheduler and return."""
        if body.mode == "abort":
            await self._gate.pause(self._abort_all, drain=True)
        else:
            stop = self._scheduler.pause
            await self._gate.pause(lambda: self._scheduler.post(stop, body.mode), drain=False)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, _: bodies.ContinueGeneration) -> Response:
        """Continue; waits for an update that runs under the pause."""
        await self._gate.resume(lambda: self._scheduler.post(self._scheduler.resume))
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, body: bodies.FlushCache | bodies.NoBody) -> Response:
        """Flush if idle; with a timeout, wait for strict idleness."""
        patience = body.timeout if isinstance(body, bodies.FlushCache) else 0.0
        if not patience:
            # Without a timeout to take, a release says "flushed" in any case.
            speaks = self._info.release.flush_timeout
            failure = "Flush cache failed.\n" if speaks else "Cache flushed.\n"
            done = await self._ask(self._scheduler.flush)
        elif self._flushing:
            failure = "Another flush_cache is already in progress."
            done = False
        else:
            failure = "Timed out waiting for idle state."
            done = await self._flush_when_idle(patience)
        return PlainTextResponse("Cache flushed.\n" if done else failure, 200 if done else 400)

    async def _flush_when_idle(self, patience: float) -> bool:
        self._flushing, deadline = True, time.monotonic() + patience
        try:
            while not await self._ask(self._scheduler.flush, True):
                if time.monotonic() > deadline:
                    return False
                await asyncio.sleep(0.02)
            return True
        finally:
            self._flushing = False

    async def release_memory(self, body: bodies.MemoryOccupation) -> Response:
        """Free memory; an engine that is not idle ends."""
        await self._ask(self._scheduler.release_memory, tuple(body.tags or ()))
        return JSONResponse(None)

    async def resume_memory(self, body: bodies.MemoryOccupation) -> Response:
        """Take memory back; an engine that did not free it ends."""
        await self._ask(self._scheduler.resume_memory, tuple(body.tags or ()))
        return JSONResponse(None)

    # ---- groups and weights

    async def init_group(self, body: bodies.InitWeightsUpdateGroup) -> Response:
        """Join the trainer's group as rank ``rank_offset``."""
        address = GroupAddress(
            body.master_address,
            body.master_port,
            body.rank_offset,
            body.world_size,
            body.group_name,
            body.backend,
            self._info.release.raw_tcp_address,
        )
        return _answer(await self._ask(self._scheduler.join_group, address))

    async def destroy_group(self, body: bodies.DestroyWeightsUpdateGroup) -> Response:
        """Leave a group."""
        return _answer(await self._ask(self._scheduler.leave_group, body.group_name))

    async def begin(self, _: bodies.BeginWeightUpdate) -> Response:
        """Open the update session."""
        async with self._gate.update():
            return _answer(await self._ask(self._scheduler.begin_update))

    async def end(self, _: bodies.NoBody) -> Response:
        """Close the update session."""
        async with self._gate.update():
            return _answer(await self._ask(self._scheduler.end_update))

    async def update(self, body: bodies.UpdateWeightsFromDistributed) -> Response:
        """Receive tensors over the group and load them."""
        if body.abort_all_requests:
            self._abort_all()
        flattened = body.load_format == "flattened_bucket"
        announced = Announcement(body.names, body.dtypes, body.shapes, flattened)
        version = body.weight_version
        async with self._gate.update() as paused:
            if paused and not self._info.release.paused_updates_are_labelled:
                version = None
            outcome = await self._ask(
                self._scheduler.update,
                body.group_name,
                announced,
                version,
                body.flush_cache,
                ACTIVE.get(),
            )
        return _answer(self._labelled(outcome, version))

    def _labelled(self, outcome: Outcome, version: str | None) -> Outcome:
        if not outcome.success or version is None:
            return outcome
        self.weight_version = version
        return Outcome(True, f"{outcome.message} Weight version updated to {version}.")

    async def update_from_tensor(self, body: bodies.UpdateWeightsFromTensor) -> Response:
        """Open tensors that the trainer shares, and load them."""
        if body.abort_all_requests:
            self._abort_all()
        version = body.weight_version
        async with self._gate.update() as paused:
            if paused and not self._info.release.paused_updates_are_labelled:
                version = None
            outcome = await self._ask(
                self._scheduler.update_from_tensor,
                body.serialized_named_tensors,
                body.load_format,
                version,
                body.flush_cache,
                ACTIVE.get(),
            )
        return _answer(self._labelled(outcome, version))

    async def update_from_disk(self, body: bodies.UpdateWeightFromDisk) -> Response:
        """Load a folder; the model that is shown is that folder from then on."""
        if body.abort_all_requests:
            self._abort_all()
        async with self._gate.update():
            outcome = await self._ask(
                self._scheduler.update_from_disk,
                body.model_path,
                body.weight_version,
                body.flush_cache,
                ACTIVE.get(),
            )
        if outcome.success:
            path = {"model_path": body.model_path, "served_model_name": body.model_path}
            self._info.arguments.update(path, load_format=body.load_format or "auto")
            self.weight_version = body.weight_version or self.weight_version
        count = self._info.arguments["dp_size"]
        told = Outcome(outcome.success, " | ".join([outcome.message] * count))
        answer = asdict(told) | {"num_paused_requests": 0 if count == 1 else [0] * count}
        return JSONResponse(answer, 200 if outcome.success else 400)

    async def update_version(self, body: bodies.UpdateWeightVersion) -> Response:
        """Name the weights; aborts all requests unless told not to."""
        if body.abort_all_requests:
            self._abort_all()
        await self._ask(self._scheduler.set_version, body.new_version)
        self.weight_version = body.new_version
        message = f"Weight version updated to {body.new_version}"
        answer = {"success": True, "message": message, "new_version": body.new_version}
        return JSONResponse(answer)

    async def weights_by_name(self, body: bodies.GetWeightsByName) -> Response:
        """The first rows of a parameter; only Llama answers this, as in the real server."""
        rows = None
        if self._info.model["model_type"] == "llama":
            rows = await self._ask(self._scheduler.first_rows, body.name, body.truncate_size)
        if rows is None:
            return JSONResponse({"error": {"message": "Get parameter by name failed"}}, 400)
        count = self._info.arguments["dp_size"]
        return JSONResponse(rows if count == 1 else [rows] * count)

    async def weights_checker(
        self, body: bodies.CheckWeights | bodies.AskedCheckWeights
    ) -> Response:
        """Digests of all parameters, and for each what was digested."""
        if body.action != "checksum" or self._info.release.checksums == "never":
            return _answer(Outcome(False, f"Unsupported action={body.action!r}"))
        told = await self._ask(self._scheduler.checksums)
        ranks = [_rank_checksums(rank, own) for rank, own in enumerate(told)]
        answer = {"success": True, "message": "Success.", "ranks": ranks}
        whole = _digest([own["checksums"] for own in told])
        return JSONResponse(answer | {"per_engine_checksum": whole})

    def _abort_all(self) -> None:
        self._scheduler.post(self._scheduler.abort, "", True)

    async def _ask(self, command: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.wrap_future(self._scheduler.call(command, *args))

    # ---- the reference engine's own routes

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
        return JSONResponse({"ranks": await self._ask(self._scheduler.look)})

    # ---- the table

    def endpoints(self) -> list[Endpoint]:
        """Return the routes of the release in force."""
        table = [*self._information(), *self._generation(), *self._weights()]
        return [e for e in table if e.path not in self._info.release.missing_routes]

    def _information(self) -> list[Endpoint]:
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
            Endpoint("/openapi.json", get, self.openapi),
        ]

    def _generation(self) -> list[Endpoint]:
        post, both, memory = ("POST",), ("GET", "POST"), bodies.MemoryOccupation
        flush = bodies.FlushCache if self._info.release.flush_timeout else bodies.NoBody
        return [
            Endpoint("/generate", ("POST", "PUT"), self.generate, bodies.Generate),
            Endpoint("/flush_cache", both, self.flush_cache, flush, admin=True, query=True),
            Endpoint("/abort_request", post, self.abort_request, bodies.AbortRequest, True),
            Endpoint("/pause_generation", post, self.pause, bodies.PauseGeneration, True),
            Endpoint("/continue_generation", post, self.resume, bodies.ContinueGeneration, True),
            Endpoint("/release_memory_occupation", both, self.release_memory, memory, True),
            Endpoint("/resume_memory_occupation", both, self.resume_memory, memory, True),
        ]

    def _weights(self) -> list[Endpoint]:
        table: list[tuple[str, Handler, type[Any]]] = [
            ("/init_weights_update_group", self.init_group, bodies.InitWeightsUpdateGroup),
            ("/destroy_weights_update_group", self.destroy_group, bodies.DestroyWeightsUpdateGroup),
            ("/begin_weight_update", self.begin, bodies.BeginWeightUpdate),
            ("/end_weight_update", self.end, bodies.NoBody),
            (UPDATE_ROUTE, self.update, bodies.UpdateWeightsFromDistributed),
            (
                "/update_weights_from_tensor",
                self.update_from_tensor,
                bodies.UpdateWeightsFromTensor,
            ),
            ("/update_weights_from_disk", self.update_from_disk, bodies.UpdateWeightFromDisk),
            ("/update_weight_version", self.update_version, bodies.UpdateWeightVersion),
        ]
        both, name = ("GET", "POST"), bodies.GetWeightsByName
        asked = self._info.release.checksums != "default"
        check = bodies.AskedCheckWeights if asked else bodies.CheckWeights
        ways = ("POST",) if asked else both
        return [
            *(Endpoint(path, ("POST",), handler, body, True) for path, handler, body in table),
            Endpoint("/get_weights_by_name", both, self.weights_by_name, name, True),
            Endpoint("/weights_checker", ways, self.weights_checker, check, True, True),
        ]

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


def _answer(outcome: Outcome) -> Response:
    return JSONResponse(asdict(outcome), 200 if outcome.success else 400)


def _digest(data: object) -> str:
    return digest(json.dumps(data, sort_keys=True).encode())[:16]


def _rank_checksums(rank: int, told: dict[str, Any]) -> dict[str, Any]:
    place = [{"tp_rank": rank, "pp_rank": 0, "dp_rank": 0}]
    return {**told, "per_gpu_checksum": _digest(told["checksums"]), "parallelism_info": place}


def start_arguments(options: dict[str, Any], release: Release) -> dict[str, Any]:
    """Return what ``/server_info`` shows: it includes the keys, as the real server's does."""
    parallel = {"pp_size": 1, "dp_size": 1, "ep_size": 1}
    if release.attn_dp_size:
        parallel["attn_dp_size"] = 1
    fixed = {"enable_dp_attention": False, "weight_version": "default", "pid": os.getpid()}
    fixed["disaggregation_mode"] = "null"
    fixed["random_seed"] = secrets.randbelow(1 << 30)  # another one at every start
    return options | parallel | fixed
