"""Triton kernels that replace runs of elementwise torch operations on CUDA, one file per operation.

Called by the trainer's model and output head for bfloat16 and float32 tensors; float64 and the CPU use torch. Blocks
are fixed and there are no atomics: a row's bits depend on that row alone, so nothing here may tune itself or let the
number of rows choose how a row is computed.
"""
