"""Locks of its own for each test."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest


@pytest.fixture
def locks_of_its_own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run of the tests on this host has model engines of the same names."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
