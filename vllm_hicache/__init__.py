"""Hierarchical KV cache for vLLM: device, host memory and shared storage."""

__version__ = "0.1.0"
