"""Where batches come from: indices, streams, one reader for all, worker processes."""
