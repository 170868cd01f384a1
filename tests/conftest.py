"""Settings of all tests."""

from __future__ import annotations

from contextlib import suppress

with suppress(ImportError):  # not every folder needs it
    from hypothesis import HealthCheck, settings

    # An example takes as long as the machine is busy: its time says nothing about the code.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")
