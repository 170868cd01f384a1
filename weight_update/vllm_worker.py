"""The part of the library that runs inside vLLM's workers; it imports torch, vLLM and ZMQ alone.

Name it when a server starts: ``--worker-extension-cls weight_update.vllm_worker.WorkerExtension``,
with the folder that holds ``weight_update`` on its ``PYTHONPATH``. With
``--weight-transfer-config '{"backend": "weight_update_gloo"}'`` the server's own routes then take
weights from a gloo group, which vLLM has no backend for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from math import ceil, prod
from typing import Any, Protocol

import torch
from torch import distributed
from torch.multiprocessing.reductions import rebuild_cuda_tensor, rebuild_storage_filename
from torch.storage import TypedStorage

# -- the gloo backend of vLLM's weight transfer ---------------------------------------------------

GLOO_BACKEND = "weight_update_gloo"
# A trainer that gives an update up closes the group; this is for one whose host is gone.
_SILENCE = timedelta(minutes=10)

try:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine as _Native
except ImportError:  # outside vLLM there is nothing to register, and all else can be tried
    _Native = object


@dataclass(kw_only=True)
class GlooInitInfo:
    """What ``/init_weight_transfer_engine`` brings.

    Attributes:
        master_address: Where the trainer, which is rank 0, listens.
        master_port: Likewise.
        rank_offset: Rank of the server's first worker.
        world_size: All ranks of the group.
        group_name: The name that the trainer gave it.
        packed: Whether the weights of a request come as the bytes of one broadcast, one after the
            other without padding, or in one broadcast each.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    packed: bool


class GlooEngine(_Native):  # type: ignore[misc]
    """vLLM's engine for NCCL, over a gloo group: weights are opened, loaded and closed as there.

    A request brings ``names``, ``dtype_names`` and ``shapes``.
    """

    init_info_cls = GlooInitInfo
    packed = False
    gloo: Any = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Joins the trainer's group, and leaves the one before."""
        self.shutdown()
        config = self.parallel_config
        workers_before = config.data_parallel_index * config.world_size + config.rank
        self.packed = init_info.packed
        self.gloo = join_gloo(init_info, init_info.rank_offset + workers_before)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives the weights of a request and loads them."""
        # The native one ends by waiting for an accelerator, which need not be there.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Any) -> None:
        """Receives and loads; a failure closes the group, since others may wait for this rank."""
        if self.gloo is None:
            raise RuntimeError("no group: /init_weight_transfer_engine was not called")
        specs = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        announced = [(name, getattr(torch, dtype), shape) for name, dtype, shape in specs]
        try:
            for batch in received(self.gloo, announced, packed=self.packed):
                self.model.load_weights(batch)
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Leaves the group; its connections close with it."""
        self.gloo = None


Announced = Sequence[tuple[str, torch.dtype, Sequence[int]]]
Named = list[tuple[str, torch.Tensor]]


def join_gloo(init_info: GlooInitInfo, rank: int) -> Any:
    """Joins a group by the keys under which torch's own groups meet; blocks until all came."""
    torch_distributed: Any = distributed
    store = torch_distributed.TCPStore(
        init_info.master_address,
        init_info.master_port,
        init_info.world_size,
        is_master=False,
        timeout=_SILENCE,
        wait_for_workers=False,
    )
    for prefix in (init_info.group_name, f"{init_info.group_name}/", "cpu/"):
        store = torch_distributed.PrefixStore(prefix, store)
    return torch_distributed.ProcessGroupGloo(store, rank, init_info.world_size, _SILENCE)


def received(group: Any, announced: Announced, *, packed: bool) -> Iterator[Named]:
    """The weights that were announced, as they come: all at once, or one by one."""
    if packed:
        sizes = [prod(shape) * dtype.itemsize for _, dtype, shape in announced]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        group.broadcast(buffer, 0).wait()
        yield cut(buffer, announced, sizes)
        return
    for name, dtype, shape in announced:
        value = torch.empty(tuple(shape), dtype=dtype)
        group.broadcast(value, 0).wait()
        yield [(name, value)]


def cut(buffer: torch.Tensor, announced: Announced, sizes: Sequence[int]) -> Named:
    """Weights that lie in a buffer of bytes, one after the other.

    Example:
        >>> buffer = torch.arange(2, dtype=torch.int32).view(torch.uint8)
        >>> cut(buffer, [("a", torch.int32, [1]), ("b", torch.int32, [1, 1])], [4, 4])
        [('a', tensor([0], dtype=torch.int32)), ('b', tensor([[1]], dtype=torch.int32))]
    """
    parts = zip(announced, torch.split(buffer, list(sizes)), strict=True)
    return [(name, part.view(dtype).view(tuple(shape))) for (name, dtype, shape), part in parts]


