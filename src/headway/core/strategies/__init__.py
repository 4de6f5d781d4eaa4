"""Strategies, which replicate or shard a model over ranks. Each strategy has its own file or folder."""
