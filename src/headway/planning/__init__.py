"""What a run would take, for any model, layout and number of ranks, found by preparing it without memory and without processes."""
