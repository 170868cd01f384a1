"""The rows of vLLM and dynamo over facades of ours, on fakes: what a refit does, and what fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.vllm_fake import FakeVLLM, checkpoint, signature
from tests.vllm_fake.dynamo import DynamoWorker
from weight_update.errors import ConfigurationError, NotSupported, WeightUpdateError
from weight_update.synchronizers import (
    CollectiveWeightSynchronizer,
    DynamoGeneration,
    DynamoWeightSynchronizer,
    StaticCluster,
    TorchPolicy,
    VLLMGeneration,
    create_weight_synchronizer,
)

OLD, NEW = signature(checkpoint(0)), signature(checkpoint(1))
CLUSTERS = {"train_cluster": StaticCluster(1), "inference_cluster": StaticCluster(2)}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[FakeVLLM]]:
    started = [FakeVLLM(), FakeVLLM()]
    yield started
    for server in started:
        server.stop()


@contextmanager
def row(backend: str, urls: list[str]) -> Iterator[Any]:
    """The row of a backend, and a trainer whose weights are those of its seed."""
    kinds = {"vllm": VLLMGeneration, "dynamo": DynamoGeneration}
    generation = kinds[backend](urls)
    trainer = Trainer()
    made = create_weight_synchronizer(
        TorchPolicy(trainer.weights),
        generation,
        backend,
        colocated=False,
        refit_timeout_s=60.0,
        **CLUSTERS,
    )
    made.init_communicator()
    try:
        yield made, trainer
    finally:
        made.shutdown()
        generation.shutdown()


class Trainer:
    """Holds the weights of a seed."""

    def __init__(self) -> None:
        self.seed = 0

    def weights(self) -> dict[str, Any]:
        return checkpoint(self.seed)


@pytest.fixture(params=["vllm", "dynamo"])
def refit(request: Any, servers: list[FakeVLLM]) -> Iterator[Any]:
    """A row after its first refit."""
    if request.param == "vllm":
        with row("vllm", [server.url for server in servers]) as (made, trainer):
            made.sync_weights()
            yield made, trainer
        return
    with (
        DynamoWorker(servers[0].url, "sidecar") as a,
        DynamoWorker(servers[1].url, "worker") as b,
        row("dynamo", [a.url, b.url]) as (made, trainer),
    ):
        made.sync_weights()
        yield made, trainer


def test_a_refit_brings_the_policys_weights_to_all_and_counts(
    servers: list[FakeVLLM], refit: Any
) -> None:
    made, trainer = refit
    before = made.report.version
    trainer.seed = 1

    metrics = made.sync_weights()

    assert not made.is_stale
    assert [server.served() for server in servers] == [NEW, NEW]
    assert metrics["version"] == made.report.version == before + 1


def test_a_refit_that_fails_stays_stale_until_one_succeeds(
    servers: list[FakeVLLM], refit: Any
) -> None:
    made, trainer = refit
    trainer.seed = 1
    servers[1].inject("/update_weights", "torn")

    with pytest.raises(WeightUpdateError, match="Weight transfer failed"):
        made.sync_weights()

    assert made.is_stale
    assert servers[1].paused
    made.sync_weights()
    assert not made.is_stale
    assert [server.served() for server in servers] == [NEW, NEW]


def test_each_backend_has_its_row(servers: list[FakeVLLM]) -> None:
    with row("vllm", [servers[0].url]) as (made, _):
        assert type(made) is CollectiveWeightSynchronizer
    with DynamoWorker(servers[0].url, "worker") as worker, row("dynamo", [worker.url]) as (made, _):
        assert type(made) is DynamoWeightSynchronizer
        assert made.reconcile_communicator([]) is None


@pytest.mark.parametrize(
    ("generation", "backend"),
    [(VLLMGeneration("http://a:1"), "dynamo"), (DynamoGeneration("http://a:1"), "vllm")],
    ids=["vllm", "dynamo"],
)
def test_engines_of_another_backend_are_refused(generation: Any, backend: str) -> None:
    with pytest.raises(ConfigurationError, match="generation_backend="):
        create_weight_synchronizer(
            TorchPolicy(Trainer().weights), generation, backend, colocated=False, **CLUSTERS
        )


def test_colocated_dynamo_is_refused_with_what_works() -> None:
    with pytest.raises(NotSupported, match="dynamo"):
        create_weight_synchronizer(
            TorchPolicy(Trainer().weights), DynamoGeneration("http://a:1"), "dynamo", colocated=True
        )
