"""Main process of `headway verify`: reads options as JSON, runs the script, and prints the results of all checks.

The command line starts this module in place of its own process, so that `headway` itself does not import numpy.
"""

import json
import signal
import sys


def main() -> None:
    """Verify the script that the JSON options in `sys.argv[1]` describe, and exit with the code of the result."""
    signal.signal(signal.SIGINT, _raise_interrupt)
    signal.signal(signal.SIGTERM, _exit_terminated)
    try:
        from headway.verify.command import run_command  # imports numpy, which Ctrl-C may interrupt

        sys.exit(run_command(json.loads(sys.argv[1])))
    except KeyboardInterrupt:
        print("headway: interrupted; all runs of the script have ended", file=sys.stderr)
        sys.exit(130)


def _raise_interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt on the first SIGINT, and ignore later signals while the runs are ended."""
    _ignore_signals()
    raise KeyboardInterrupt


def _exit_terminated(*_: object) -> None:
    """Exit with code 143 on the first SIGTERM, and ignore later signals while the runs are ended."""
    _ignore_signals()
    sys.exit(143)


def _ignore_signals() -> None:
    """Ignore further signals, so that they cannot interrupt the shutdown of the runs, which takes less than a second."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    main()
