"""What is done to a model before it is wrapped: activation checkpointing and offloading, torch.compile."""
