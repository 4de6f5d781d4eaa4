"""Pipeline parallelism: a model cut into stages, through which micro-batches travel."""
