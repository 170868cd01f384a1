"""Each room imports what the map of the code allows, and nothing else of ours."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from torchrl.collectors import Collector
from torchrl.modules.llm import SGLangWrapper
from torchrl.weight_update import WeightSyncScheme

PACKAGE = Path(__file__).parents[2] / "weight_update"

BASE = {"errors", "facts", "options", "report", "waiting"}
TORCH = {"torch_private"}
PUBLIC = {"__init__", "errors", "options", "report", "rollouts"}
MAY_IMPORT = {
    "errors": BASE,
    "facts": BASE,
    "options": BASE,
    "report": BASE,
    "waiting": BASE,
    "ports": set(),
    "rollouts": {"errors"},
    "torch_private": {"errors"},
    "weights": BASE | TORCH,
    "transports": BASE | TORCH | {"weights"},
    "engines": BASE | {"weights"},
    "update": BASE | {"weights"},
    "delivery": BASE | {"weights", "transports", "engines", "update"},
    "collectors": BASE | {"weights", "engines", "rollouts"},
    "schemes": BASE | {"weights", "transports", "update", "delivery", "collectors"},
    "synchronizers": BASE | {"weights", "transports", "engines", "update", "delivery"},
    "vllm_worker": set(),
    "reference_engine": set(),
    "demo": PUBLIC | {"ports", "reference_engine"},
    "bench": PUBLIC | {"ports", "reference_engine", "weights", "transports"},
}
ANY = {"__init__", "cli"}
IMPORTS = (ast.Import, ast.ImportFrom)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            parts = name.split(".")
            if parts[0] == "weight_update":
                yield parts[1] if len(parts) > 1 else "__init__"


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_room_is_on_the_map():
    assert {room_of(path) for path in FILES} == set(MAY_IMPORT) | ANY


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_what_its_room_may(path: Path):
    room = room_of(path)
    if room in ANY:
        return
    assert set(imported_rooms(path)) <= MAY_IMPORT[room] | {room}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports_when_run(node: ast.AST) -> Iterator[str]:
    """Modules, and names of modules, that are imported at the top or in functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield from (child.module, *(f"{child.module}.{alias.name}" for alias in child.names))
        elif not is_for_types(child):
            yield from imports_when_run(child)


def test_no_files_import_each_other_in_a_circle():
    homes = {module_of(path): ast.parse(path.read_text()) for path in FILES}
    imports = {name: set(imports_when_run(tree)) & set(homes) for name, tree in homes.items()}

    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def private_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, IMPORTS) else []
        home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for name in (home + name for name in names):
            top, *parts = name.split(".")
            if top in ("torch", "torchrl") and any(part.startswith("_") for part in parts):
                yield name


def accessed(path: Path) -> set[str]:
    """Names after a dot, those of functions, and texts, which may be asked for by ``getattr``."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    texts = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    return functions | texts | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_private_names_of_torchrl_have_one_home():
    """Its table has all of them, each with its reason."""
    home = PACKAGE / "collectors" / "torchrl_adapter.py"
    listed = set(re.findall(r"\b_(?!_)\w+", ast.get_docstring(ast.parse(home.read_text()))))
    used = accessed(home)
    theirs = set(dir(WeightSyncScheme)) | set(dir(Collector)) | set(dir(SGLangWrapper))
    private = {name for name in theirs if re.match("_[a-zA-Z]", name)}

    assert used & private <= listed
    for path in FILES:
        assert path == home or not accessed(path) & listed, path


def test_private_names_of_torch_have_one_home():
    users = {path.parent for path in FILES if any(private_imports(path))}

    assert users == {PACKAGE / "torch_private"}
