"""A small server that speaks SGLang's weight-update protocol, for demos and tests."""

from weight_update.reference_engine.faults import Fault
from weight_update.reference_engine.launcher import ReferenceEngine
from weight_update.reference_engine.releases import RELEASES, Release
from weight_update.reference_engine.router import ReferenceRouter

__all__ = ["RELEASES", "Fault", "ReferenceEngine", "ReferenceRouter", "Release"]
