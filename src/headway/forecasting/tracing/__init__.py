"""One training step on fake tensors, and every allocation it makes."""
