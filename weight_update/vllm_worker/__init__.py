"""The part of the library that runs inside vLLM's workers; it imports torch, vLLM and ZMQ alone.

Name it when a server starts: ``--worker-extension-cls weight_update.vllm_worker.WorkerExtension``,
with the folder that holds ``weight_update`` on its ``PYTHONPATH``. With
``--weight-transfer-config '{"backend": "weight_update_gloo"}'`` the server's own routes then take
weights from a gloo group, which vLLM has no backend for.
"""

from weight_update.vllm_worker.extension import WorkerExtension
from weight_update.vllm_worker.gloo import inside_vllm, register_gloo

__all__ = ["WorkerExtension"]

if inside_vllm:
    register_gloo()
