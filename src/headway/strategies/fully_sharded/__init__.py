"""Sharded parameters by torch's fully_shard: their gathering, their gradients, and what scripts see of them."""
