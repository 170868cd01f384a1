"""A set of ranks that is what it is, as a synchronizer's cluster."""

from __future__ import annotations

from collections import deque

from weight_update.options import check_positive
from weight_update.transports.address import check_address, listen

# A port that was told but not bound yet still looks free.
_NOT_GIVEN_AGAIN = 100


class StaticCluster:
    """Ranks that were started by somebody else, and stay as many as they are.

    Args:
        world_size: How many there are.
        num_gpus_per_node: How many of them share a host; None means all.
        address: Address of the first host, as all others reach it.

    Raises:
        ConfigurationError: A number is none, or the address leads nowhere.

    Example:
        >>> cluster = StaticCluster(2)
        >>> cluster.world_size(), cluster.num_gpus_per_node
        (2, 2)
        >>> cluster.get_master_address_and_port()[0]
        '127.0.0.1'
    """

    def __init__(
        self,
        world_size: int,
        *,
        num_gpus_per_node: int | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        check_positive("world_size", 0 if world_size is None else world_size)
        check_positive("num_gpus_per_node", num_gpus_per_node)
        self.num_gpus_per_node = min(num_gpus_per_node or world_size, world_size)
        self._world_size = world_size
        self._address = check_address(address)
        self._given: deque[int] = deque(maxlen=_NOT_GIVEN_AGAIN)

    def world_size(self) -> int:
        """How many ranks there are."""
        return self._world_size

    def get_master_address_and_port(self) -> tuple[str, int]:
        """The address, and a port that is free now; another one at each call."""
        while True:
            with listen(self._address, None) as bound:
                port = int(bound.getsockname()[1])
            if port not in self._given:
                self._given.append(port)
                return self._address, port

    def get_available_address_and_port(
        self,
        pg_idx: int,
        bundle_idx: int,
    ) -> tuple[str, int]:
        """The same, whatever the bundle: the first host is the only one that is known.

        Args:
            pg_idx: Number of a placement group.
            bundle_idx: Number of a bundle in it.
        """
        return self.get_master_address_and_port()
