"""The part of the library that runs inside vLLM's workers; it imports torch and vLLM alone.

Name it when a server starts: ``--worker-extension-cls weight_update.vllm_worker.WorkerExtension``.
"""

from __future__ import annotations


class WorkerExtension:
    """Methods that vLLM adds to each of its workers, for ``POST /collective_rpc``."""
