"""A delivery: brings sources of weights to the engines of one deployment, again and again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from weight_update.delivery.deployment import OpenDeployment
from weight_update.delivery.ranks import Ranks
from weight_update.errors import ConfigurationError, some_of
from weight_update.options import UpdateOptions, parse_server_urls
from weight_update.report import EngineOutcome, ProgressHook, UpdateReport
from weight_update.update.planning import Payload
from weight_update.update.push import Push
from weight_update.update.reader import nobody_else
from weight_update.update.rehearsal import Rehearsal
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Plan
from weight_update.weights.checkpoint import Checkpoint
from weight_update.weights.extract import Metadata, extract_weights, match_metadata
from weight_update.weights.lora.export import Adapter
from weight_update.weights.name_map import renamed
from weight_update.weights.saved_state_dict import SavedStateDict
from weight_update.weights.specs import Weight
from weight_update.weights.stream import Stream

Counted = Callable[[int], Sequence[str]]


class Delivery:
    """What both faces hold: a deployment, its updater, and the trainer's ranks.

    Args:
        urls: The engines.
        options: Everything that shapes an update.
        open_deployment: Makes the deployment.
    """

    def __init__(
        self, urls: Sequence[str], options: UpdateOptions, open_deployment: OpenDeployment
    ) -> None:
        self._urls = list(urls)
        self._options = options
        self._open_deployment = open_deployment
        self._metadata: Metadata | None = None
        self._ranks = Ranks(options.trainer_ranks)
        self._process = os.getpid()
        self._deployment = open_deployment(options, self._ranks)
        self._updater = self._deployment.updater(self._urls)

    @property
    def timeout(self) -> float:
        """Seconds for a whole connect or update."""
        return self._options.timeout

    @property
    def engines(self) -> Mapping[str, EngineOutcome]:
        """What is known of each engine, by URL."""
        return self._updater.engines

    @property
    def version(self) -> int:
        """The last version that was counted; before the first, ``initial_version`` or 0."""
        return self._updater.version

    def connect(self, device: torch.device | None = None) -> None:
        """Inspects the engines and makes the group; one that exists is given up.

        Args:
            device: Where the weights live; None takes the current GPU, or else the CPU.
        """
        self.refuse_fork()

        def connect() -> None:
            self._updater.connect(device or default_device())

        self._ranks.connect(connect, Deadline(self.timeout), self._urls)

    def together(self, source: Callable[[], Any], step: Callable[[], object]) -> None:
        """Runs a step on every rank that takes part in updates; it ends when all have ended.

        Args:
            source: Returns what updates send, which tells who takes part.
            step: Does this rank's part.

        Raises:
            WeightUpdateError: A step failed, on whichever rank; it is the same on all.
        """
        self._ranks.together(source, step, Deadline(self.timeout), self._urls)

    def update(
        self,
        source: Callable[[], Any],
        counted: Counted | None = None,
        *,
        whole: bool | None = None,
        progress: ProgressHook | None = None,
        bucket_bytes: int | None = None,
        bucket_limit: int | None = None,
        extra: Mapping[str, torch.Tensor] | None = None,
    ) -> UpdateReport:
        """Runs one update; makes the group first if there is none.

        Args:
            source: Returns what to send; matched with the metadata if there is one.
            counted: Called with the new version before any engine continues.
            whole: Whether it is a whole model, and not some weights only: servers with mixed
                weights are healed by a whole one. None tells by the kind of source.
            progress: Told of each phase and of each confirmed bucket.
            bucket_bytes: The size of a bucket of this update; None leaves it to the options.
            bucket_limit: What no bucket of several tensors is larger than, whatever is chosen.
            extra: Tensors that are sent after those of the source.
        """
        self.refuse_fork()
        counted = counted or _nothing

        def count(version: int) -> Sequence[str]:
            self._deployment.counted(self._updater.roster.urls)
            return counted(version)

        def push(
            read: Callable[[], Payload], check_readers: Callable[[], None] = nobody_else
        ) -> UpdateReport:
            return self._updater.update(
                Push(read, count, progress, check_readers, bucket_bytes, bucket_limit)
            )

        def followed(report: UpdateReport) -> None:
            self._updater.version = report.version
            counted(report.version)

        return self._ranks.update(
            lambda: provided(source()),
            lambda given: self._payload(given, whole, extra or {}),
            push,
            followed,
            Deadline(self.timeout),
            self._urls,
        )

    def snapshot(self, source: Any) -> Any:
        """A copy of the weights, on their device, which training does not change.

        Args:
            source: What an update takes; a checkpoint on disk is returned as it is.

        Raises:
            ConfigurationError: It is read while it is sent.
        """
        return self._deployment.snapshot(source)

    def recover(
        self,
        source: Callable[[], Any],
        counted: Counted | None = None,
        *,
        progress: ProgressHook | None = None,
    ) -> UpdateReport:
        """Waits for engines that do not answer, for half the time-out, then pushes a whole model.

        Args:
            source: Returns the model or checkpoint to send.
            counted: Called with the new version before any engine continues.
            progress: Told of each phase and of each confirmed bucket.
        """
        self.refuse_fork()
        self._updater.await_return()
        return self.update(source, counted, progress=progress)

    def add_engine(self, url: str) -> None:
        """Adds a server from the next update on."""
        self.refuse_fork()
        (url,) = parse_server_urls(url)
        self._updater.add_engine(url)
        self._urls.append(url)

    def remove_engine(self, url: str) -> None:
        """Takes a server out of the fleet; it drops the group and is asked nothing any more."""
        self.refuse_fork()
        (url,) = parse_server_urls(url)
        self._updater.remove_engine(url)
        self._urls = [known for known in self._urls if known != url]

    def doubt(self, url: str, why: str) -> None:
        """Notes, between updates, that a server lost what it was given.

        It counts as mixed, and is not resumed, until it took a whole model.

        Args:
            url: The server.
            why: What happened, for reports.
        """
        self._updater.doubt(url, why)

    def plan(self, source: Any) -> Plan:
        """What an update would send, in which requests; no server is asked.

        Args:
            source: A mapping of names to tensors, a TensorDict, a module or a checkpoint.
        """
        return self._updater.plan(self._extract(source))

    @property
    def harmless_name(self) -> str:
        """The name of a weight that no server keeps."""
        return self._updater.roster.members[0].engine.harmless_name

    def rehearse(self, plan: Plan) -> Rehearsal:
        """Sends a plan of harmless names, in a short pause; no weight and no label changes.

        Raises:
            RuntimeError: No group was made, or a server failed.
        """
        self.refuse_fork()
        return self._updater.rehearse(plan)

    def check_connection(self) -> bool:
        """Whether a group exists, of this rank or of one that it follows."""
        return self._updater.connected or self._ranks.followed

    def flush_cache(self) -> bool:
        """Flushes the prefix cache of every server; False if one did not (the log says why)."""
        self.refuse_fork()
        return self._updater.flush_cache()

    def shutdown(self) -> None:
        """Gives the group up on both ends, and removes what it wrote; never raises.

        After a fork it does nothing: the group is still the parent's.
        """
        if os.getpid() == self._process:
            self._ranks.close()
            self._updater.shutdown()
            self._deployment.close()

    def _resumed_options(self) -> UpdateOptions:
        """The options of a copy in another process, which counts on where this one stands."""
        if self._options.initial_version is None:  # it counts by labels, not by itself
            return self._options
        return replace(self._options, initial_version=self.version)

    def _payload(
        self, source: Any, whole: bool | None, extra: Mapping[str, torch.Tensor]
    ) -> Payload:
        whole = is_whole(source) if whole is None else whole
        if isinstance(source, Stream):
            return Payload((), whole, source if not extra else _refuse_extra(extra))
        weights = self._extract(source)
        return Payload((*weights, *extract_weights(extra)) if extra else weights, whole)

    def _extract(self, source: Any) -> tuple[Weight, ...]:
        extracted = self._deployment.extract(source)
        if self._options.name_map is not None:
            extracted = tuple(renamed(extracted, self._options.name_map))
        if self._metadata is None or not self._deployment.merges:  # it tells of merged weights
            return extracted
        return match_metadata(extracted, self._metadata)

    def refuse_fork(self) -> None:
        """Raises ConfigurationError in a fork of the process that made it."""
        # A fork shares the parent's sockets but has none of its threads: half an update would
        # leave the parent's engines paused.
        if os.getpid() != self._process:
            raise ConfigurationError(
                f"this transport belongs to process {self._process} and does not survive a fork",
                remedy="create the sender in the process that uses it, or pickle it",
            )


def provided(source: Any) -> Any:
    """What a source is: a function is asked for it, and an iterator becomes a stream."""
    known = isinstance(source, (nn.Module, type))
    given = source() if callable(source) and not known else source
    return Stream(given) if isinstance(given, Iterator) else given


def is_whole(source: Any) -> bool:
    """Whether a source is a whole model, and not a mapping that may hold some weights only."""
    if isinstance(source, Stream):
        return source.whole
    return isinstance(source, (nn.Module, Checkpoint, SavedStateDict, Adapter))


def default_device() -> torch.device:
    """The current GPU, or else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _refuse_extra(extra: Mapping[str, torch.Tensor]) -> NoReturn:
    raise ConfigurationError(
        f"{len(extra)} tensors are to follow a stream, which is sent as it is",
        phase="plan",
        remedy=f"yield them at its end: {some_of(list(extra))}",
    )


def _nothing(_: int) -> Sequence[str]:
    return ()
