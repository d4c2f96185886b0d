"""Quantized safetensors checkpoints as they are released: fp8, MXFP4, NVFP4, GPTQ, AWQ, compressed-tensors, NF4."""
