"""Checkpoints in object stores: `s3://`, `gs://` and `az://`."""
