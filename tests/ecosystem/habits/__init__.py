"""Habits: typical uses of Accelerate in a few lines, each returning what a user would see.

`recorded.json` contains the results with Accelerate's own code, for each habit and number of processes. To record them
again where Accelerate is installed, run `python -m tests.ecosystem.habits.record`, followed by names to record only
some. `... --compare` prints the habits whose results with Headway differ.
"""
