"""Agent of the launcher on each machine: it starts and ends ranks, watches other machines and reports failures."""
