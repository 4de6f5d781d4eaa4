"""The same script on Accelerate and on Headway in its place, not a character changed: what each rank noted, side by side.

A script stands in `tests/ecosystem/scripts`, imports what its users import, and notes numbers with
`tests.scripts.evidence.Evidence("evidence", rank)`. One process per library has the heavy packages imported and forks itself
for each rank, so a run costs no start-up.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.launch.stand_in import variables
from tests.distributed.script_stage import Stage

SCRIPTS = Path(__file__).parent / "scripts"
LIBRARIES = ("accelerate", "headway")

Numbers = dict[str, list[float]]


@dataclass
class Sides:
    """What a script noted, by rank: on Accelerate, and on Headway."""

    accelerate: list[Numbers]
    headway: list[Numbers]

    def differences(self) -> dict[str, float]:
        """The largest difference under each name over all ranks, relative to the largest number of that name.

        Raises:
            AssertionError: one of them noted other names, or not as many numbers.
        """
        found: dict[str, float] = {}
        assert len(self.accelerate) == len(self.headway) > 0
        for theirs, ours in zip(self.accelerate, self.headway):
            assert set(theirs) == set(ours)
            assert {name: len(each) for name, each in theirs.items()} == {
                name: len(each) for name, each in ours.items()
            }
            for name in theirs:
                found[name] = max(found.get(name, 0.0), _difference(theirs[name], ours[name]))
        assert found
        return found


def _difference(one: list[float], other: list[float]) -> float:
    largest = max((abs(a - b) for a, b in zip(one, other)), default=0.0)
    return largest / (max(map(abs, one), default=1.0) or 1.0)


class Both:
    """Runs scripts on both libraries.

    Args:
        folder: for what the runs write.
        preloaded: modules that are imported once; the script's own imports.
    """

    def __init__(self, folder: Path, preloaded: Sequence[str]) -> None:
        self.folder = folder
        self._num_runs = 0
        as_accelerate = variables({name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ})
        self._stages = {
            "accelerate": Stage(["accelerate", *preloaded]),
            "headway": Stage(["accelerate", "headway.accelerator", *preloaded], as_accelerate),
        }

    def run(self, script: str, *args: str, world_size: int = 1, timeout_s: float = 240) -> Sides:
        """Run `scripts/SCRIPT.py ARGS` on so many processes of each library.

        Raises:
            AssertionError: a rank failed; what it printed is the message.
        """
        self._num_runs += 1
        return Sides(*(self._one(library, script, args, world_size, timeout_s) for library in LIBRARIES))

    def on_headway(self, script: str, *args: str, world_size: int = 1, timeout_s: float = 240) -> list[Numbers]:
        """Run it on Headway alone, for what Accelerate cannot do; returns what each rank noted.

        Raises:
            AssertionError: a rank failed; what it printed is the message.
        """
        self._num_runs += 1
        return self._one("headway", script, args, world_size, timeout_s)

    def _one(self, library: str, script: str, args: Sequence[str], world_size: int, timeout_s: float) -> list[Numbers]:
        folder = self.folder / f"{self._num_runs}-{script}-{library}"
        path = SCRIPTS / f"{script}.py"
        codes = self._stages[library].run(path, *args, folder=folder, world_size=world_size, timeout_s=timeout_s)
        told = "".join((folder / f"log{rank}").read_text()[-6000:] for rank in range(world_size))
        # With gloo a rank of Accelerate's may hang when it is done: the group is gone, and DDP's reducer is still there.
        assert set(codes) <= ({0} if library == "headway" else {0, None}), f"{library}: {codes}\n{told}"
        return [json.loads((folder / "evidence" / f"rank{rank}.json").read_text()) for rank in range(world_size)]

    def close(self) -> None:
        """End the processes."""
        for stage in self._stages.values():
            stage.close()
