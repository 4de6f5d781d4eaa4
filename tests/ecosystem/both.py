"""Runs the same unchanged script with Accelerate and with Headway in its place, and compares the numbers that each rank records.

Scripts are in `tests/ecosystem/scripts`. They import what their users would import, and record numbers with
`tests.scripts.evidence.Evidence("evidence", rank)`. One process per library has already imported the heavy packages and
forks itself for each rank, so that a run has no start-up cost.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from headway.launch.stand_in import make_variables
from tests.distributed.script_stage import Stage

SCRIPTS = Path(__file__).parent / "scripts"
LIBRARIES = ("accelerate", "headway")

PRELOADED = [
    "accelerate.big_modeling", "accelerate.data_loader", "accelerate.local_sgd", "accelerate.logging",
    "accelerate.test_utils.training",
    "accelerate.utils", "datasets", "diffusers.optimization", "diffusers.pipelines.ddpm.pipeline_ddpm",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion", "diffusers.training_utils", "peft", "safetensors.torch",
    "schedulefree", "sentence_transformers", "sklearn.datasets", "sklearn.model_selection", "tests.scripts.evidence", "torch._dynamo",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor.experimental",
    "torch.utils.tensorboard", "tqdm.auto", "transformers.generation.utils", "transformers.integrations.integration_utils",
    "transformers.trainer", "transformers.models.clip.modeling_clip", "transformers.models.clip.tokenization_clip",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama", "t5")),
    *(f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "reward", "grpo")),
]  # fmt: skip
"""Modules that the scripts import. Each stage imports them once, which takes as long as dozens of runs."""

Numbers = dict[str, list[float]]


@dataclass
class Sides:
    """The numbers that a script recorded on each rank, with Accelerate and with Headway."""

    accelerate: list[Numbers]
    headway: list[Numbers]

    def differences(self) -> dict[str, float]:
        """Return the largest difference for each name over all ranks, relative to the largest number with that name.

        Raises:
            AssertionError: If the libraries recorded different names or different amounts of numbers.
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


def _difference(a_numbers: list[float], b_numbers: list[float]) -> float:
    largest = max((abs(a - b) for a, b in zip(a_numbers, b_numbers)), default=0.0)
    return largest / (max(map(abs, a_numbers), default=1.0) or 1.0)


@cache
def _stages() -> dict[str, Stage]:
    """Return one stage per library, which exists until this process ends."""
    as_accelerate = make_variables({name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ})
    return {
        # A rank of Accelerate may hang after it has finished (see below), so the stage only waits briefly.
        "accelerate": Stage(["accelerate", *PRELOADED], grace_s=1.0),
        "headway": Stage(["accelerate", "headway.accelerator", *PRELOADED], as_accelerate),
    }


class Both:
    """Runs scripts with both libraries.

    Args:
        folder: Folder for the files of all runs.
        scripts: Folder with the scripts.
    """

    def __init__(self, folder: Path, scripts: Path = SCRIPTS) -> None:
        self.folder = folder
        self.scripts = scripts
        self._num_runs = 0

    def run(self, script: str, *args: str, world_size: int = 1, timeout_s: float = 240) -> Sides:
        """Run SCRIPT.py with these arguments on `world_size` processes, with both libraries.

        Raises:
            AssertionError: If a rank failed. The message is its output.
        """
        self._num_runs += 1
        return Sides(*(self._run_once(library, script, args, world_size, timeout_s) for library in LIBRARIES))

    def run_on(
        self, library: str, script: str, *args: str, world_size: int = 1, timeout_s: float = 240
    ) -> list[Numbers]:
        """Run the script with one library, "accelerate" or "headway", and return the recorded numbers of each rank.

        Raises:
            AssertionError: If a rank failed. The message is its output.
        """
        self._num_runs += 1
        return self._run_once(library, script, args, world_size, timeout_s)

    def get_latest_folder(self, library: str, script: str) -> Path:
        """Return the working folder of the latest run."""
        return self.folder / f"{self._num_runs}-{script}-{library}"

    def _run_once(
        self, library: str, script: str, args: Sequence[str], world_size: int, timeout_s: float
    ) -> list[Numbers]:
        folder = self.folder / f"{self._num_runs}-{script}-{library}"
        path = self.scripts / f"{script}.py"
        codes = _stages()[library].run(path, *args, folder=folder, world_size=world_size, timeout_s=timeout_s)
        output = "".join((folder / f"log{rank}").read_text()[-6000:] for rank in range(world_size))
        # With gloo, a rank of Accelerate may hang at exit, because DDP's reducer outlives the process group.
        assert set(codes) <= ({0} if library == "headway" else {0, None}), f"{library}: {codes}\n{output}"
        return [json.loads((folder / "evidence" / f"rank{rank}.json").read_text()) for rank in range(world_size)]
