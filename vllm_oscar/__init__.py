"""OSCAR's rotated INT2 KV cache as a plugin for unmodified vLLM."""

__version__ = "0.1.0"
