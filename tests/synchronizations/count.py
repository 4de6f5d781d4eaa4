"""Counts the synchronizations of each loop on the device that is none; prints them as JSON. A process of its own, see fake_device.

`python -m tests.synchronizations.count [name ...]`
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
"""Updates that come before the count: optimizers make their state in the first one."""


def count(name: str) -> dict[str, object]:
    """{"first": waits of the first updates, "later": the most of any update after them, "where": by place, "passes": ...}."""
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


def be_an_accelerator() -> None:
    """From here on this process has the device that is none."""
    register()
    assert device.detect_hardware().kind == KIND


def main() -> None:
    """Count those named, or all."""
    be_an_accelerator()
    names = sys.argv[1:] or list(LOOPS)
    found: dict[str, object] = {}
    for name in names:
        try:
            found[name] = count(name)
        except Exception as error:  # the others are told all the same
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
