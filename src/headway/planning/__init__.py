"""Plan a run of any model, layout and number of ranks: prepare it in one process, without allocating memory."""
