"""Random sweeps: runs that are ended at random moments, and saves in which one call fails, against what is promised."""
