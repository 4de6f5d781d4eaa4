"""What a run's layout may be and who asked for it: axes of the mesh, and the options of each kind of parallelism."""
