"""The launcher on each machine: its ranks, the other machines, and how a run ends."""
