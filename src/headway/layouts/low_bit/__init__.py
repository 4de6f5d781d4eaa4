"""Support for optimizers with states in 8 or 4 bits (torchao, bitsandbytes) on shards, with portable checkpoints."""
