"""Tests against real inference engines running on this machine."""
