"""All that only an accelerator can show, by one command: `make gpu`, or `python -m benchmarks.gpu`."""
