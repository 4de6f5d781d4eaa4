"""Private members of torch's elastic agent that the launcher's agent overrides or reads, each with the reason.

torch documents no way to extend `LocalElasticAgent` other than subclassing it, so there are no public names to use
instead. A test checks that the methods exist. The attributes exist only on instances, and every test that launches a
run uses them.
"""

OVERRIDDEN = (
    # Meets the other machines. Overridden to name missing machines and to open the agents' connections.
    "_rendezvous",
    # Starts the ranks' processes. Overridden to start watching them.
    "_start_workers",
    # Checks the ranks once per interval. Overridden to decide on the basis of the reports of all machines.
    "_monitor_workers",
    # Ends the ranks and starts them again. Overridden to report why they have ended.
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
