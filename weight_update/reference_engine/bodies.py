"""The request bodies: their fields, their defaults, and how bad ones are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from itertools import chain
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")


@dataclass(frozen=True)
class NoBody:
    """For routes that read nothing."""


@dataclass(frozen=True)
class InitWeightsUpdateGroup:
    """``POST /init_weights_update_group``."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


@dataclass(frozen=True)
class DestroyWeightsUpdateGroup:
    """``POST /destroy_weights_update_group``."""

    group_name: str = "weight_update_group"


@dataclass(frozen=True)
class BeginWeightUpdate:
    """``POST /begin_weight_update``."""

    selector: Literal["target", "draft", "all"] = "all"


@dataclass(frozen=True)
class UpdateWeightsFromDistributed:
    """``POST /update_weights_from_distributed``."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None
    selector: Literal["target", "draft", "all"] = "all"
    torch_empty_cache: bool = False


@dataclass(frozen=True)
class UpdateWeightsFromTensor:
    """``POST /update_weights_from_tensor``: for each rank, what it opens."""

    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    selector: Literal["target", "draft", "all"] = "all"
    torch_empty_cache: bool = False


@dataclass(frozen=True)
class UpdateWeightFromDisk:
    """``POST /update_weights_from_disk``."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


@dataclass(frozen=True)
class UpdateWeightVersion:
    """``POST /update_weight_version``; aborts all requests unless told otherwise."""

    new_version: str
    abort_all_requests: bool = True


@dataclass(frozen=True)
class PauseGeneration:
    """``POST /pause_generation``."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


@dataclass(frozen=True)
class ContinueGeneration:
    """``POST /continue_generation``."""

    torch_empty_cache: bool = True


@dataclass(frozen=True)
class MemoryOccupation:
    """``GET`` or ``POST /release_memory_occupation`` and ``/resume_memory_occupation``."""

    tags: list[str] | None = None


@dataclass(frozen=True)
class AbortRequest:
    """``POST /abort_request``."""

    rid: str = ""
    abort_all: bool = False


@dataclass(frozen=True)
class FlushCache:
    """The query of ``/flush_cache``."""

    timeout: float = 0.0

    def __post_init__(self) -> None:
        if self.timeout < 0:
            raise BodyError("1 validation errors: query.timeout: Input should be 0 or more")


@dataclass(frozen=True)
class GetWeightsByName:
    """``GET`` or ``POST /get_weights_by_name``."""

    name: str
    truncate_size: int = 100


@dataclass(frozen=True)
class AskedCheckWeights:
    """``/weights_checker`` of older releases, which must be told what to do."""

    action: str


@dataclass(frozen=True)
class CheckWeights:
    """``GET`` or ``POST /weights_checker``."""

    action: str = "checksum"


@dataclass(frozen=True)
class Generate:
    """``POST /generate``."""

    input_ids: list[int] | list[list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)
    rid: str | list[str] | None = None
    extra_key: str | list[str] | None = None
    return_logprob: bool = False
    stream: bool = False


class BodyError(ValueError):
    """A body that does not fit; becomes a 400 in the engine's own envelope."""

    def envelope(self) -> dict[str, Any]:
        """Return the answer's JSON."""
        return {
            "object": "error",
            "message": str(self),
            "type": "Bad Request",
            "param": None,
            "code": 400,
        }


class RequestError(BodyError):
    """A request to generate whose fields are of the right kind and make no sense."""

    def envelope(self) -> dict[str, Any]:
        """Return the answer's JSON; the real server's differs from that of a bad body."""
        return {"error": {"message": str(self)}}


def parse(kind: type[_T], data: object) -> _T:
    """Build a body from JSON data; unknown fields are ignored.

    Raises:
        BodyError: Fields are missing or of the wrong type; all of them are listed.
    """
    if not isinstance(data, Mapping):
        raise BodyError("1 validation errors: body: Input should be an object")
    hints = _hints(kind)
    known = {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type]
    wrong = [
        f"body.{name}: {problem}"
        for name, entry in known.items()
        if (problem := _problem(data, entry, hints[name]))
    ]
    if wrong:
        raise BodyError(f"{len(wrong)} validation errors: " + "; ".join(wrong))
    return kind(**{name: data[name] for name in known if name in data})


_hints: Any = cache(get_type_hints)  # which makes them of text, each time anew


def _problem(data: Mapping[str, Any], entry: Field[Any], hint: Any) -> str:
    if entry.name in data:
        return "" if fits(data[entry.name], hint) else f"Input should be {_words(hint)}"
    required = entry.default is MISSING and entry.default_factory is MISSING
    return "Field required" if required else ""


def fits(value: object, hint: Any) -> bool:
    """Return whether JSON ``value`` is of the annotated type."""
    return _all_fit([value], hint)


def _all_fit(values: Sequence[Any], hint: Any) -> bool:
    """Judge many values at once: an update may announce tens of thousands of tensors."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return all(value in inner for value in values)
    if origin in (Union, UnionType):
        return all(any(fits(value, choice) for choice in inner) for value in values)
    kinds = set(map(type, values))
    if origin is list:
        return kinds <= {list} and _all_fit(list(chain.from_iterable(values)), inner[0])
    return kinds <= ({int, float} if hint is float else {origin or hint})


def _words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in get_args(hint))
    return getattr(hint, "__name__", str(hint)) if not get_args(hint) else str(hint)


def schema(kind: type[Any], missing: frozenset[str]) -> dict[str, Any]:
    """Return the JSON schema of a body without the ``missing`` fields, as far as probes read it."""
    hints = _hints(kind)
    known = [entry for entry in fields(kind) if f"{kind.__name__}.{entry.name}" not in missing]
    required = [entry.name for entry in known if _problem({}, entry, Any)]
    properties = {entry.name: {"title": _words(hints[entry.name])} for entry in known}
    return {"type": "object", "properties": properties, "required": required}
