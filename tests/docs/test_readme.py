"""What README.md and CONTRIBUTING.md show works, and what they name exists."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weight_update.reference_engine import ReferenceEngine

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [5, 9, 17, 33, 2, 40, 41, 8]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
MADE_LATER = (".venv/", ".engines/")


def tiny_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def greedy(model: LlamaForCausalLM) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
    )
    return list(out[0, len(PROMPT) :].tolist())


class CountingCollector:
    """A collector as far as a sender sees it."""

    policy_version = 0

    def increment_version(self) -> None:
        self.policy_version += 1


def test_the_example_without_a_server_changes_what_the_engine_says(tmp_path: Path) -> None:
    blocks = [
        body
        for language, body in FENCE.findall((ROOT / "README.md").read_text())
        if language == "python"
    ]
    script = tmp_path / "try_it.py"
    script.write_text(next(block for block in blocks if "ReferenceEngine(" in block))

    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)

    before, *report, after = done.stdout.splitlines()
    assert before.startswith("[")
    assert "new (version 1)" in report[-1]
    assert after != before


@pytest.fixture
def engines() -> Iterator[tuple[ReferenceEngine, ReferenceEngine]]:
    model = tiny_llama(0)
    with ReferenceEngine(model, wait=False) as a, ReferenceEngine(model, wait=False) as b:
        yield a, b


def test_the_first_example_of_the_readme_updates_both_servers(
    engines: tuple[ReferenceEngine, ReferenceEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = FENCE.findall(text_of("README.md"))
    code = next(code for language, code in blocks if language == "python")
    for name, engine in zip("ab", engines, strict=True):
        assert f"http://{name}:30000" in code
        code = code.replace(f"http://{name}:30000", engine.url)
    policy, collector = tiny_llama(1), CountingCollector()
    exec(compile(code, "README.md", "exec"), {"policy": policy, "collector": collector})
    printed = capsys.readouterr().out
    for engine in engines:
        assert engine.generate(PROMPT, max_new_tokens=16)["output_ids"] == greedy(policy)
        assert f"{engine.url} new (version 1)" in printed
    assert collector.policy_version == 1


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def code_of(text: str) -> list[str]:
    """What stands in code blocks and between backticks."""
    blocks = [code for _, code in FENCE.findall(text)]
    return blocks + re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def paths_in(code: str) -> list[str]:
    """What looks like a path inside the repository: words with slashes, none in front."""
    found = re.findall(r"(?<![\w/:.<>*-])(?:[\w.-]+/)+[\w.-]*", code)
    return [path for path in found if not path.startswith(MADE_LATER)]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_link_and_path_leads_somewhere(document: str) -> None:
    text = text_of(document)
    links = re.findall(r"\]\(([^)#\s]+)", text)
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    # The maps of the source name its folders as seen from the package.
    homes = (ROOT, ROOT / "weight_update")
    paths = [path for code in code_of(text) for path in paths_in(code)]
    missing += [path for path in paths if not any((home / path).exists() for home in homes)]
    assert not missing, f"{document} names {missing}"


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_make_target_exists(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    commands = [
        command
        for code in code_of(text_of(document))
        for command in re.findall(r"^make (.+)", re.sub(r"<.*?>", "", code), re.MULTILINE)
    ]
    # The other words of a command set variables: make demo ENGINE=sglang.
    named = {word for command in commands for word in command.split() if "=" not in word}
    assert named
    assert named <= targets
