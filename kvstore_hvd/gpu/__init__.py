"""GPUs: kernels, streams, memory and NCCL. ``cupy`` is imported inside functions only: whoever has no GPU needs none."""
