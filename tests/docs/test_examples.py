"""The examples and the tutorials run as a reader would run them, and as README and docs show."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from weight_update.demo.policy import make_model, save_checkpoint
from weight_update.reference_engine import ReferenceEngine

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))
SHOWN = re.compile(r"^\.venv/bin/python ((?:examples|tutorials)/.*)$", re.MULTILINE)
BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Without arguments unless they are here.
RUN_HERE = {
    "examples/plain_pytorch.py",
    "examples/grpo_sglang.py",
    "examples/colocated.py",
    "examples/push_from_the_command_line.py",
    "examples/ray_cluster.py",  # by test_ray_example.py
    "examples/refit_sglang_colocated.py",
    "tutorials/push_a_model_into_a_live_server.py",
    "tutorials/choose_your_row.py",
    "tutorials/train_with_grpo.py",
}


def run(script: str, *arguments: str) -> str:
    """What a script prints; fails with all of its output unless it ends well."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def commands_of(document: Path) -> set[str]:
    """The examples and tutorials that a document says to run."""
    blocks = BASH.findall(document.read_text())
    return {found for block in blocks for found in SHOWN.findall(block)}


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda path: path.name
)
def test_what_a_document_says_to_run_is_run_here(document: Path) -> None:
    """The script that runs the other commands of the README leaves these out."""
    assert commands_of(document) <= RUN_HERE


def test_the_readme_shows_examples() -> None:
    assert "examples/plain_pytorch.py" in commands_of(ROOT / "README.md")


def test_plain_pytorch_teaches_the_server_what_the_trainer_learns() -> None:
    printed = run("examples/plain_pytorch.py")
    first, *_, last = (float(loss) for loss in re.findall(r"loss (\S+)", printed))
    assert last < first
    right = [int(count) for count in re.findall(r"\((\d) of 8 right\)", printed)]
    assert len(right) == 11  # before any push, and after each
    assert right[-1] > right[0]
    assert re.search(r"http://\S+ new \(version 10\)", printed)


def checkpoint(directory: Path) -> str:
    """A tiny model like the one of the example, but with other weights."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return str(directory)


def test_plain_pytorch_pushes_to_several_servers_that_run_already(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    with ReferenceEngine(model, wait=False) as left, ReferenceEngine(model, wait=False) as right:
        servers = ["--server", left.url, "--server", right.url]
        steps = ["--steps", "2", "--push-every", "1"]
        printed = run("examples/plain_pytorch.py", *servers, "--model", model, *steps)
        for url in (left.url, right.url):
            assert f"{url} new (version 2)" in printed


def test_weights_get_to_a_colocated_server_through_shared_memory() -> None:
    printed = run("examples/colocated.py")
    before, after = re.findall(r"the engine generates (\[.*\])", printed)
    assert before != after
    assert "by ipc over shared memory" in printed
    assert re.search(r"http://\S+ new \(version 3\)", printed)


def rights(printed: str) -> list[int]:
    """How many of the eight tokens the server had right, each time that it was asked."""
    return [int(count) for count in re.findall(r"\((\d) of 8 right\)", printed)]


def test_trainer_and_server_that_share_memory_lend_it_to_each_other() -> None:
    printed = run("examples/refit_sglang_colocated.py")
    before, *after = rights(printed)
    assert after[-1] > before
    assert len(after) == 4
    assert "by ipc over shared memory" in printed
    assert re.search(r"http://\S+ new \(version 4\)", printed)


def test_a_server_of_ones_own_is_updated_by_the_colocated_row(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    with ReferenceEngine(model) as server:
        arguments = ["--server", server.url, "--model", model, "--rounds", "1"]
        printed = run("examples/refit_sglang_colocated.py", *arguments)
        assert f"{server.url} new (version 1)" in printed


@pytest.mark.parametrize("name", ["refit_sglang_colocated.py", "refit_vllm.py", "grpo_sglang.py"])
def test_a_server_without_its_model_is_refused(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), "--server", "http://a.test:1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2
    assert "--server needs --model" in ended.stderr


def test_a_checkpoint_is_pushed_from_the_command_line() -> None:
    printed = run("examples/push_from_the_command_line.py")
    before, after = re.findall(r"the server generates (\[.*\])", printed)
    assert before != after
    assert "an update would work, as far as that can be known" in printed
    assert re.search(r"http://\S+ new \(version 1\)", printed)


def checkpoint_with_tokenizer(directory: Path) -> str:
    save_checkpoint(make_model(seed=7), directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.pad_token = "f"
    tokenizer.save_pretrained(directory)
    return str(directory)


STEP = re.compile(r"reward (\S+)  lag (\S+)  mixed (\d+) of (\d+)  ess (\S+)  version (\d+)")


def test_the_reward_of_grpo_rises() -> None:
    printed = run("examples/grpo_sglang.py")
    ends = re.search(r"reward: first (\S+), last (\S+)", printed)
    assert ends, printed
    assert float(ends[2]) > float(ends[1]) + 0.15
    steps = STEP.findall(printed)
    assert [version for *_, version in steps] == [str(number) for number in range(1, 26)]
    assert {lag for _, lag, *_ in steps} <= {"0", "1"}  # it samples during a push
    assert steps[0][1:5] == ("0", "0", "64", "1.000")  # at first, engine and trainer are one policy
    assert "pushes that each collector counted: [26]" in printed


def test_grpo_on_policy_samples_from_several_servers_that_run_already(tmp_path: Path) -> None:
    model = checkpoint_with_tokenizer(tmp_path)
    with ReferenceEngine(model, wait=False) as left, ReferenceEngine(model, wait=False) as right:
        left.wait_until_ready()
        right.wait_until_ready()
        servers = ["--server", left.url, "--server", right.url, "--model", model]
        few = ["--steps", "2", "--expect-rise", "-1"]
        printed = run("examples/grpo_sglang.py", *servers, *few, "--on-policy")
        assert [step[1:] for step in STEP.findall(printed)] == [
            ("0", "0", "128", "1.000", "1"),
            ("0", "0", "128", "1.000", "2"),
        ]
        assert "pushes that each collector counted: [3, 3]" in printed
        for url in (left.url, right.url):
            assert f"{url} new (version 3)" in printed


REFUSED = """
import math, torch
from grpo_sglang import check_agreement, check_rise, tiny_llama

