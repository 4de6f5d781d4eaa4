"""Load and run models that are larger than a device: dispatch their parts, and stream or read ahead their weights."""
