"""What a client asks of the way to its engine, whatever that is."""

from __future__ import annotations

from typing import Any, Protocol

import requests

from weight_update.errors import Phase
from weight_update.waiting import Deadline

Body = dict[str, Any] | bytes


class Calls(Protocol):
    """Calls routes of one engine."""

    def call(
        self,
        method: str,
        route: str,
        *,
        phase: Phase,
        deadline: Deadline,
        body: Body | None = None,
        control: bool = True,
        late: float = 0.0,
    ) -> requests.Response:
        """Sends one request and returns whatever answer came.

        Args:
            method: HTTP method; ``OPTIONS`` only looks whether there is such a route.
            route: Path, starting with a slash.
            phase: The step of the update, for errors.
            deadline: Bound of the whole call.
            body: JSON body, if any; encoded or not.
            control: Whether the route needs the admin key.
            late: Seconds past the deadline in which an answer is still taken.

        Raises:
            EngineUnreachable: Nobody is there, or was gone before it answered.
            UpdateTimeout: No answer before the deadline.
        """

    def close(self) -> None:
        """Frees what is kept between calls; the next call takes it anew."""
