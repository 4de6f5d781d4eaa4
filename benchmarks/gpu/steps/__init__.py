"""The steps: one file each, with a function `run(bench)`. Each step runs in a separate process."""
