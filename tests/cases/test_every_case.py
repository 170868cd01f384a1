"""Every case of the list that needs no GPU has a test named after it, or a skip with a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

#: Marked CPU or ENGINE in the list of cases, by section.
CASES = {
    "failures_and_hangs": "C01 C02 C25 C50 C38 C56",
    "wrong_weights": "C05 C26 C30 C29 C34 C52 C54 C74 C82",
    "versions_and_servers": "C07 C08 C22 C23 C24 C31",
    "cache_and_pause": "C09 C10 C17 C18 C81",
    "releases": "C03",
    "layouts": "C04 C43",
    "sharded": "C06 C21 C43",
    "addresses": "C11 C20 C37 C45",
    "names": "C14 C15 C16 C36 C61 C62",
    "lora": "C13 C27 C42 C70 C79",
    "http": "C12 C48 C51",
    "memory": "C21 C49 C59",
    "threads_and_life": "C40 C47 C63 C64 C66 C77 C78",
}
#: May not be skipped as a whole.
WITHOUT_EXCEPTION = "C01 C02 C05 C07 C08 C09 C10 C22 C25 C30 C40 C47 C50"

FOLDER = Path(__file__).parent
#: Ranks are started once for all tests of their folder.
FILES = {"sharded": FOLDER.parent / "sharded" / "test_ranks.py"}
PAIRS = [(section, case) for section, cases in CASES.items() for case in cases.split()]


def functions_of(section: str, case: str) -> Iterator[ast.FunctionDef]:
    tree = ast.parse(FILES.get(section, FOLDER / f"test_{section}.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith(f"test_{case.lower()}_"):
            yield node


def skip_of(test: ast.FunctionDef) -> str | None:
    """The reason of an unconditional skip; None for a test that runs."""
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.skip":
            reasons = [k.value for k in decorator.keywords if k.arg == "reason"]
            return str(ast.literal_eval(reasons[0])) if reasons else ""
    return None


@pytest.mark.parametrize(("section", "case"), PAIRS)
def test_a_case_has_a_test_or_a_skip_that_says_why(section: str, case: str) -> None:
    skips = [skip_of(test) for test in functions_of(section, case)]
    assert skips, f"no test is named after {case}"
    assert all(skip is None or len(skip) > 40 for skip in skips), f"{case}: a skip without reason"
    if case in WITHOUT_EXCEPTION:
        assert None in skips, f"{case} must not be skipped"


def test_no_test_is_named_after_a_case_that_does_not_exist() -> None:
    known = {case.lower() for _, case in PAIRS} | {"c33", "c41"}  # those two are for GPUs
    for path in (*FOLDER.glob("test_*.py"), *FILES.values()):
        named = set(re.findall(r"^def test_(c\d\d)_", path.read_text(), re.M))
        assert named <= known, path.name
