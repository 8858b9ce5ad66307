"""Calibration: from a Hugging Face model and some text to a sidecar. `python -m vllm_oscar.calibrate --help`."""
