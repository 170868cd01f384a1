"""An environment without the library's variables, whatever the host sets."""

from __future__ import annotations

import pytest

from weight_update import options


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in vars(options):
        if name.endswith("_VARIABLE"):
            monkeypatch.delenv(getattr(options, name), raising=False)
