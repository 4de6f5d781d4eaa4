"""The checkpoint format: the manifest, the encoding of Python values, and the bytes of the files."""
