"""Every torchrl name beyond the public ones, each with its reason; others use the names given here.

| name | why it is needed |
|---|---|
| ``_init_on_sender_impl`` | the hook of ``init_on_sender``; the base class has none that works |
| ``_init_on_receiver_impl`` | the same for workers |
| ``_setup_connection_and_weights_on_sender_impl`` | the hook of ``connect``, likewise |
| ``_setup_connection_and_weights_on_receiver_impl`` | the same for workers |
| ``_register_worker_sender`` | ``sender_transports`` is filled by it alone |
| ``_sender_transports``, ``_receiver_transport`` | pickled by the base; ours drops them |
| ``_initialized_on_sender`` | nothing else lets a scheme be given to another collector |
| ``collector._weight_sync_schemes`` | ``LLMCollector`` is given none; who of several counts |
| ``RayLLMCollector._collector`` | the handle of its actor: who is busy must not be waited for |
| ``collector._receiver_schemes`` | where ``cascade_execute`` finds what counts in an actor |
| ``collector.__class__`` | only ``RayCollector`` tells its schemes that it shuts down |
| ``SGLangWrapper._process_generation_results`` | there alone an answer meets its sample |
| ``_WEIGHT_SYNC_SCHEMES`` | whether ``from_backend()`` has a name already, which is left alone |

All are alike in 0.13.3 and 0.14.1, but for ``_WEIGHT_SYNC_SCHEMES``, which 0.13.3 lacks.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from torchrl.weight_update import WeightSyncScheme, weight_sync_schemes

from weight_update.options import Strategy

SchemeClass = TypeVar("SchemeClass", bound="type[WeightSyncScheme]")


def register_backend(name: str) -> Callable[[SchemeClass], SchemeClass]:
    """Has ``WeightSyncScheme.from_backend(name)`` make a class, where torchrl has that (0.14).

    A name that torchrl has given away itself is left as it is.
    """

    def register(cls: SchemeClass) -> SchemeClass:
        enter = getattr(weight_sync_schemes, "register_weight_sync_backend", None)
        owner = getattr(weight_sync_schemes, "_WEIGHT_SYNC_SCHEMES", {}).get(name)
        if enter is not None and getattr(owner, "__module__", cls.__module__) == cls.__module__:
            enter(name)(cls)
        return cls

    return register


@dataclass(frozen=True)
class Given:
    """What TorchRL says of a collector that a scheme is given to.

    Attributes:
        model_id: Which of its models the scheme is for.
        context: The collector.
        ctx: How its workers are started, if it has some.
        remote_collectors: The actors that make its frames, if there are some.
        model: The model.
        worker_idx: Which worker this is, in a worker.
    """

    model_id: str | None = None
    context: Any = None
    ctx: Any = None
    remote_collectors: Any = None
    model: Any = None
    worker_idx: int | None = None

    @classmethod
    def of(cls, *told: Any, **named: Any) -> Given:
        """The arguments that matter; TorchRL passes more."""
        known = {field.name for field in fields(cls)}
        return cls(*told, **{name: named[name] for name in named.keys() & known})


class HookedScheme(WeightSyncScheme):  # type: ignore[misc]
    """A scheme whose hooks have public names: what TorchRL calls of it, and what it holds."""

    def __init__(self, strategy: Strategy) -> None:
        with warnings.catch_warnings():
            # It warns of TorchRL's own extraction, which our schemes do not use.
            warnings.filterwarnings("ignore", message="state_dict strategy is experimental")
            super().__init__(strategy)

    @property
    def transports(self) -> list[Any]:
        """Those that it sends by."""
        return list((getattr(self, "_sender_transports", None) or {}).values())

    def take_transport(self, transport: Any) -> None:
        """Sends by a transport; the first that it is given."""
        self._register_worker_sender(worker_idx=0, transport=transport)

    def let_go(self) -> None:
        """Is as before it was given to a collector."""
        self._initialized_on_sender = self.synchronized_on_sender = False

    @abstractmethod
    def begin(self, given: Given) -> None:
        """Takes note of the collector that it drives, in that one's process."""

    @abstractmethod
    def join_servers(self) -> None:
        """Makes the connection by which it sends."""

    @abstractmethod
    def begin_in_worker(self, given: Given) -> None:
        """Takes note of a collector that makes frames, in that one's process."""

    @abstractmethod
    def listen(self) -> None:
        """Hears, in a worker, of updates from now on."""

    def __getstate__(self) -> dict[str, Any]:
        own = dict.fromkeys(("_sender_transports", "_receiver_transport"))
        return {**super().__getstate__(), **own}

    def _init_on_sender_impl(self, *told: Any, **named: Any) -> None:
        self.begin(Given.of(*told, **named))

    def _setup_connection_and_weights_on_sender_impl(self, **ignored: Any) -> None:
        self.join_servers()

    def _init_on_receiver_impl(self, *told: Any, **named: Any) -> None:
        self.begin_in_worker(Given.of(*told, **named))

    def _setup_connection_and_weights_on_receiver_impl(self, **ignored: Any) -> None:
        self.listen()


def end_with(collector: Any, end: Callable[[Any], object]) -> None:
    """Has something end with a collector, when that shuts down.

    It takes a class that overrides ``shutdown`` alone: a function on the instance could reach it
    only by a reference, which would keep it alive or be gone when the garbage collector ends it.

    Args:
        collector: Any kind of collector; it is done once.
        end: Gets the collector.
    """
    if not hasattr(collector, "ends_its_schemes"):
        with suppress(TypeError):  # what is not laid out as a collector is left as it is
            collector.__class__ = _ending(collector.__class__, end)


@cache
def _ending(kind: Any, end: Callable[[Any], object]) -> Any:
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return kind.shutdown(self, *args, **kwargs)
        finally:
            end(self)

    body = {"shutdown": shutdown, "__module__": kind.__module__, "ends_its_schemes": True}
    return type(kind)(kind.__name__, (kind,), body)


def count_path(key: str | None) -> str:
    """Where ``cascade_execute`` finds the ``count`` of what was registered as a receiver."""
    return f"_receiver_schemes[{key!r}].count"


def actor_of(collector: Any) -> Any:
    """What a ``RayLLMCollector`` stands for; None for other collectors."""
    return getattr(collector, "__dict__", {}).get("_collector")


def schemes_of(collector: Any) -> dict[str, Any]:
    """What a collector's updates go through, by model."""
    return getattr(collector, "_weight_sync_schemes", None) or {}


def drive(collector: Any, scheme: HookedScheme) -> None:
    """Has ``collector.update_policy_weights_()`` go through a scheme that it was not given."""
    collector._weight_sync_schemes = {"policy": scheme}


class AnswersHook(ABC):
    """Before ``SGLangWrapper`` among a policy's bases: shows it answers and samples together."""

    def _process_generation_results(
        self,
        results: list[dict[str, Any]],
        text_prompts: list[str],
        out: TensorDictBase,
        history: Any = None,
        tokens_prompt: list[Any] | None = None,
    ) -> TensorDictBase:
        prompts = [torch.tensor(answer["prompt_ids"]) for answer in results]
        made: TensorDictBase = super()._process_generation_results(  # type: ignore[misc]
            results, text_prompts, out, history=history, tokens_prompt=prompts
        )
        self.complete(made, results)
        return made

    @abstractmethod
    def complete(self, out: TensorDictBase, answers: list[dict[str, Any]]) -> None:
        """Adds to a batch of samples what TorchRL leaves out of the engine's answers."""
