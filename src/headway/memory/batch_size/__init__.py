"""The search for a batch size that fits: which size is next, one attempt on all ranks, and the decorator."""
