"""Models larger than a device: loaded, dispatched, and run with weights that are read ahead and streamed."""
