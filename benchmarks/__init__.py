"""Benchmarks of whole engines and of parts of them, behind the command ``hicache bench``."""
