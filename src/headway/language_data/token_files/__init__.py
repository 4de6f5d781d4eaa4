"""Files of token IDs: reading documents and blocks from them, and writing them from text."""
