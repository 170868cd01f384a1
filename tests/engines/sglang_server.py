"""A real SGLang server, run as a child process of the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import requests

from .engine_server import LAUNCHERS, EngineServer, engine_python
from .models import SEED_A, SEED_B, TinyModels, save_tiny_model

RELEASE = "0.5.23"  # the one that most tests run on
IDLE_TIMEOUT = 60.0

_REWRITE = """
import sys
import models
for directory in sys.argv[1:]:
    config = models.tiny_config()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    models.tiny_tokenizer().save_pretrained(directory)
"""


class SGLangServer(EngineServer):
    """One SGLang server on one checkpoint.

    ``with SGLangServer(model_dir, log_path) as server: server.generate([5, 6, 7], 8)``
    """

    def __init__(
        self,
        model_dir: Path,
        log_path: Path,
        extra_args: Sequence[str] = (),
        release: str = RELEASE,
    ) -> None:
        """Choose a free port; nothing is started yet."""
        super().__init__(engine_of(release), log_path)
        self.release = release
        self.model_dir = model_dir
        self._extra_args = tuple(extra_args)

    def command(self) -> Sequence[str]:
        """The launcher and its arguments."""
        launcher = str(LAUNCHERS / "launch_sglang_cpu.py")
        model = ("--model-path", str(self.model_dir))
        return [launcher, *model, "--port", str(self.port), *self._extra_args]

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, temperature: float = 0
    ) -> list[int]:
        """Continue a prompt by exactly `max_new_tokens` tokens and return them."""
        sampling = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "ignore_eos": True,
        }
        answer = self.post("generate", {"input_ids": list(input_ids), "sampling_params": sampling})
        return [int(token) for token in answer["output_ids"]]

    def load(self, model_dir: Path) -> None:
        """Make the server serve another checkpoint of the same architecture, read from disk."""
        # A request still runs for a moment after its answer. Loading would be refused then, and
        # 0.5.15 ends.
        self.wait_until_idle()
        self.post("update_weights_from_disk", {"model_path": str(model_dir)})

    def wait_until_idle(self) -> None:
        """Wait until no request runs: only then can the cache be flushed."""
        end = time.monotonic() + IDLE_TIMEOUT
        while self.status("POST", "flush_cache") != 200:
            if time.monotonic() > end:
                raise TimeoutError(f"{self.engine} is not idle\n{self.log_tail()}")
            time.sleep(0.02)

    def label(self) -> str:
        """The version label that the server shows."""
        return str(self.get("model_info")["weight_version"])

    def is_ready(self) -> bool:
        """Tell whether it generates; a paused server does not."""
        return self.status("GET", "ready") == 200

    def is_serving(self) -> bool:
        """Tell whether it generates; a dead server does not, and one that hangs does not either."""
        try:
            return self.status("GET", "ready", timeout=20) == 200
        except requests.RequestException:
            return False

    def restart(self) -> None:
        """Start it anew on its port, on the checkpoint that it was started on."""
        self.stop()
        self.start()

    def kill(self) -> None:
        """Kill all its processes at once; :meth:`restart` heals that."""
        os.killpg(self.pid, signal.SIGKILL)

    def kill_scheduler(self) -> None:
        """Kill the process that holds the weights, and no other."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                ours = os.getpgid(int(process.name)) == self.pid
                if ours and b"sglang::scheduler" in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)

    def freeze(self) -> None:
        """Stop all its processes: its sockets stay open and nobody answers."""
        os.killpg(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let frozen processes go on."""
        os.killpg(self.pid, signal.SIGCONT)


def engine_of(release: str) -> str:
    """Name of a release's environment."""
    return f"sglang-{release}"


def save_models_for(release: str, root: Path) -> TinyModels:
    """Write checkpoints A and B in the words of the transformers that a release runs with.

    The weights are this process's own: the same seed makes other ones in another transformers.
    """
    models = TinyModels(
        a=save_tiny_model(root / "model-a", SEED_A), b=save_tiny_model(root / "model-b", SEED_B)
    )
    subprocess.run(
        [engine_python(engine_of(release)), "-c", _REWRITE, models.a, models.b],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "HF_HUB_OFFLINE": "1"},
        check=True,
        timeout=300,
    )
    return models