def register_gloo() -> None:
    """Makes the backend known to the vLLM that this process runs; repeated, it does nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with suppress(ValueError):  # known already
        WeightTransferEngineFactory.register_engine(GLOO_BACKEND, GlooEngine)


if _Native is not object:
    register_gloo()


# -- weights in memory that is opened: ZMQ, and CUDA IPC or shared memory -------------------------
#
# The trainer binds a REQ socket a worker, and each worker connects a REP socket to its own. Every
# message is a head in JSON, and for a bucket a second part that announces its weights:
#
#   begin     seconds                              the layers wait for their weights
#   bucket    seconds, memories, places | names, dtypes, shapes     loaded, views are dropped
#   complete  seconds, tensors                     weights are as the kernels want them
#
# The answer is {}, or what failure() makes; to begin it says whether the update before it is
# ``unfinished``. Memory is written again once its bucket was answered. ``seconds`` is how long the
# next message may take at most. When an end of the socket is gone, the other gives the update up.

# What a trainer may be late by: it counts from when it sent a message, and may be on busy cores.
_LATE_SECONDS = 10.0
# How long the last answer is offered to a trainer that does not take it.
_LINGER_MILLISECONDS = 2000
_WORDS = 500
# An attribute of a worker: the layers that hold weights of updates that were not completed.
_OWED = "weight_update_owed"

Views = Iterable[tuple[str, torch.Tensor]]
Message = Mapping[str, Any]


class Target(Protocol):
    """What weights are loaded into."""

    def begin(self) -> bool:
        """Opens an update; returns whether the one before was never completed."""

    def load(self, weights: Views) -> None:
        """Loads some weights; nothing may refer to their memory afterwards."""

    def complete(self) -> None:
        """Closes the update."""

    def undo(self) -> bool:
        """Closes an update that failed; returns whether some weights of it stay."""


def receive_shared_weights(
    address: str, target: Target, device: torch.device, seconds: float
) -> dict[str, Any]:
    """Takes one update from a trainer.

    It never raises: vLLM would leave the answers of the other workers unread, and take them for
    those of the next call.

    Args:
        address: ZMQ address of the socket that the trainer has bound for this worker.
        target: What the weights are loaded into.
        device: Where that is.
        seconds: How long the first message may take at most.

    Returns:
        Nothing, or what :func:`failure` makes.
    """
    try:
        with closing(TrainerLine(address)) as line:
            return SharedUpdate(line, target, device).run(seconds + _LATE_SECONDS)
    except Exception as error:  # noqa: BLE001 - it travels as text
        return failure(described(error), changed=False, restored=True)


class TrainerLine:
    """The worker's end of a socket; it notices when the trainer's end is gone.

    Args:
        address: Where the trainer's end is bound.

    Raises:
        ConnectionError: There is nothing there.
    """

    def __init__(self, address: str) -> None:
        import zmq

        path = address.removeprefix("ipc://")
        if path != address and not os.path.exists(path):
            raise ConnectionError(f"there is no {path} here: trainer and worker must share files")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._gone = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._gone, zmq.POLLIN)
        self._socket.connect(address)

    def receive(self, seconds: float) -> list[bytes]:
        """The parts of the next message.

        Raises:
            TimeoutError: None came.
            ConnectionError: The trainer is gone.
        """
        found = dict(self._poller.poll(ceil(seconds * 1000)))
        if self._socket in found:
            return self._socket.recv_multipart()
        if found:
            raise ConnectionError("the trainer is gone, or gave the update up")
        raise TimeoutError(f"nothing came from the trainer for {seconds:.1f} s")

    def answer(self, answer: Message) -> None:
        """Answers the message that came last."""
        self._socket.send(json.dumps(answer).encode())

    def close(self) -> None:
        """Closes the socket, once the last answer has left."""
        self._context.destroy(linger=_LINGER_MILLISECONDS)


class SharedUpdate:
    """One update, as a trainer brings it.

    Args:
        line: To the trainer.
        target: What the weights are loaded into.
        device: Where that is.
    """

    def __init__(self, line: TrainerLine, target: Target, device: torch.device) -> None:
        self._line, self._target, self._device = line, target, device
        self._begun = False
        self._names: set[str] = set()
        self._at = ""
        self._opened: dict[str, torch.Tensor] = {}

    def run(self, seconds: float) -> dict[str, Any]:
        """Takes messages until the update is complete, or fails; then it is undone."""
        kinds: dict[str, Callable[..., dict[str, Any]]]
        kinds = {"begin": self._begin, "bucket": self._load, "complete": self._complete}
        asked, kind = False, ""
        try:
            while kind != "complete":
                head, *parts = map(json.loads, self._line.receive(seconds))
                asked, kind = True, head["kind"]
                answer = kinds[kind](head, *parts)
                self._line.answer(answer)
                asked, seconds = False, head["seconds"] + _LATE_SECONDS
        except Exception as error:  # noqa: BLE001 - it travels as text
            failed = self._undo(error)
            if asked:
                self._line.answer(failed)
            return failed
        return {}

    def _begin(self, _: Message) -> dict[str, Any]:
        self._begun = True
        return {"unfinished": self._target.begin()}

    def _load(self, head: Message, announced: Message) -> dict[str, Any]:
        self._refuse_repeated(announced["names"])
        self._target.load(self._views(head, announced))
        self._at = ""
        wait_for(self._device)  # a GPU may be reading still, and the trainer writes next
        return {}

    def _complete(self, head: Message) -> dict[str, Any]:
        if head["tensors"] != len(self._names):
            raise ValueError(f"{len(self._names)} weights came, and {head['tensors']} were sent")
        self._opened.clear()
        self._target.complete()
        wait_for(self._device)
        return {}

    def _undo(self, error: Exception) -> dict[str, Any]:
        place = f"at {self._at!r}: " if self._at else ""  # loaders do not always say
        words = f"{place}{described(error)}"
        self._opened.clear()
        try:
            changed = self._begun and self._target.undo()
            wait_for(self._device)
        except Exception as second:  # noqa: BLE001 - it travels as text
            return failure(f"{words}; and its layers are not whole: {described(second)}")
        return failure(words, changed=changed, restored=True)

    def _refuse_repeated(self, names: Sequence[str]) -> None:
        """A layer is taken for whole when as many numbers came as it has, whichever they are."""
        for name in names:
            if name in self._names:
                raise ValueError(f"{name!r} was sent twice")
            self._names.add(name)

    def _views(self, head: Message, announced: Message) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of a bucket, one at a time: nobody here holds one that was loaded."""
        memories = [self._memory(memory) for memory in head["memories"]]
        announcements = zip(*(announced[k] for k in ("names", "dtypes", "shapes")), strict=True)
        for (name, dtype, shape), (index, start) in zip(announcements, head["places"], strict=True):
            self._at = name
            yield name, viewed(memories[index], start, getattr(torch, dtype), shape)

    def _memory(self, memory: Message) -> torch.Tensor:
        """Opens memory, once an update."""
        key = json.dumps(memory)
        if key not in self._opened:
            self._opened[key] = opened(memory, self._device)
        return self._opened[key]


