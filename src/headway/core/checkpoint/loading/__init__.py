"""Loading checkpoints: read and verify the files, and restore the objects from them."""
