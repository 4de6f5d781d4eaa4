"""Habits of scripts: a few lines each, with Accelerate's names, that return what a user would see.

`recorded.json` holds what Accelerate's own code returns, by habit and number of processes. Record it anew where Accelerate is
installed: `python -m tests.ecosystem.habits.record`, followed by names to record only some. `... --compare` tells what differs.
"""
