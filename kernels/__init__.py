"""Copies between paged device KV and host pages; the only code that may import Triton or CUDA."""
