"""Entry point of the launcher's own processes (`python -m headway.launch`).

The first argument selects the process: `agent ORDER`, `worker AGENT_PID KIND STREAMS TARGET ARGS...` or
`under PID COMMAND...`. `under` runs a command that is ended when the process PID ends.
"""

import sys

# `-m` puts the current folder first on sys.path, where a user's file could shadow a module that is imported here.
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

if sys.argv[1] == "agent":
    import signal

    # While torch is imported, a KeyboardInterrupt can be swallowed. No rank has been started yet, so exit at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from headway.launch.agent import agent

    agent.main(sys.argv[2:])
elif sys.argv[1] == "under":
    import os
    import signal

    from headway.launch import worker

    # A notebook's kernel can be killed at any time. SIGTERM then makes this process end its ranks in order.
    worker.end_with_parent(int(sys.argv[2]), signal.SIGTERM)
    os.execv(sys.argv[3], sys.argv[3:])
else:
    from headway.launch import worker

    worker.main(sys.argv[2:])
