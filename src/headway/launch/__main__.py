"""Where the launcher's own processes begin: `python -m headway.launch agent ...`, `worker ...`, or `under PID COMMAND...`."""

import sys

# `-m` puts the current folder first, where a file of the user's must not stand in for a module that is needed here.
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

if sys.argv[1] == "agent":
    import signal

    # While torch is imported, a KeyboardInterrupt may be swallowed; nothing has been started yet that must be ended.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from headway.launch.agent import agent

    agent.main(sys.argv[2:])
elif sys.argv[1] == "under":
    import os
    import signal

    from headway.launch import worker

    # A notebook's kernel may be killed at any time; what it has started ends with it, in order.
    worker.die_with(int(sys.argv[2]), signal.SIGTERM)
    os.execv(sys.argv[3], sys.argv[3:])
else:
    from headway.launch import worker

    worker.main(sys.argv[2:])
