"""From a table of endpoints to routes, error answers and the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from weight_update.reference_engine import bodies
from weight_update.reference_engine.releases import Release

Handler = Callable[[Any], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """One route of the table.

    Args:
        path: Where it is.
        methods: HTTP methods it takes.
        handler: Gets the parsed body.
        body: The class of the body.
        admin: Whether it needs the admin key, if there is one.
        body_optional: Whether an empty body stands for all defaults.
        query: Whether the fields come from the query instead of a body.
    """

    path: str
    methods: tuple[str, ...]
    handler: Handler
    body: type[Any] = bodies.NoBody
    admin: bool = False
    body_optional: bool = False
    query: bool = False


def application(endpoints: Sequence[Endpoint], own: Sequence[Route]) -> Starlette:
    """Return the application that serves ``endpoints`` and the routes in ``own``."""
    handlers: Any = {HTTPException: _http_error, bodies.BodyError: _body_error}
    return Starlette(routes=[*map(_route, endpoints), *own], exception_handlers=handlers)


def _route(endpoint: Endpoint) -> Route:
    async def serve(request: Request) -> Response:
        return await endpoint.handler(bodies.parse(endpoint.body, await _data(endpoint, request)))

    return Route(endpoint.path, serve, methods=list(endpoint.methods))


async def _data(endpoint: Endpoint, request: Request) -> object:
    if endpoint.query:
        return {name: _number(value) for name, value in request.query_params.items()}
    raw = await request.body()
    if not raw and (endpoint.body_optional or "POST" not in endpoint.methods):
        return {}
    parsed: object = request.scope["parsed"]
    if parsed is not None:
        return parsed
    try:
        return json.loads(raw)
    except ValueError as error:
        raise bodies.BodyError(f"1 validation errors: body: {error}") from error


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


async def _http_error(_: Request, error: HTTPException) -> Response:
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


async def _body_error(_: Request, error: bodies.BodyError) -> Response:
    return JSONResponse(error.envelope(), 400)


def openapi(endpoints: Sequence[Endpoint], release: Release) -> dict[str, Any]:
    """Return the document from which a client can tell routes, methods and fields."""
    schemas = {
        _schema_name(e): bodies.schema(e.body, release.missing_fields)
        for e in endpoints
        if not e.query
    }
    paths = {e.path: {method.lower(): _operation(e) for method in e.methods} for e in endpoints}
    info = {"title": "weight_update reference engine", "version": release.name}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {"responses": {"200": {"description": "Success"}}}
    if endpoint.query:
        operation["parameters"] = [
            {"name": entry.name, "in": "query", "required": False, "schema": {"type": "number"}}
            for entry in fields(endpoint.body)
        ]
    elif endpoint.body is not bodies.NoBody:
        schema = {"$ref": f"#/components/schemas/{_schema_name(endpoint)}"}
        operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return operation


def _schema_name(endpoint: Endpoint) -> str:
    return f"{endpoint.body.__name__}ReqInput"
