"""The GPU backend, written in Triton. `selector` decides whether it is used, and alone is importable without Triton.

Three modules hold kernels (`attention_kernels`, `cache_kernels`, `row_kernels`); the others launch them.
"""
