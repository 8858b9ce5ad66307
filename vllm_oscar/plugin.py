"""vLLM's entry point (group `vllm.general_plugins`).

vLLM calls `register` in every process, possibly more than once. Importing this module imports neither vLLM nor
torch, and whatever goes wrong in it leaves vLLM as it was: the cost of a bad install is one warning.
"""

import logging

logger = logging.getLogger("vllm.oscar")


def register() -> None:
    """Teach this process's vLLM the KV cache dtype "oscar". Idempotent."""
    from vllm_oscar.errors import VllmVersionError

    try:
        from vllm_oscar.integration import seams

        seams.install()
    except (VllmVersionError, ImportError) as error:
        logger.warning("vllm-oscar is installed but inactive, --kv-cache-dtype oscar is not available: %s", error)
