"""Package `accelerate` on `sys.path` that replaces Accelerate: importing it provides Headway's modules instead."""

from headway.compat.accelerate.provided_names.finder import replace_accelerate

replace_accelerate()
