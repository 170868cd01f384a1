"""The command itself: quick to start, teaching in its help, clean on its streams."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import weight_update
from weight_update import options as library
from weight_update.cli import options
from weight_update.cli.output import one_interrupt, result_on_stdout
from weight_update.engines.recognition import EngineName

from . import kit
from .kit import Checkpoints, run

COMMANDS = ("push", "doctor", "demo", "bench")


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
    )


@pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from weight_update.cli.main import app\n"
        "app([*sys.argv[1:], '--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'torchrl', 'tensordict', 'transformers', 'requests'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
    )
    assert python(code, *arguments).stdout.endswith("HEAVY []\n")


def test_the_command_stands_beside_the_environments_python() -> None:
    command = Path(sys.executable).with_name("weight-update")
    done = subprocess.run(
        [command, "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"weight-update {weight_update.__version__}\n"


@pytest.mark.parametrize("command", [*COMMANDS, "bench loopback", "bench weights"])
def test_help_teaches(command: str) -> None:
    text = run(*command.split(), "--help").out
    assert "Example:" in text
    assert "Exit codes:" in text or command == "bench"  # which only lists its commands
    examples = [
        line for line in text.splitlines() if line.startswith(f"    weight-update {command}")
    ]
    assert examples
    assert all(len(shlex.split(line)) >= 2 for line in examples)


@pytest.mark.parametrize(
    "arguments", [["demo"], ["bench", "loopback"], ["bench", "weights"]], ids=" ".join
)
@pytest.mark.parametrize("lacking", ["transformers", "starlette", "uvicorn"])
def test_a_command_without_its_extra_says_what_to_install(
    arguments: list[str], lacking: str, tmp_path: Path
) -> None:
    code = (
        "import sys\n"
        "sys.modules[sys.argv.pop(1)] = None  # as if it were not installed\n"
        "from weight_update.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, lacking, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"{lacking} is not installed. weight-update {arguments[0]} needs: "
        'pip install ".[demo]" (from a clone)\n'
    )


@pytest.mark.parametrize("command", ["push", "doctor"])
def test_help_names_the_variables_that_are_read(command: str) -> None:
    text = run(command, "--help").out
    for name in (library.API_KEY_VARIABLE, library.ADMIN_API_KEY_VARIABLE):
        assert name in text
    assert library.MASTER_ADDRESS_VARIABLE in text


def test_every_command_is_listed() -> None:
    text = run("--help").out
    assert all(f"\n  {command} " in text for command in COMMANDS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_there_for_shells(shell: str) -> None:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "weight_update.cli", "--show-completion", shell],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment,
    )
    assert "_WEIGHT_UPDATE_COMPLETE" in done.stdout


def test_completion_completes_commands_and_choices() -> None:
    def completed(words: str) -> str:
        line = shlex.split(words)
        environment = {
            **os.environ,
            "_WEIGHT_UPDATE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(line) if words.endswith(" ") else len(line) - 1),
        }
        command = [sys.executable, "-m", "weight_update.cli"]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=60, check=False
        ).stdout

    assert set(completed("weight-update ").split()) == set(COMMANDS)
    assert "in_place" in completed("weight-update push --pause-mode in")


def test_the_pause_modes_are_the_librarys() -> None:
    assert {mode.value for mode in options.PauseMode} == set(get_args(library.PauseMode))


def test_the_engines_are_those_that_can_be_recognised() -> None:
    assert {name.value for name in options.EngineName} == set(get_args(EngineName))


@pytest.mark.parametrize(
    "words",
    [
        "push --server http://a:1 --pause-mode x .",
        "doctor --server http://a:1 --engine x",
        "push --server http://a:1 --transport x .",
        "bench gpu --job x",
    ],
)
def test_a_wrong_choice_is_told_in_plain_words(words: str) -> None:
    ended = run(*words.split())
    assert ended.code == 2
    last = ended.err.strip().splitlines()[-1]
    assert last.startswith("Error: Invalid value for '--")
    assert "'x' is not one of '" in last
    assert "Value error" not in ended.err


def test_the_help_says_what_the_size_of_a_bucket_depends_on() -> None:
    text = " ".join(run("push", "--help").out.split())
    assert "By default it is chosen from the memory that is free" in text


def test_what_native_code_prints_stays_off_standard_output() -> None:
    code = (
        "import os\n"
        "from weight_update.cli.output import give, result_on_stdout\n"
        "with result_on_stdout():\n"
        "    os.write(1, b'chatter')\n"
        "    give({'a': 1})\n"
    )
    done = python(code)
    assert (done.stdout.split(), done.stderr) == (["{", '"a":', "1", "}"], "chatter")


def test_a_second_interrupt_does_not_disturb_what_the_first_began() -> None:
    code = (
        "import os, signal\n"
        "from weight_update.cli.output import one_interrupt\n"
        "try:\n"
        "    with one_interrupt():\n"
        "        try:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "        except KeyboardInterrupt:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "            print('settled')\n"
        "            raise\n"
        "except KeyboardInterrupt:\n"
        "    print('ended')\n"
    )
    assert python(code).stdout.split() == ["settled", "ended"]


def test_helpers_leave_streams_and_signals_as_they_were() -> None:
    import signal

    before = (signal.getsignal(signal.SIGINT), sys.stdout)
    with result_on_stdout(), one_interrupt():
        pass
    assert (signal.getsignal(signal.SIGINT), sys.stdout) == before


_PEAK = """
import sys
from weight_update import SGLangWeightSyncScheme
from weight_update.cli.main import app

def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew
app(sys.argv[1:], standalone_mode=False)
print(status("VmHWM") - before)
"""


@pytest.mark.timeout(400)
def test_a_push_holds_one_shard_and_two_buckets(
    two: list[kit.ReferenceEngine], tmp_path: Path, checkpoints: Checkpoints
) -> None:
    import torch
    from safetensors.torch import save_file

    mebi = 1 << 20
    for number in range(1, 7):  # names that no engine knows: it receives them and drops them
        tensors = {f"s{number}.t{t}": torch.ones(2 * mebi) for t in range(5)}
        save_file(tensors, tmp_path / f"model-{number:05d}-of-00006.safetensors")
    shard_bytes, bucket_bytes = 40 * mebi, 8 * mebi

    done = python(
        _PEAK,
        *("push", "--server", two[0].url, str(tmp_path), "--no-check"),
        *("--bucket-bytes", str(bucket_bytes), "--timeout", "120"),
    )

    growth = int(done.stdout.splitlines()[-1])
    assert growth < shard_bytes + 2 * bucket_bytes + 24 * mebi  # of 240 MiB in all
