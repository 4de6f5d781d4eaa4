"""One file per step; each has `run(bench)`, and runs in a process of its own."""
