"""The pickles that SGLang opens: what they name, and what they call with which arguments."""

from __future__ import annotations

import base64
import inspect
import io
import pickle
import pickletools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing import reductions

from weight_update.engines.sglang.client import SGLangClient
from weight_update.engines.sglang.payload import (
    flat_payload,
    plain_payload,
    tensor_request,
)
from weight_update.engines.sglang.session import SGLangSession
from weight_update.errors import EngineUnreachable
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket, plan_buckets
from weight_update.weights.cargo import Cargo, SharedMemory, SharedTensor
from weight_update.weights.extract import extract_weights

#: What the unpickler of 0.5.23 makes, as far as it is used here; those before it take these too.
TAKEN = {
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"),
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"),
    ("torch", "Tensor"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch", "float8_e4m3fn"),
    ("torch", "uint8"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch.storage", "TypedStorage"),
    ("torch.storage", "UntypedStorage"),
}
HOST = SharedMemory("", (b"/tmp/manager.sock", b"/torch_1", 4096), 4096)
GPU = SharedMemory("a1-b2", (b"handle", 4096, 512, b"/counts", 7, b"event", False), 4096)
BOTH = pytest.mark.parametrize("memory", [HOST, GPU], ids=["host", "gpu"])


def bucket_of(*, flat: bool = True) -> Bucket:
    tensors = {
        "model.a": torch.zeros(2, 3),
        "model.b": torch.zeros(4, dtype=torch.bfloat16),
        "model.c": torch.zeros(3, dtype=torch.float8_e4m3fn),
    }
    return Bucket(plan_buckets(extract_weights(tensors), 1 << 20).buckets[0].weights, flat)


def shared_by(memory: SharedMemory, bucket: Bucket) -> tuple[SharedTensor, ...]:
    if bucket.flat:
        return (SharedTensor(memory, torch.uint8, (bucket.nbytes,), 16),)
    places = enumerate(bucket.specs)
    return tuple(SharedTensor(memory, s.dtype, s.shape, 64 * place) for place, s in places)


@dataclass
class Made:
    """What a pickle calls, and with what."""

    name: str
    arguments: tuple[Any, ...] = ()


class Recording(pickle.Unpickler):
    """Makes records of what a server would make; refuses what it would refuse."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in TAKEN:
            raise RuntimeError(f"Blocked unsafe global ({module}.{name})")
        if name.startswith(("rebuild", "_rebuild", "Flattened")):
            return lambda *arguments: Made(name, arguments)
        return super().find_class(module, name)


def unpickled(payload: str) -> Any:
    return Recording(io.BytesIO(base64.b64decode(payload, validate=True))).load()


@BOTH
@pytest.mark.parametrize("flat", [True, False])
def test_a_payload_names_what_every_release_takes_and_nothing_else(
    memory: SharedMemory, flat: bool
) -> None:
    bucket = bucket_of(flat=flat)
    request = tensor_request(bucket, [shared_by(memory, bucket)], flush=False)
    data = base64.b64decode(request["serialized_named_tensors"][0])
    named = {
        tuple(str(text).split(" "))
        for op, text, _ in pickletools.genops(data)
        if op.name == "GLOBAL"
    }
    assert named <= TAKEN
    assert not any(op.name == "STACK_GLOBAL" for op, _, _ in pickletools.genops(data))
    assert b"weight_update" not in data
    assert unpickled(request["serialized_named_tensors"][0])


@BOTH
def test_a_flat_bucket_is_a_buffer_and_where_each_weight_lies_in_it(memory: SharedMemory) -> None:
    bucket = bucket_of()

    payload = unpickled(flat_payload(bucket, *shared_by(memory, bucket)))

    assert payload.keys() == {"flattened_tensor", "metadata"}
    assert [entry.arguments for entry in payload["metadata"]] == [
        ("model.a", (2, 3), torch.float32, 0, 24, 24),
        ("model.b", (4,), torch.bfloat16, 24, 32, 8),
        ("model.c", (3,), torch.float8_e4m3fn, 32, 35, 3),
    ]


def test_memory_of_the_host_is_opened_as_torch_opens_a_file() -> None:
    tensor = SharedTensor(HOST, torch.bfloat16, (5, 2), 640)

    opened = unpickled(plain_payload(_one_of(tensor), [tensor]))[0][1]

    cls, storage, (offset, size, stride, grad) = opened.arguments
    assert (opened.name, cls) == ("rebuild_tensor", torch.Tensor)
    assert (offset, tuple(size), tuple(stride), grad) == (320, (5, 2), (2, 1), False)
    untyped, dtype = storage.arguments
    assert (storage.name, dtype) == ("rebuild_typed_storage", torch.bfloat16)
    assert untyped.name == "rebuild_storage_filename"
    assert untyped.arguments == (torch.UntypedStorage, *HOST.opening)


def test_memory_of_a_gpu_is_opened_on_the_gpu_of_that_uuid() -> None:
    tensor = SharedTensor(GPU, torch.bfloat16, (5, 2), 640)

    opened = unpickled(plain_payload(_one_of(tensor), [tensor]))[0][1]

    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert dict(zip(names, opened.arguments, strict=True)) == {
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size((5, 2)),
        "tensor_stride": (2, 1),
        "tensor_offset": 320,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.bfloat16,
        "storage_device": "a1-b2",
        "storage_handle": b"handle",
        "storage_size_bytes": 4096,
        "storage_offset_bytes": 512,
        "requires_grad": False,
        "ref_counter_handle": b"/counts",
        "ref_counter_offset": 7,
        "event_handle": b"event",
        "event_sync_required": False,
    }
    assert names.index("storage_device") == 6  # where SGLang looks for it


def _one_of(tensor: SharedTensor) -> Bucket:
    value = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return Bucket(extract_weights({"w": value}), flat=False)


def test_one_memory_is_opened_once_by_a_payload() -> None:
    """torch counts openings: one for each of 20,000 tensors would use the count up."""
    bucket = bucket_of(flat=False)
    data = base64.b64decode(plain_payload(bucket, shared_by(HOST, bucket)))
    names = [text for op, text, _ in pickletools.genops(data) if op.name == "SHORT_BINBYTES"]
    assert names.count(b"/torch_1") == 1
    storages = {
        id(t.arguments[1].arguments[0])
        for _, t in unpickled(plain_payload(bucket, shared_by(HOST, bucket)))
    }
    assert len(storages) == 1


@given(st.lists(st.integers(0, 5), max_size=4))
def test_strides_are_those_of_a_contiguous_tensor(shape: list[int]) -> None:
    tensor = SharedTensor(HOST, torch.float32, tuple(shape))
    opened = unpickled(plain_payload(_one_of(tensor), [tensor]))[0][1]
    _, size, stride, _ = opened.arguments[2]
    rebuilt = torch.zeros(4096).as_strided(size, stride)
    assert rebuilt.is_contiguous()
    assert list(rebuilt.shape) == shape


def test_a_weights_name_may_be_any_text() -> None:
    name = "weird\ncweight_update.engines.sglang.payload\tü"
    bucket = Bucket(extract_weights({name: torch.zeros(1)}))
    payload = unpickled(flat_payload(bucket, SharedTensor(HOST, torch.uint8, (4,))))
    assert payload["metadata"][0].arguments[0] == name


# ---- requests


def test_every_rank_gets_an_entry_and_no_request_is_aborted() -> None:
    bucket = bucket_of()
    body = tensor_request(bucket, [shared_by(HOST, bucket)] * 3, flush=True)
    entries = body.pop("serialized_named_tensors")
    assert len(entries) == 3
    assert len(set(entries)) == 1
    assert body == {
        "load_format": "flattened_bucket",
        "flush_cache": True,
        "abort_all_requests": False,
    }


def test_tensors_one_by_one_are_loaded_as_checkpoints_are() -> None:
    bucket = bucket_of(flat=False)
    assert tensor_request(bucket, [shared_by(HOST, bucket)], flush=False)["load_format"] is None


class Client(SGLangClient):
    """Keeps the bodies that it is given."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def open_tensors(self, body: dict[str, Any], deadline: Deadline) -> None:
        self.bodies.append(body)


@pytest.mark.parametrize(
    ("sessions", "drafts", "told"),
    [
        (True, True, {"selector": "target"}),
        (False, True, {"disable_draft_model": True}),
        (True, False, {}),
        (False, False, {}),
    ],
)
def test_a_draft_model_keeps_its_weights(
    sessions: bool, drafts: bool, told: dict[str, Any]
) -> None:
    client = Client()
    session = SGLangSession(client, needed=sessions, drafts=drafts, ranks=2)
    bucket = bucket_of()
    cargo = Cargo(shared=shared_by(HOST, bucket))

    session.apply(bucket, cargo, group_name="none", flush=False, deadline=Deadline(5))

    (body,) = client.bodies
    assert len(body["serialized_named_tensors"]) == 2
    assert {key: body[key] for key in ("selector", "disable_draft_model") if key in body} == told


def test_a_server_that_ends_is_explained() -> None:
    client = SGLangClient("http://127.0.0.1:9", HttpOptions())
    with pytest.raises(EngineUnreachable, match="the server ended") as caught:
        client.open_tensors({}, Deadline(5))
    assert "another container" in caught.value.remedy
    client.close()
