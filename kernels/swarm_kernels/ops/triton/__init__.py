"""The GPU's kernels, written in Triton. `gpu` decides whether they are used; nothing else imports this package.

Three modules hold kernels (`attention_kernels`, `cache_kernels`, `row_kernels`); the others launch them.
"""
