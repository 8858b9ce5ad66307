"""vLLM's entry point (group `vllm.general_plugins`).

vLLM calls `register` in every process, possibly more than once. Importing this module imports neither vLLM nor
torch, and whatever goes wrong in it leaves vLLM as it was: the cost of a bad install is one warning.
"""

import logging

logger = logging.getLogger("vllm.oscar")


def register() -> None:
    """Teach this process's vLLM the KV cache dtype "oscar". Idempotent."""
    try:
        from vllm_oscar.integration import seams

        seams.install()
    except Exception as error:  # whatever it is: vLLM calls us for every model, and most do not want this cache
        logger.warning("vllm-oscar is installed but inactive, --kv-cache-dtype oscar is not available: %s", error)
