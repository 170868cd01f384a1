"""What doctor finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["problem", "warning", "unknown"]


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        level: A problem keeps an update from working; a warning does not; unknown is what
            cannot be found out without changing anything.
        what: What it is.
        where: URL, path or address.
        remedy: What to do about it.
    """

    level: Level
    what: str
    where: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """The finding as plain JSON values; where it stands tells its level."""
        return {"what": self.what, "where": self.where, "remedy": self.remedy}
