"""GPUs: kernels, streams, memory and NCCL. `cupy` is imported inside functions only: many have no GPU."""
