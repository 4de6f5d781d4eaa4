"""Program that `headway doctor` and `headway test` start on every rank to run their checks.

This module and the checks that it runs are the only modules of `headway.cli` whose import also imports torch.
"""

import sys
from collections.abc import Sequence

from headway.cli.fabric_checks import check_fabric
from headway.cli.setup_checks import check_setup


def main(arguments: Sequence[str]) -> None:
    """Run the checks of `headway doctor` or `headway test`, and exit with code 1 if any of them fails, else 0.

    Args:
        arguments: ["test"], or ["doctor", "N"], where N is the number of bad findings on this machine so far.
    """
    is_good = check_fabric(int(arguments[1])) if arguments[0] == "doctor" else check_setup()
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
