"""Count the synchronizations of each loop on the fake device, and print them as JSON.

Run this in its own process (see fake_device): `python -m tests.synchronizations.count [name ...]`
"""

import json
import sys
import traceback

from headway import log
from headway.common import scope
from headway.core.runtime import device, process
from tests.synchronizations.fake_device import KIND, FakeDevice, register
from tests.synchronizations.loops import LOOPS

NUM_FIRST = 2
"""Number of first updates that are counted separately, because optimizers create their state in the first one."""


def count_waits_of_loop(name: str) -> dict[str, object]:
    """Run one training loop and return its counts as a dict.

    "first": waits in the first updates. "later": largest number of waits in any later update. "where": {operation and
    place: largest number}. "passes": {operation: calls in the last update}. "recorded": number of tensors passed to
    `record_stream`.
    """
    process.reset()
    scope.drop(log.OnceFilter)
    updates: list[int] = []
    where: dict[str, int] = {}
    passes: dict[str, int] = {}
    with FakeDevice() as fake:

        def at_update() -> None:
            nonlocal passes
            updates.append(fake.num_waits)
            if len(updates) > NUM_FIRST:
                passes = dict(fake.passes)
                for (what, place), number in fake.waits.items():
                    key = f"{what} at {place.rpartition(':')[0]}"
                    where[key] = max(where.get(key, 0), number)
            fake.start_over()

        LOOPS[name](at_update)
    return {
        "first": sum(updates[:NUM_FIRST]),
        "later": max(updates[NUM_FIRST:]),
        "where": where,
        "passes": passes,
        "recorded": len(fake.recorded),
    }


def register_accelerator() -> None:
    """Register the fake device in this process, so that Headway uses it as the accelerator."""
    register()
    assert device.detect_hardware().kind == KIND


def main() -> None:
    """Count the loops named on the command line, or all of them, and print the results as JSON."""
    register_accelerator()
    names = sys.argv[1:] or list(LOOPS)
    found: dict[str, object] = {}
    for name in names:
        try:
            found[name] = count_waits_of_loop(name)
        except Exception as error:  # the other loops are still counted
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
