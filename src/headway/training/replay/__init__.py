"""A batch as a transaction: in pieces that fit into memory, and again where they did not."""
