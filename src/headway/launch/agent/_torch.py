"""Private members of torch's elastic agent that the launcher's agent overrides or reads, each with the reason.

torch documents no way to extend `LocalElasticAgent` other than subclassing it, so nothing public replaces these names.
A test resolves the methods. The attributes exist on instances only, and each launch of the tests uses them.
"""

OVERRIDDEN = (
    # Meets the other machines. Overridden to name missing machines and to open the agents' connections.
    "_rendezvous",
    # Starts the ranks' processes. Overridden to start watching them.
    "_start_workers",
    # Checks the ranks once per interval. Overridden to decide by what all machines report.
    "_monitor_workers",
    # Ends the ranks before a new attempt. Overridden to report the failed attempt.
    "_restart_workers",
    # Ends the ranks at the end of the run. Overridden to give them time to save.
    "_shutdown",
)

INSTANCE_ATTRIBUTES = (
    # Processes of the ranks. The public interface shows only their results.
    "_pcontext",
    # Global and local ranks of this machine's workers.
    "_worker_group",
    # Number of remaining restarts, set to 0 if a restart cannot help.
    "_remaining_restarts",
    # Store of the rendezvous.
    "_store",
)
