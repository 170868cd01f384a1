"""The installer of the real engines: once each, from whole pins, and failures stay visible.

The script runs as it is, on a tree of its own with a stand-in for Python that installs nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "engines"
ENGINES = sorted(path.name.removesuffix(".nodeps.txt") for path in SCRIPTS.glob("*.nodeps.txt"))
NEVER = ("torchvision", "sgl-kernel", "sgl_kernel", "nvidia", "cuda")

PYTHON = """#!/usr/bin/env bash
case "$*" in
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
*"pip install"*)
    echo "$*" >>"$CALLS"
    if grep -qs broken "${@: -1}"; then echo "no such package: broken"; exit 1; fi ;;
esac
"""


@dataclass(frozen=True)
class Tree:
    """A repository with the script and two engines, `one` and `two`."""

    root: Path

    def pin(self, engine: str, *lines: str) -> None:
        pins = self.root / "scripts" / "engines" / engine
        pins.with_name(f"{engine}.txt").write_text("\n".join(("torch==1.0", *lines)) + "\n")
        pins.with_name(f"{engine}.nodeps.txt").write_text(f"{engine}==1.0\n")

    def make_optional(self, engine: str) -> None:
        (self.root / "scripts" / "engines" / "optional.txt").write_text(f"{engine}\n")

    def install(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        ours = {"PYTHON": str(self.root / "python"), "CALLS": str(self.root / "calls")}
        kept = {key: value for key, value in os.environ.items() if key != "TORCH_INDEX_URL"}
        return subprocess.run(
            ["bash", str(self.root / "scripts" / "engines" / "install.sh"), *arguments],
            env={**kept, **ours, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def calls(self) -> list[str]:
        """What pip was asked for so far."""
        calls = self.root / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def installed(self) -> set[str]:
        return {stamp.parent.name for stamp in self.root.glob(".engines/*/.installed")}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    (tmp_path / "scripts" / "engines").mkdir(parents=True)
    shutil.copy(SCRIPTS / "install.sh", tmp_path / "scripts" / "engines")
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    tree = Tree(tmp_path)
    tree.pin("one")
    tree.pin("two")
    return tree


def test_all_are_installed_when_none_is_named(tree: Tree) -> None:
    done = tree.install()
    assert (done.returncode, tree.installed()) == (0, {"one", "two"})
    assert "[one] installed in" in done.stdout


def test_one_is_installed_when_it_is_named(tree: Tree) -> None:
    assert tree.install("two").returncode == 0
    assert tree.installed() == {"two"}


def test_an_optional_engine_is_left_out_when_none_is_named(tree: Tree) -> None:
    tree.make_optional("two")
    assert tree.install().returncode == 0
    assert tree.installed() == {"one"}


def test_an_optional_engine_is_installed_when_it_is_named(tree: Tree) -> None:
    tree.make_optional("two")
    assert tree.install("two").returncode == 0
    assert tree.installed() == {"two"}


def test_a_second_run_installs_nothing(tree: Tree) -> None:
    tree.install()
    before = tree.calls()
    done = tree.install()
    assert "[one] already installed" in done.stdout
    assert tree.calls() == before


def test_changed_pins_build_that_engine_anew(tree: Tree) -> None:
    tree.install()
    before = len(tree.calls())
    tree.pin("two", "numpy==2.0")
    done = tree.install()
    assert "[one] already installed" in done.stdout
    assert "[two] installed in" in done.stdout
    assert len(tree.calls()) == before + before // 2


def test_a_failure_is_seen_and_stops_no_other_engine(tree: Tree) -> None:
    tree.pin("one", "broken==1.0")
    done = tree.install()
    assert done.returncode == 1
    assert tree.installed() == {"two"}
    assert "[one] no such package: broken" in done.stdout
    assert "[one] FAILED" in done.stderr


def test_a_failed_engine_is_built_from_nothing_in_the_next_run(tree: Tree) -> None:
    tree.pin("one", "broken==1.0")
    tree.install("one")
    tree.pin("one")
    assert tree.install("one").returncode == 0
    assert tree.installed() == {"one"}


def test_an_engine_that_there_is_not(tree: Tree) -> None:
    done = tree.install("three")
    assert done.returncode == 2
    assert "there are: one two" in done.stderr
    assert tree.installed() == set()


def test_the_index_of_torch_is_asked_for_torch_alone(tree: Tree) -> None:
    tree.install("one", TORCH_INDEX_URL="http://torch.test")
    first, *others = tree.calls()
    assert first.endswith("--index-url http://torch.test torch==1.0")
    assert not any("torch.test" in call for call in others)


def test_help_lists_the_engines(tree: Tree) -> None:
    done = tree.install("--help")
    assert done.returncode == 0
    assert done.stdout.split()[-2:] == ["one", "two"]
    assert tree.calls() == []


@pytest.mark.parametrize("engine", ENGINES)
def test_pins_are_exact_and_bring_no_gpu_package(engine: str) -> None:
    files = [SCRIPTS / f"{engine}.txt", SCRIPTS / f"{engine}.nodeps.txt"]
    lines = [line for file in files for line in file.read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    assert not [name for name in pins if name.startswith(NEVER)]


def test_the_engines_are_these() -> None:
    assert {name for name in ENGINES if name.startswith("sglang")} == {
        "sglang-0.5.15.post1",
        "sglang-0.5.23",
        "sglang-0.5.9",
    }
    assert {name for name in ENGINES if name.startswith("vllm")} == {"vllm-0.27.1", "vllm-0.32.0"}


def test_only_these_may_be_missing() -> None:
    assert (SCRIPTS / "optional.txt").read_text().split() == ["vllm-0.27.1"]
