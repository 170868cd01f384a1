"""The worker's end of a ZMQ socket to the trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import ceil
from typing import Any

# How long the last answer is offered to a trainer that does not take it.
_LINGER_MILLISECONDS = 2000


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

    def answer(self, answer: Mapping[str, Any]) -> None:
        """Answers the message that came last."""
        self._socket.send(json.dumps(answer).encode())

    def close(self) -> None:
        """Closes the socket, once the last answer has left."""
        self._context.destroy(linger=_LINGER_MILLISECONDS)
