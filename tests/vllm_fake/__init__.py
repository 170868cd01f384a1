"""A small vLLM for tests of what goes wrong: real HTTP, a real gloo group, no model that thinks.

It imitates what was observed on vLLM 0.32.0 (and, where the two differ, 0.27.1), the order of calls
and its traps above all. What is said of the real server is shown on the real server, in
``tests/engines``.
"""

from .launcher import FakeVLLM
from .weights import checkpoint, signature

__all__ = ["FakeVLLM", "checkpoint", "signature"]
