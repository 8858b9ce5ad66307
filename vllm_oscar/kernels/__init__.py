"""Triton kernels for NVIDIA GPUs. They take tensors and a PageLayout and know nothing of vLLM."""
