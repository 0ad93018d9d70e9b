"""A GPU, on a machine without one."""

import gpuload

gpuload.load("prompts.parquet", "tokenizer", device="cuda:99")

# DeviceError: device='cuda:99': ...
