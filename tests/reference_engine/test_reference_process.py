"""The engine's process: how it starts, dies, comes back, and never outlives its parent."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import pytest

from weight_update.reference_engine import Fault, ReferenceEngine

UPDATE = "/update_weights_from_distributed"
ROOT = str(Path(__file__).resolve().parents[2])


@pytest.fixture(scope="module")
def mortal(model_a):
    """An engine that tests may kill, if they restart it."""
    with ReferenceEngine(model_a) as engine:
        yield engine


def test_die_ends_the_process_after_so_many_tensors(mortal, kit, model_b):
    trainer = kit.Trainer(mortal)
    mortal.inject(Fault(UPDATE, "die", when="after_receive", tensors=2))
    kit.post(mortal, "/begin_weight_update")
    # Either the HTTP call or the broadcast notices first.
    with pytest.raises((OSError, RuntimeError)):
        trainer.send(dict(model_b.named_parameters()))
    assert mortal.process.wait(30) == -signal.SIGKILL
    assert mortal.requests()[-1]["status"] is None
    mortal.restart()


def test_restart_comes_back_on_the_same_port_as_at_first(mortal, kit, model_a, model_b):
    trainer, url = kit.Trainer(mortal), mortal.url
    trainer.update(model_b, weight_version="9")
    kit.post(mortal, "/begin_weight_update")
    kit.post(mortal, "/pause_generation", mode="in_place")
    mortal.restart()
    assert mortal.url == url
    assert kit.get(mortal, "/model_info").json["weight_version"] == "default"
    assert mortal.generate(kit.PROMPT)["output_ids"] == kit.greedy(model_a, kit.PROMPT, 16)
    assert kit.post(mortal, "/begin_weight_update").status == 200
    reply = trainer.announce({})
    assert reply.message.startswith(f"Failed to receive weights: Group {trainer.name} not in []")
    assert [r["path"] for r in mortal.requests()].count("/begin_weight_update") >= 3


def test_each_start_shows_another_seed(mortal, kit):
    def seed():
        return kit.get(mortal, "/server_info").json["random_seed"]

    first = seed()
    assert seed() == first
    mortal.restart()
    assert seed() != first


def test_calls_of_other_threads_end_when_the_engine_is_restarted(mortal, kit):
    over = threading.Event()

    def call_on():
        while not over.is_set():
            with suppress(OSError, HTTPException):
                mortal.generate(kit.PROMPT, timeout=60)

    with kit.background() as start:
        calls = [start(call_on) for _ in range(3)]
        kit.wait_for(lambda: mortal.requests()[-1]["path"] == "/generate")
        mortal.restart()
        over.set()
        for call in calls:
            call.result(90)
    assert mortal.generate(kit.PROMPT)["output_ids"]


def test_stop_frozen_by_a_fault_leaves_the_port_open_and_silent(mortal, kit):
    mortal.inject(Fault("/ping", "stop"))
    with pytest.raises(TimeoutError):
        kit.call(mortal, "GET", "/ping", timeout=0.5)
    os.kill(mortal.pid, signal.SIGCONT)
    mortal.clear_faults()
    assert kit.get(mortal, "/ping").status == 200


def test_nobody_at_the_port_blocks_the_scheduler_but_not_the_exit(model_a, kit):
    engine = ReferenceEngine(model_a)
    with pytest.raises(TimeoutError):
        kit.call(
            engine,
            "POST",
            "/init_weights_update_group",
            {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2},
            timeout=0.5,
        )
    with pytest.raises(TimeoutError):
        engine.generate(kit.PROMPT, timeout=0.5)
    assert kit.get(engine, "/v1/loads").status == 200
    engine.process.terminate()
    assert engine.process.wait(60) in (0, -signal.SIGTERM)
    engine.stop()
    assert engine.requests()[0]["path"] == "/init_weights_update_group"


def test_the_engine_dies_with_its_parent(tmp_path, kit, model_a):
    model_a.save_pretrained(tmp_path)
    script = (
        "import os, sys\n"
        "from weight_update.reference_engine import ReferenceEngine\n"
        f"print(ReferenceEngine({str(tmp_path)!r}, wait=False).pid, flush=True)\n"
        "sys.stdin.read()\n"
        "os._exit(1)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    out, _ = parent.communicate()
    kit.wait_for(lambda: not kit.alive(int(out)))


def test_a_start_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"did not start(.|\n)*it has no config\.json"):
        ReferenceEngine(tmp_path)


def test_stop_and_kill_may_be_repeated(tmp_path):
    engine = ReferenceEngine(tmp_path, wait=False)
    for _ in range(2):
        engine.kill()
        engine.stop()
    assert engine.process.poll() is not None


def test_a_release_without_a_profile_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"there are 0\.5\.6 to 0\.5\.23"):
        ReferenceEngine(tmp_path, release="9.9")


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"\.\[demo\]"):
        ReferenceEngine(tmp_path)


def test_importing_it_is_light():
    script = (
        "import sys, weight_update.reference_engine\n"
        "print(sorted({'torch', 'transformers', 'starlette', 'uvicorn'} & set(sys.modules)))\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]", out.stderr


def test_help_teaches_an_update():
    command = [sys.executable, "-m", "weight_update.reference_engine", "--help"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "/begin_weight_update" in out
    assert "--fault" in out
