"""Support for 8-bit and 4-bit optimizers (torchao, bitsandbytes) of sharded parameters, with portable checkpoints."""
