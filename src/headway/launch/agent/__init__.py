"""The launcher's agent on each machine, which starts and ends ranks, watches other machines and reports failures."""
