"""A Triton backend for the CPU that compiles nothing: kernels run in Triton's own interpreter.

Triton finds it by the metadata beside it, vLLM then believes in a Triton for the CPU.
"""
