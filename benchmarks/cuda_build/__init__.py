"""Tables of what runs on torch's CUDA build over the simulated runtime."""
