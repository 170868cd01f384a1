"""The deployment that brings whole weights to vLLM servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from weight_update.delivery.deployment import WholeModel
from weight_update.delivery.ranks import Ranks
from weight_update.engines.vllm.client import VLLMClient
from weight_update.engines.vllm.engine import VLLMEngine
from weight_update.errors import ConfigurationError
from weight_update.options import UpdateOptions, Way
from weight_update.transports.broadcast import BucketPacker
from weight_update.transports.id_group import IdGroups
from weight_update.transports.in_request import NoGroup
from weight_update.transports.shared_memory import SharedMemoryWay
from weight_update.transports.zmq_channel import ZmqChannel, check_zmq
from weight_update.update.updater import Updater
from weight_update.update.ways import Ends


class VLLMDeployment(WholeModel):
    """Whole weights to vLLM servers, through their own weight transfer.

    Args:
        options: Everything that shapes an update.
        ranks: The trainer's other ranks; they may hold parts of a model, and join no group.
        open_client: Makes what speaks to the server at a URL; None makes vLLM's own.

    Raises:
        ConfigurationError: All ranks of the trainer are to join the group.
    """

    def __init__(
        self,
        options: UpdateOptions,
        ranks: Ranks,
        open_client: Callable[[str], VLLMClient] | None = None,
    ) -> None:
        super().__init__()
        if options.trainer_ranks == "node":
            raise ConfigurationError(
                "trainer_ranks='node' does not go with vLLM, whose groups one trainer joins",
                remedy="leave trainer_ranks='one'; a sharded model is gathered all the same",
            )
        self._options, self._ranks = options, ranks
        self._groups = IdGroups()
        self.open_group = self._groups.open_group
        self._shared = SharedMemoryWay(options.load_format, all_ranks_answer=True)
        # Engines are told once whether weights are packed, so that all buckets are, or none.
        self._packed = options.load_format != "tensors"
        self._open_client = open_client or (lambda url: VLLMClient(url, options.http))

    def updater(self, urls: Sequence[str]) -> Updater:
        """The one updater, with all ways that lead to vLLM."""
        return Updater(urls, self.open_engine, self._ways(), self._options)

    def counted(self, urls: Sequence[str]) -> None:
        """Nothing was kept for an update."""

    def close(self) -> None:
        """Gives up shared memory; the group is given up by its owner."""
        self._shared.close()

    def open_engine(self, url: str) -> VLLMEngine:
        """The engine at a URL; it is asked nothing yet."""
        return VLLMEngine(
            url,
            self._options.http,
            packed=self._packed,
            unique_id=self._groups.unique_id,
            open_channel=ZmqChannel,
            by_memory=self._options.transport == "ipc",
            client=self._open_client(url),
        )

    def _ways(self) -> Mapping[Way, Ends]:
        return {
            "broadcast": Ends(self._groups.open_group, self._open_packer),
            "ipc": Ends(self._open_no_group, self._shared.open_packer),
        }

    def _open_no_group(
        self, urls: Sequence[str], _: UpdateOptions, __: int, device: torch.device
    ) -> NoGroup:
        check_zmq()
        return self._shared.open_group(urls, device)

    def _open_packer(self, device: torch.device) -> BucketPacker:
        return BucketPacker(device, "flattened_bucket" if self._packed else "tensors")
