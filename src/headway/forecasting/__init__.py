"""What a training step will hold, before it is run: one step traced on fake tensors, its allocations replayed."""
