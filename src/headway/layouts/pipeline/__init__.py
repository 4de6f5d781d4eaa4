"""Pipeline parallelism: a model split into stages on different ranks, through which micro-batches pass."""
