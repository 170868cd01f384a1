"""The factory: the table in its order, and what is refused before anything exists."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import weight_update
from weight_update import ConfigurationError, NotSupported, create_weight_synchronizer
from weight_update.synchronizers import (
    CollectiveWeightSynchronizer,
    DynamoWeightSynchronizer,
    IPCWeightSynchronizer,
    SGLangColocatedWeightSynchronizer,
    SGLangDisaggregatedWeightSynchronizer,
    WeightSynchronizer,
)

from .nemo import Journal, NemoCluster, NemoPolicy, NemoSGLang, NemoVLLM

CLUSTERS = {"train_cluster": NemoCluster(2), "inference_cluster": NemoCluster(2)}
MEGATRON = {"megatron_cfg": {"enabled": True}}
RELEASE = {"release_grads_before_refit": True}


def sides(backend: str, policy_cfg: Any = None, transport: Any = None) -> tuple[Any, Any]:
    journal = Journal()
    generation = (NemoSGLang if backend == "sglang" else NemoVLLM)(journal)
    if transport is not None:
        generation.cfg["refit_transport"] = transport
    return NemoPolicy(journal, policy_cfg), generation


ROWS = [
    ("sglang", True, {}, SGLangColocatedWeightSynchronizer),
    ("sglang", False, {}, SGLangDisaggregatedWeightSynchronizer),
    ("vllm", True, {}, IPCWeightSynchronizer),
    ("vllm", False, CLUSTERS, CollectiveWeightSynchronizer),
    ("dynamo", False, CLUSTERS, DynamoWeightSynchronizer),
]


@pytest.mark.parametrize(("backend", "colocated", "clusters", "kind"), ROWS)
def test_a_deployment_has_its_row(backend: str, colocated: bool, clusters: Any, kind: type):
    made = create_weight_synchronizer(*sides(backend), backend, colocated, **clusters)
    assert type(made) is kind
    assert isinstance(made, WeightSynchronizer)
    assert made.is_stale


@pytest.mark.parametrize(("backend", "colocated", "clusters", "kind"), ROWS)
def test_mocks_have_no_configuration(backend: str, colocated: bool, clusters: Any, kind: type):
    made = create_weight_synchronizer(MagicMock(), MagicMock(), backend, colocated, **clusters)
    assert type(made) is kind


def test_a_policy_may_have_no_configuration():
    _, generation = sides("vllm")
    policy = SimpleNamespace(stream_weights_via_ipc_zmq=print)
    made = create_weight_synchronizer(policy, generation, "vllm", True)
    assert isinstance(made, IPCWeightSynchronizer)


def test_sglang_apart_takes_any_trainer():
    plain = create_weight_synchronizer(*sides("sglang"), "sglang", False)
    megatron = create_weight_synchronizer(*sides("sglang", MEGATRON), "sglang", False)
    assert type(plain) is type(megatron)


# Backend, colocated, the policy's configuration, transport, words, what works instead.
LATER = [
    ("megatron", True, None, None, "Megatron", "'vllm' or 'sglang'"),
    ("megatron", False, None, None, "Megatron", "'vllm' or 'sglang'"),
    ("trtllm", True, None, None, "TensorRT-LLM", "'vllm' or 'sglang'"),
    ("trtllm", False, None, None, "TensorRT-LLM", "'vllm' or 'sglang'"),
    ("dynamo", True, None, None, "dynamo on the trainer's own", "colocated=False"),
    ("vllm", False, None, "nccl_reshard", "nccl_reshard", "refit_transport=None"),
    ("vllm", False, None, "nixl", "checkpoint engine", "refit_transport=None"),
    ("sglang", False, None, "nixl", "for vLLM alone", "refit_transport=None"),
    ("megatron", False, None, "nixl", "for vLLM alone", "refit_transport=None"),
]


@pytest.mark.parametrize(("backend", "colocated", "cfg", "transport", "words", "instead"), LATER)
def test_what_comes_later_says_what_works_instead(
    backend: str, colocated: bool, cfg: Any, transport: Any, words: str, instead: str
):
    with pytest.raises(NotImplementedError, match=words) as caught:
        create_weight_synchronizer(*sides(backend, cfg, transport), backend, colocated, **CLUSTERS)
    assert isinstance(caught.value, NotSupported)
    assert instead in str(caught.value)
    assert not isinstance(caught.value, ValueError)


# Backend, colocated, the policy's configuration, transport, further arguments, words.
REFUSED = [
    ("sgl", False, None, None, {}, "Unknown generation backend 'sgl'; supported: dynamo"),
    ("vllm", False, RELEASE, None, CLUSTERS, "needs a Megatron policy"),
    ("vllm", True, RELEASE | MEGATRON, None, {}, "colocated=False"),
    ("sglang", False, RELEASE | MEGATRON, None, {}, "vLLM or TensorRT-LLM"),
    ("vllm", False, RELEASE | MEGATRON, "nixl", CLUSTERS, "does not go with refit_transport"),
    ("vllm", True, None, "nixl", {}, "refit_transport='nixl' is only supported where"),
    ("sglang", True, None, "nixl", {}, "refit_transport='nixl' is only supported where"),
    ("sglang", True, None, None, {"refit_buffer_size_gb": 0}, "refit_buffer_size_gb must be > 0"),
    ("vllm", False, None, None, {"refit_buffer_size_gb": -1}, "refit_buffer_size_gb must be > 0"),
    ("megatron", True, None, None, {"refit_buffer_size_gb": 0}, "refit_buffer_size_gb must"),
    ("sglang", True, None, None, {"refit_timeout_s": 0}, "refit_timeout_s=0"),
    ("sglang", True, None, None, {"refit_timeout_s": 1e30}, "longer than any wait"),
    ("vllm", "no", None, None, CLUSTERS, "colocated='no' must be True or False"),
    ("sglang", None, None, None, {}, "colocated=None must be True or False"),
    ("vllm", False, None, None, {}, "train_cluster and inference_cluster"),
    ("dynamo", False, None, None, {"train_cluster": 1}, "train_cluster and inference_cluster"),
    ("vllm", False, None, None, {"inference_cluster": 1}, "train_cluster and inference_cluster"),
    ("vllm", False, None, "nccl_reshard", {}, "train_cluster and inference_cluster"),
]


@pytest.mark.parametrize(("backend", "colocated", "cfg", "transport", "more", "words"), REFUSED)
def test_a_misuse_is_refused_in_the_tables_order(
    backend: str, colocated: bool, cfg: Any, transport: Any, more: Any, words: str
):
    policy, generation = sides(backend, cfg, transport)
    with pytest.raises(ConfigurationError, match=words) as caught:
        create_weight_synchronizer(policy, generation, backend, colocated, **more)
    assert isinstance(caught.value, ValueError)
    assert policy.journal.take() == []


def test_gradients_are_freed_where_the_configuration_says_so():
    policy, generation = sides("vllm", RELEASE | MEGATRON)
    made = create_weight_synchronizer(policy, generation, "vllm", False, **CLUSTERS)
    made.sync_weights()
    assert policy.journal.take() == ["P.offload", "P.broadcast", "G.receive"]


@pytest.mark.parametrize(("backend", "colocated", "clusters", "kind"), ROWS)
def test_a_time_that_is_given_reaches_every_row(
    backend: str, colocated: bool, clusters: Any, kind: type
):
    made: Any = create_weight_synchronizer(
        *sides(backend), backend, colocated, **clusters, refit_timeout_s=12.5
    )
    assert 12.5 <= made._carrier.delivery.timeout <= 20.0


class ForVLLM(NemoVLLM):
    backends = ("vllm", "dynamo")


def test_engines_of_another_kind_than_the_backend_are_refused():
    journal = Journal()
    with pytest.raises(ConfigurationError, match="a ForVLLM is for 'vllm' or 'dynamo'"):
        create_weight_synchronizer(NemoPolicy(journal), ForVLLM(journal), "sglang", True)


def test_importing_needs_no_gpu_no_ray_and_no_engine():
    code = (
        "import sys; import weight_update.synchronizers as s; s.create_weight_synchronizer; "
        "from weight_update.synchronizers.resolve import resolve; "
        "from weight_update.waiting import Deadline; resolve([1], Deadline(1.0)); "
        "import torch; "
        "heavy = {'ray', 'vllm', 'sglang', 'zmq', 'torchrl', 'transformers'} & set(sys.modules); "
        "assert not heavy, heavy; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_names_are_there_at_the_top_too():
    assert weight_update.WeightSynchronizer is WeightSynchronizer
    assert "create_weight_synchronizer" in dir(weight_update)
