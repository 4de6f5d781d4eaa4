"""Memory at run time: detection of and recovery from out-of-memory errors, batch-size search, and measurements."""
