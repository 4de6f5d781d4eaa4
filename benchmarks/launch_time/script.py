"""A script that does next to nothing, so that starting it is what is measured."""

import sys

sys.stdout.write("started\n")
