"""Synchronizers: one factory that picks the path for a deployment."""

from weight_update.synchronizers.interface import WeightSynchronizer

__all__ = ["WeightSynchronizer"]
