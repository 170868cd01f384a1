"""A checkpoint against what servers say they have: pure functions over facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weight_update.cli.doctor_facts import ModelFacts
from weight_update.cli.findings import Finding
from weight_update.engines.names import Loader, compare_names
from weight_update.engines.probing import ServerFacts
from weight_update.engines.sglang.names import are_names_known, loader_of
from weight_update.engines.vllm.facts import VLLMFacts
from weight_update.errors import some_of
from weight_update.weights.name_map import rule_against_mark
from weight_update.weights.shapes import misshapen
from weight_update.weights.specs import TensorSpec

_SHAPING = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
_SHOWN = 3
_ANOTHER = "push a checkpoint of the model that the server serves"
_PADDED = "push with --trim-vocabulary, if the rows beyond the server's are padding"


def model_findings(model: ModelFacts | None) -> Iterator[Finding]:
    """A checkpoint that cannot be read."""
    if model is not None and model.error:
        yield Finding("problem", model.error, model.path, model.remedy)


def weight_findings(
    server: ServerFacts, model: ModelFacts, served: ModelFacts | None
) -> Iterator[Finding]:
    """Names, shapes and dtype of a checkpoint against what the server says it has."""
    yield from name_findings(server, model.specs or {}, model.config, served)
    yield from shape_findings(server, model, served)
    if not model.casts:
        yield from dtype_findings(server, model.specs or {})


def name_findings(
    server: ServerFacts,
    specs: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    served: ModelFacts | None,
) -> Iterator[Finding]:
    """Names that the server would ignore, and weights of its own that would stay old."""
    tied = bool(config.get("tie_word_embeddings"))
    if server.service == "vllm":
        yield from _names_in_vllm(server, specs)
        return
    if server.names is not None:
        architectures = server.model.get("architectures") or ()
        loader = loader_of(architectures) or Loader()
        unknown, lacking = compare_names(specs, server.names, tied=tied, loader=loader)
        known = are_names_known(server.info, architectures)
        if (unknown or lacking) and not known:
            yield Finding(
                "unknown",
                f"whether {len(unknown) + len(lacking)} name(s) fit, such as "
                f"{some_of([*unknown, *lacking])}: its own names for them are not known here",
                server.url,
            )
            return
    elif served is not None and served.specs is not None:
        unknown, lacking = compare_names(specs, frozenset(served.specs), tied=tied)
    else:
        why = server.names_unknown or "it does not say"
        yield Finding("unknown", f"which weights it has ({why})", server.url)
        return
    yield from _misnamed(server.url, unknown, lacking, "which would ignore them")


def _names_in_vllm(server: ServerFacts, specs: Mapping[str, TensorSpec]) -> Iterator[Finding]:
    """Names against those in the folder that it loaded, where that is here."""
    loaded, fp8_cache = server.names or frozenset(), bool(server.info.get("fp8_cache"))
    told = VLLMFacts(loaded=loaded, tied=bool(server.model.get("tied")), fp8_cache=fp8_cache)
    check = told.check_names(list(specs))
    if not loaded:
        yield Finding("unknown", f"which weights it has ({server.names_unknown})", server.url)
    yield from _misnamed(server.url, check.unknown, check.lacking, "which would fail over them")


def _misnamed(
    url: str, unknown: Sequence[str], lacking: Sequence[str], then: str
) -> Iterator[Finding]:
    remedy = "push a checkpoint of the model that the server serves, with its names"
    if rule := rule_against_mark(unknown, lacking):
        remedy = f"push with --name-map '{rule}='"
    if unknown:
        what = f"of the checkpoint are not the server's, {then}"
        yield Finding(
            "problem", f"{len(unknown)} weight(s) {what}: {some_of(unknown)}", url, remedy
        )
    if lacking:
        what = "of the server are not in the checkpoint, and would stay old"
        yield Finding(
            "problem", f"{len(lacking)} weight(s) {what}: {some_of(lacking)}", url, remedy
        )


def shape_findings(
    server: ServerFacts, model: ModelFacts, served: ModelFacts | None
) -> Iterator[Finding]:
    """Shapes that differ; a server may take a wrong one without a word."""
    specs, config = model.specs or {}, dict(model.config)
    if model.trims:
        config.pop("vocab_size", None)
    theirs = served.specs if served is not None and served.specs is not None else {}
    differing = [] if theirs or served is None else _differing(config, served.config)
    if differing:
        yield Finding(
            "problem",
            f"its model is configured otherwise: {'; '.join(differing[:_SHOWN])}",
            server.url,
            _ANOTHER,
        )
    known = {name: spec.shape for name, spec in theirs.items()}
    known |= {name: (length,) for name, length in server.lengths.items()}
    ours = {name: spec.shape for name, spec in specs.items()}
    found = list(misshapen(ours, known, trims=model.trims))
    wrong = [
        f"{name!r} is {shape} in the checkpoint and {has} in the server"
        for name, shape, has in found
    ]
    if wrong:
        yield Finding(
            "problem",
            f"{len(wrong)} weight(s) have another shape: {'; '.join(wrong[:_SHOWN])}"
            + ("; ..." if len(wrong) > _SHOWN else ""),
            server.url,
            _ANOTHER if any(misshapen(ours, known, trims=True)) else _PADDED,
        )
    elif not theirs and not differing:
        seen = f" (only of {', '.join(server.lengths)})" if server.lengths else ""
        yield Finding("unknown", f"the shapes of its weights{seen}", server.url)


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Settings that decide shapes and that two configurations have differently.

    Example:
        >>> _differing({"vocab_size": 320, "x": 1}, {"vocab_size": 256})
        ['vocab_size is 320 in the checkpoint and 256 in the server']
    """
    return [
        f"{name} is {ours[name]} in the checkpoint and {theirs[name]} in the server"
        for name in _SHAPING
        if name in ours and name in theirs and ours[name] != theirs[name]
    ]


def dtype_findings(server: ServerFacts, specs: Mapping[str, TensorSpec]) -> Iterator[Finding]:
    """Dtypes that the server has to cast."""
    theirs = server.info.get("dtype")
    ours = sorted({s.dtype_name for s in specs.values() if s.dtype.is_floating_point})
    if theirs in (None, "auto"):
        yield Finding("unknown", f"its dtype; the checkpoint's is {', '.join(ours)}", server.url)
    elif ours != [theirs]:
        yield Finding(
            "warning",
            f"it serves {theirs} and the checkpoint is {', '.join(ours)}: it casts what it gets",
            server.url,
            "push with --dtype engine to send what it keeps",
        )
