"""Where the launcher's own processes begin: `python -m headway.launch agent ...`, or `worker ...`."""

import sys

# `-m` puts the current folder first, where a file of the user's must not stand in for a module that is needed here.
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

if sys.argv[1] == "agent":
    import signal

    # While torch is imported, a KeyboardInterrupt may be swallowed; nothing has been started yet that must be ended.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from headway.launch import agent

    agent.main(sys.argv[2:])
else:
    from headway.launch import worker

    worker.main(sys.argv[2:])
