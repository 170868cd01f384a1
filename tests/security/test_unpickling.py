"""Nothing that comes over the network is unpickled, evaluated or executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "weight_update"
FILES = sorted(PACKAGE.rglob("*.py"))

#: Modules that rebuild objects from bytes.
REBUILDING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
#: Calls that run what they are given, or that unpickle it.
RUNNING = {
    *("eval", "exec", "compile", "__import__"),
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"),
    *("numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("runpy.run_path", "runpy.run_module", "importlib.import_module"),
    *("pandas.read_pickle", "code.interact", "ctypes.CDLL"),
}
#: Collectives of torch that pickle whatever a peer sends.
OBJECT_COLLECTIVES = {
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("recv_object_list", "send_object_list", "rpc_sync", "rpc_async", "remote"),
}
OWN_RANKS = "between processes that one test engine has started itself, never with a trainer"
CLUSTER = "Ray's call of an actor that the user handed over: Ray pickles within its own cluster"
#: What is allowed, and why none of it is data from outside.
ALLOWED = {
    ("__init__.py", "importlib.import_module"): "the names are those of a table in the file",
    (
        "synchronizers/__init__.py",
        "importlib.import_module",
    ): "the names are those of a table in the file",
    ("engines/sglang/actor.py", ".remote"): CLUSTER,
    ("engines/sglang/actor.py", "method.remote"): CLUSTER,
    ("collectors/remote_counting.py", "handle.increment_version.remote"): CLUSTER,
    ("collectors/remote_counting.py", "h.cascade_execute.remote"): CLUSTER,
    ("collectors/remote_counting.py", "h.register_scheme_receiver.remote"): CLUSTER,
    (
        "engines/sglang/payload.py",
        "pickle",
    ): "it only writes: SGLang takes tensors in this form alone",
    ("reference_engine/opening.py", "pickle"): "it makes what is on its list, as SGLang does",
    ("engines/lora.py", "pickle"): "it only writes: SGLang takes adapters in this form alone",
    ("reference_engine/ranks.py", "dist.broadcast_object_list"): OWN_RANKS,
    ("reference_engine/ranks.py", "dist.all_gather_object"): OWN_RANKS,
}


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name or attribute; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def suspicious(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in REBUILDING)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in REBUILDING:
            yield str(node.module)
        elif isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{a.name}" for a in node.names}
            yield from sorted(full & RUNNING)
            yield from (a.name for a in node.names if a.name in OBJECT_COLLECTIVES)
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[str]:
    name = dotted(node.func)
    if name == "torch.load" and _is_safe(node):
        return
    if name in RUNNING or name.rpartition(".")[2] in OBJECT_COLLECTIVES:
        yield name
    if any(k.arg == "shell" and not _is_false(k.value) for k in node.keywords):
        yield f"{name}(shell=)"
    if any(k.arg == "trust_remote_code" and not _is_false(k.value) for k in node.keywords):
        yield f"{name}(trust_remote_code=)"


def _is_safe(load: ast.Call) -> bool:
    """Whether a call of ``torch.load`` takes tensors and plain values alone, and always so."""
    return any(
        k.arg == "weights_only" and isinstance(k.value, ast.Constant) and k.value.value is True
        for k in load.keywords
    )


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_rebuilds_no_object_from_bytes_and_runs_no_text(path: Path) -> None:
    place = str(path.relative_to(PACKAGE))
    found = set(suspicious(ast.parse(path.read_text())))
    assert {name for name in found if (place, name) not in ALLOWED} == set()


def test_every_exception_is_still_needed_and_has_a_reason() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in FILES
        for name in suspicious(ast.parse(path.read_text()))
    }
    assert set(ALLOWED) <= found
    assert all(len(reason) > 20 for reason in ALLOWED.values())


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from dill import loads",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import torch\ntorch.load(path, weights_only=safe)",
        "from torch import load",
        "eval(text)",
        "dist.broadcast_object_list(box)",
        "subprocess.run(command, shell=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "import yaml\nyaml.load(text)",
    ],
)
def test_the_search_finds_what_it_is_for(code: str) -> None:
    """A check that finds nothing anywhere would prove nothing."""
    if code == "from torch import load":
        assert list(suspicious(ast.parse(code))) == ["torch.load"]
    else:
        assert list(suspicious(ast.parse(code)))


def test_tensors_and_plain_values_alone_may_be_loaded() -> None:
    assert not list(suspicious(ast.parse("torch.load(path, weights_only=True)")))