def refuses(check, *arguments):
    try:
        check(*arguments)
    except SystemExit as ended:
        return str(ended)

model = tiny_llama(seed=0)
print(refuses(check_agreement, model, [(1.0, 1e-9), (0.5, 1.0)]))
print(refuses(check_agreement, model, [(0.82, 0.03)]))
print(refuses(check_agreement, model, [(math.nan, 0.0)]))
print(refuses(check_agreement, model, []))
print(refuses(check_rise, [0.5, 0.6, 0.7], 0.15))
print(refuses(check_rise, [0.5, 0.9, 0.6], 0.15))
"""


def test_grpo_ends_if_the_engine_is_not_the_trainers_policy_or_the_reward_does_not_rise() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", REFUSED],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    agrees, differs, unreadable, empty, _, rises, _, stays = ended.stdout.splitlines()
    assert (agrees, rises) == ("None", "None")
    for words in (differs, unreadable):
        assert "log-probabilities are not the trainer's" in words
    assert "SGLang 0.5.19 or later" in empty
    assert "did not rise" in stays


def test_the_tutorial_keeps_its_promises() -> None:
    printed = run("tutorials/push_a_model_into_a_live_server.py")
    assert re.search(r"http://\S+ mixed \(version unknown, paused\)", printed)
    assert "Skipping the SGLang radix-cache flush" in printed


def test_the_tutorial_of_grpo_keeps_its_promises() -> None:
    printed = run("tutorials/train_with_grpo.py")
    assert re.search(r"http://\S+ mixed \(version unknown, paused\)", printed)
    assert re.search(r"\d+ of 64 answers are mixed", printed)


@pytest.mark.parametrize(
    "script",
    ["examples/grpo_sglang.py", *(f"tutorials/{path.name}" for path in TUTORIALS)],
)
def test_help_tells_what_a_script_is_for_and_runs_nothing(script: str) -> None:
    printed = run(script, "--help")
    assert printed.startswith("usage: ")
    described = " ".join(ast.get_docstring(ast.parse((ROOT / script).read_text())).split())
    assert described in " ".join(printed.split())
    assert "version 1" not in printed


def test_the_tutorial_of_the_rows_keeps_its_promises() -> None:
    printed = run("tutorials/choose_your_row.py")
    assert "Weight transfer failed" in printed
    assert "by broadcast over gloo" in printed
    assert "by ipc over shared memory" in printed
    assert "Collective{0}\nIPC{0}\nDynamo{0}\n".format("WeightSynchronizer") in printed
    assert "generation by Megatron is not there yet" in printed


SVG = "http://www.w3.org/2000/svg"
PICTURES = sorted((ROOT / "docs" / "topologies").glob("*.svg"))


def test_every_picture_is_shown_in_the_tutorial_and_every_one_that_is_shown_exists() -> None:
    text = (ROOT / "tutorials" / "choose_your_row.py").read_text()
    shown = re.findall(r"image:: \.\./docs/topologies/(\S+)", text)
    assert sorted(shown) == [picture.name for picture in PICTURES]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_says_what_it_shows(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    title, description = (root.findtext(f"{{{SVG}}}{tag}") for tag in ("title", "desc"))
    assert title
    assert description