def failure(words: str, *, changed: bool = True, restored: bool = False) -> dict[str, Any]:
    """What a worker says of an update that failed.

    Args:
        words: Why.
        changed: Whether some weights are the update's.
        restored: Whether all others are the old ones.
    """
    return {"error": words, "changed": changed, "restored": restored}


def viewed(
    memory: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """A weight that lies in memory; a copy where it lies askew.

    Example:
        >>> memory = torch.arange(6, dtype=torch.uint8)
        >>> viewed(memory, 2, torch.int16, [2]), viewed(memory, 5, torch.uint8, [])
        (tensor([ 770, 1284], dtype=torch.int16), tensor(5, dtype=torch.uint8))
    """
    end = start + prod(shape) * dtype.itemsize
    if not 0 <= start <= end <= memory.numel():
        raise ValueError(f"bytes {start} to {end} are not in a memory of {memory.numel()}")
    raw = memory[start:end]
    aligned = raw.clone() if start % dtype.itemsize else raw
    return aligned.view(dtype).view(tuple(shape))


def opened(memory: Message, device: torch.device) -> torch.Tensor:
    """Opens the trainer's memory: of a GPU, known by its UUID, or of the host."""
    opening = [bytes.fromhex(x["hex"]) if isinstance(x, dict) else x for x in memory["opening"]]
    if not memory["device"]:
        open_file: Any = rebuild_storage_filename
        storage = open_file(torch.UntypedStorage, *opening)
        return torch.empty(0, dtype=torch.uint8).set_(storage)
    handle, nbytes, start, *counting = opening
    number = number_of(memory["device"], device)
    view = (torch.Tensor, (nbytes,), (1,), 0)
    storage = (TypedStorage, torch.uint8, number, handle, nbytes, start)
    open_handle: Any = rebuild_cuda_tensor
    whole: torch.Tensor = open_handle(*view, *storage, False, *counting)
    return whole


def number_of(uuid: str, own: torch.device) -> int:
    """The number by which this process knows a GPU: its own, or another one of the host."""
    numbers: list[int] = list(range(torch.cuda.device_count()))
    for number in sorted(numbers, key=lambda number: number != own.index):
        if uuid_of(torch.device("cuda", number)) == uuid:
            return number
    raise ValueError(f"the weights are on GPU {uuid}, which this worker does not see")


def uuid_of(device: torch.device) -> str:
    """The UUID of a GPU, which every process knows it by; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def wait_for(device: torch.device) -> None:
    """Waits until a device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def described(error: BaseException) -> str:
    """An error in a line of words."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_WORDS]


class LayerwiseReload:
    """The model of a vLLM worker, under vLLM's own reload, layer by layer.

    Each layer waits until all of its weights came; they are then processed as at the start, and
    copied to where the layer was. One that got none is put back. So what has no weights, or not
    all, holds the old ones, and kernels find everything where it was.

    Args:
        worker: The worker.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model: torch.nn.Module = worker.model_runner.get_model()
        self._owed: set[str] = vars(worker).setdefault(_OWED, set())

    def begin(self) -> bool:
        """Opens an update; one that somebody left open is closed first."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        left_open = self.put_back() > 0
        with self._configured():
            initialize_layerwise_reload(self._model)
        return left_open or bool(self._owed)

    def load(self, weights: Views) -> None:
        """Loads some weights; layers that wait for more keep copies."""
        lent: set[int] = set()

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                lent.add(weight.untyped_storage().data_ptr())
                yield name, weight

        with self._configured(), some_of_a_model():
            self._model.load_weights(noted())  # type: ignore[operator]
        for _, info in self._named():
            for _, call in info.loaded_weights:
                keep(call.arguments, lent)

    def complete(self) -> None:
        """Closes the update."""
        renewed = {name for name, info in self._named() if info.load_numel or not info.can_load()}
        self._finalize()
        runner = self._worker.model_runner
        if hasattr(runner, "reset_lora_state"):  # 0.27 has none
            runner.reset_lora_state()
        self._owed -= renewed

    def undo(self) -> bool:
        """Puts old weights back; returns whether some weights of the update stay."""
        changed = {name for name, info in self._named() if not info.can_load()}
        self._owed |= changed
        self.put_back()
        return bool(changed)

    def put_back(self) -> int:
        """Puts old weights back into every layer that is not whole yet; returns how many wait."""
        waiting = [info for _, info in self._named() if info.can_load()]
        for info in waiting:
            info.load_numel = 0  # what came for it would be taken for all of it
            info.loaded_weights.clear()
        if waiting:
            self._finalize()
        return len(waiting)

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._configured():
            finalize_layerwise_reload(self._model, self._worker.model_config)

    def _named(self) -> Iterator[tuple[str, Any]]:
        """What vLLM knows of each layer: one that can load waits for weights."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        return ((name, get_layerwise_info(layer)) for name, layer in self._model.named_modules())

    def _configured(self) -> AbstractContextManager[Any]:
        from vllm.config import set_current_vllm_config

        context: AbstractContextManager[Any] = set_current_vllm_config(self._worker.vllm_config)
        return context


def keep(arguments: dict[str, Any], lent: set[int]) -> None:
    """Copies what lies in memory that was only lent.

    Args:
        arguments: Of a call that a layer makes when all of its weights came.
        lent: Where the memory begins that others will write.
    """
    for name, value in arguments.items():
        real = isinstance(value, torch.Tensor) and not value.is_meta
        if real and value.untyped_storage().data_ptr() in lent:
            arguments[name] = value.clone()


def some_of_a_model() -> AbstractContextManager[Any]:
    """In it, a loader is content with some weights of a model, where a release minds."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return nullcontext()
    context: AbstractContextManager[Any] = disable_mtp_completeness_check()
    return context


# -- methods for /collective_rpc ------------------------------------------------------------------


class WorkerExtension:
    """Methods that vLLM adds to each of its workers, for ``POST /collective_rpc``."""

    rank: int
    device: torch.device

    def weight_update_put_back(self) -> None:
        """Puts old weights back into layers that an update of vLLM's own routes left waiting.

        An empty update does so too, unless a layer got some of its weights, or a wrong one: these
        it would be made of.
        """
        LayerwiseReload(self).put_back()

    def weight_update_place(self) -> dict[str, Any]:
        """Which worker this is, and the UUID of its GPU; empty on the CPU."""
        return {"rank": self.rank, "device": uuid_of(self.device)}

    def weight_update_from_memory(
        self, addresses: dict[str, str], seconds: float
    ) -> dict[str, Any]:
        """Takes one update in memory of the trainer; see :func:`receive_shared_weights`.

        Args:
            addresses: Of the trainer's sockets, by the worker's rank.
            seconds: How long the first message may take at most.
        """
        address = addresses[str(self.rank)]
        return receive_shared_weights(address, LayerwiseReload(self), self.device, seconds)
