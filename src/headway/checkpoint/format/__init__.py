"""The checkpoint format: the manifest, its values, and the files' bytes."""
