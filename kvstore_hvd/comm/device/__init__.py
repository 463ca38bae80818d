"""Communication of arrays on GPUs: one executor for each way."""
