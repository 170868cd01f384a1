"""``bench gpu`` runs without a GPU too: narrow models, over gloo and host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from weight_update import SGLangWeightSyncScheme
from weight_update.bench.gpu import JOBS, ON_ONE, ON_TWO, GpuJobs, run_gpu
from weight_update.bench.gpu.colocated import BareCopies, hands
from weight_update.bench.gpu.look import look_at, sums_of
from weight_update.bench.gpu.models import BigModel, change
from weight_update.bench.rows import Row
from weight_update.reference_engine import ReferenceEngine
from weight_update.weights.extract import extract_weights

CPU = torch.device("cpu")
FAMILIES = ("llama", "moe")


def narrow(gpus: int, *jobs: Any) -> dict[str, Row]:
    how = GpuJobs(gpus, jobs, rounds=2, layers=2, device="cpu", shrink=32)
    assert how.objection() is None
    return {row.job: row for row in run_gpu(how, lambda _: None)}


@pytest.mark.parametrize(("family", "tensors"), [("llama", 291), ("moe", 4719)])
def test_the_models_have_the_tensors_that_are_promised(family: Any, tensors: int):
    assert len(set(BigModel(family).tensor_names())) == tensors


@pytest.mark.parametrize(("family", "gigabytes"), [("llama", 16.06), ("moe", 16.2)])
def test_the_models_have_the_size_that_is_promised(family: Any, gigabytes: float):
    assert BigModel(family).nbytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_models_names_are_those_that_an_update_sends(family: Any):
    model = BigModel(family, layers=1, shrink=32)
    sent = [weight.spec.name for weight in extract_weights(model.build(CPU))]

    assert sorted(sent) == sorted(model.tensor_names())


def test_every_seed_gives_every_tensor_other_values():
    model = BigModel("llama", layers=1, shrink=32).build(CPU)
    before = sums_of(model)
    change(model, seed=1)
    after = sums_of(model)

    assert before.keys() == after.keys()
    assert not [name for name in before if before[name] == after[name]]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_is_looked_at_without_moving_its_weights(family: Any, tmp_path: Path):
    model = BigModel(family, layers=1, shrink=32)
    source = model.build(CPU)
    model.save(tmp_path)
    with ReferenceEngine(**model.engine_options(tmp_path)) as engine:
        before = look_at(engine.url)
        with SGLangWeightSyncScheme(engine.url, verify="off").create_sender() as sender:
            sender.update_weights(source)
        after = look_at(engine.url)

    assert before.sums.keys() == after.sums.keys()
    assert before.sums != sums_of(source)
    assert after.sums == sums_of(source)
    assert after.addresses == before.addresses


def test_bare_copies_leave_the_tensors_as_they_were():
    tensors = [torch.arange(5.0), torch.arange(6.0).view(2, 3)]
    before = [tensor.clone() for tensor in tensors]

    assert BareCopies(tensors).seconds() > 0
    assert all(map(torch.equal, tensors, before))


@pytest.fixture(scope="module", params=FAMILIES)
def between_two(request: pytest.FixtureRequest) -> dict[str, Row]:
    return narrow(2, request.param)


@pytest.mark.timeout(300)
def test_a_model_between_two_devices_has_three_rows(between_two: dict[str, Row]):
    rows = between_two

    kinds = [row.limit for row in rows.values()]
    assert kinds == ["one huge broadcast", "one huge broadcast", "TorchRL's settings"]
    assert [row.correct for row in rows.values()] == [True, True, None]
    transfer, whole, _ = rows.values()
    assert transfer.median.seconds < whole.median.seconds
    assert {"transfer", "pause", "continue"} <= set(whole.to_dict()["seconds_by_phase"])


def test_nothing_is_promised_of_a_small_model(between_two: dict[str, Row]):
    assert all(row.aim is None for row in between_two.values())


@pytest.mark.timeout(300)
def test_engines_that_fail_cost_a_typed_error_in_time_and_no_group():
    rows = narrow(2, "failures")

    assert [row.to_dict()["failed"]["error"] for row in rows.values()] == [
        "EngineRejected",
        "EngineUnreachable",
        "UpdateTimeout",
    ]
    assert [row.broken for row in rows.values()] == [[], [], []]
    assert [row.correct for row in rows.values()] == [True] * 3


@pytest.mark.timeout(300)
def test_a_trainer_with_other_device_numbers_updates_beside_one_without():
    (row,) = narrow(2, "renumbered").values()

    assert row.correct
    assert "by broadcast" in row.to_dict()["route"]


@pytest.mark.timeout(300)
def test_a_model_on_one_device_is_handed_over_in_every_way():
    rows = narrow(1, "ipc")

    assert [row.correct for row in rows.values()] == [True] * len(hands(1))
    assert all("ipc" in row.to_dict()["route"] for row in rows.values())


@pytest.mark.timeout(300)
def test_merged_adapters_are_measured_beside_the_plain_push():
    pytest.importorskip("peft")
    (row,) = narrow(1, "lora").values()

    assert row.correct
    assert row.limit == "plain push"


def test_each_job_belongs_to_a_number_of_gpus():
    assert (*ON_ONE, *ON_TWO) == JOBS


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        (GpuJobs(1, ("moe",), device="cpu"), "not one of --gpus 1"),
        (GpuJobs(2, ("ipc",), device="cpu"), "not one of --gpus 2"),
        (GpuJobs(device="tpu"), "neither cpu nor cuda"),
        (GpuJobs(99), "needs as many"),
    ],
)
def test_jobs_that_cannot_be_run_are_refused(jobs: GpuJobs, words: str):
    assert words in str(jobs.objection())
