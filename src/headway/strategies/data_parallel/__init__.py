"""Data parallelism: a whole model on each process, whose gradients are averaged."""
