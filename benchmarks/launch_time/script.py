"""A script that does next to nothing, so that the benchmark measures its start."""

import sys

sys.stdout.write("started\n")
