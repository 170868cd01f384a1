"""What the endpoints for groups, updates, the label and the weights do and answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from starlette.responses import JSONResponse, Response

from weight_update.reference_engine import bodies
from weight_update.reference_engine.faults import ACTIVE
from weight_update.reference_engine.front import Front, answer_of
from weight_update.reference_engine.group import GroupAddress
from weight_update.reference_engine.routes import Endpoint, Handler
from weight_update.reference_engine.scheduler import Outcome
from weight_update.reference_engine.weights import Announcement, digest


class Updating:
    """Takes weights, and shows those that the model has."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._scheduler, self._gate, self._info = front.scheduler, front.gate, front.info

    def endpoints(self) -> list[Endpoint]:
        """Return the routes of all releases."""
        table: list[tuple[str, Handler, type[Any]]] = [
            ("/init_weights_update_group", self.init_group, bodies.InitWeightsUpdateGroup),
            ("/destroy_weights_update_group", self.destroy_group, bodies.DestroyWeightsUpdateGroup),
            ("/begin_weight_update", self.begin, bodies.BeginWeightUpdate),
            ("/end_weight_update", self.end, bodies.NoBody),
            ("/update_weights_from_distributed", self.update, bodies.UpdateWeightsFromDistributed),
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
        return answer_of(await self._front.ask(self._scheduler.join_group, address))

    async def destroy_group(self, body: bodies.DestroyWeightsUpdateGroup) -> Response:
        """Leave a group."""
        return answer_of(await self._front.ask(self._scheduler.leave_group, body.group_name))

    async def begin(self, _: bodies.BeginWeightUpdate) -> Response:
        """Open the update session."""
        async with self._gate.update():
            return answer_of(await self._front.ask(self._scheduler.begin_update))

    async def end(self, _: bodies.NoBody) -> Response:
        """Close the update session."""
        async with self._gate.update():
            return answer_of(await self._front.ask(self._scheduler.end_update))

    async def update(self, body: bodies.UpdateWeightsFromDistributed) -> Response:
        """Receive tensors over the group and load them."""
        flattened = body.load_format == "flattened_bucket"
        announced = Announcement(body.names, body.dtypes, body.shapes, flattened)
        return await self._take(body, self._scheduler.update, body.group_name, announced)

    async def update_from_tensor(self, body: bodies.UpdateWeightsFromTensor) -> Response:
        """Open tensors that the trainer shares, and load them."""
        tensors, form = body.serialized_named_tensors, body.load_format
        return await self._take(body, self._scheduler.update_from_tensor, tensors, form)

    async def _take(
        self,
        body: bodies.UpdateWeightsFromDistributed | bodies.UpdateWeightsFromTensor,
        load: Callable[..., Any],
        *what: Any,
    ) -> Response:
        if body.abort_all_requests:
            self._front.abort_all()
        version = body.weight_version
        async with self._gate.update() as paused:
            if paused and not self._info.release.paused_updates_are_labelled:
                version = None
            outcome = await self._front.ask(load, *what, version, body.flush_cache, ACTIVE.get())
        return answer_of(self._labelled(outcome, version))

    def _labelled(self, outcome: Outcome, version: str | None) -> Outcome:
        if not outcome.success or version is None:
            return outcome
        self._front.weight_version = version
        return Outcome(True, f"{outcome.message} Weight version updated to {version}.")

    async def update_from_disk(self, body: bodies.UpdateWeightFromDisk) -> Response:
        """Load a folder; the model that is shown is that folder from then on."""
        if body.abort_all_requests:
            self._front.abort_all()
        async with self._gate.update():
            outcome = await self._front.ask(
                self._scheduler.update_from_disk,
                body.model_path,
                body.weight_version,
                body.flush_cache,
                ACTIVE.get(),
            )
        if outcome.success:
            path = {"model_path": body.model_path, "served_model_name": body.model_path}
            self._info.arguments.update(path, load_format=body.load_format or "auto")
            self._front.weight_version = body.weight_version or self._front.weight_version
        count = self._info.arguments["dp_size"]
        told = Outcome(outcome.success, " | ".join([outcome.message] * count))
        answer = asdict(told) | {"num_paused_requests": 0 if count == 1 else [0] * count}
        return JSONResponse(answer, 200 if outcome.success else 400)

    async def update_version(self, body: bodies.UpdateWeightVersion) -> Response:
        """Name the weights; aborts all requests unless told not to."""
        if body.abort_all_requests:
            self._front.abort_all()
        await self._front.ask(self._scheduler.set_version, body.new_version)
        self._front.weight_version = body.new_version
        message = f"Weight version updated to {body.new_version}"
        answer = {"success": True, "message": message, "new_version": body.new_version}
        return JSONResponse(answer)

    async def weights_by_name(self, body: bodies.GetWeightsByName) -> Response:
        """The first rows of a parameter; only Llama answers this, as in the real server."""
        rows = None
        if self._info.model["model_type"] == "llama":
            rows = await self._front.ask(self._scheduler.first_rows, body.name, body.truncate_size)
        if rows is None:
            return JSONResponse({"error": {"message": "Get parameter by name failed"}}, 400)
        count = self._info.arguments["dp_size"]
        return JSONResponse(rows if count == 1 else [rows] * count)

    async def weights_checker(
        self, body: bodies.CheckWeights | bodies.AskedCheckWeights
    ) -> Response:
        """Digests of all parameters, and for each what was digested."""
        if body.action != "checksum" or self._info.release.checksums == "never":
            return answer_of(Outcome(False, f"Unsupported action={body.action!r}"))
        told = await self._front.ask(self._scheduler.checksums)
        ranks = [_rank_checksums(rank, own) for rank, own in enumerate(told)]
        answer = {"success": True, "message": "Success.", "ranks": ranks}
        whole = _digest([own["checksums"] for own in told])
        return JSONResponse(answer | {"per_engine_checksum": whole})


def _digest(data: object) -> str:
    return digest(json.dumps(data, sort_keys=True).encode())[:16]


def _rank_checksums(rank: int, told: dict[str, Any]) -> dict[str, Any]:
    place = [{"tp_rank": rank, "pp_rank": 0, "dp_rank": 0}]
    return {**told, "per_gpu_checksum": _digest(told["checksums"]), "parallelism_info": place}
