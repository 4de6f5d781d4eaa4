"""The same script on Accelerate and on Headway in its place, not a character changed: what each rank noted, side by side.

A script stands in `tests/ecosystem/scripts`, imports what its users import, and notes numbers with
`tests.scripts.evidence.Evidence("evidence", rank)`. One process per library has the heavy packages imported and forks itself
for each rank, so a run costs no start-up.
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
"""What the scripts import: once for each library and process of the suite, which takes as long as dozens of runs."""

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


@cache
def _stages() -> dict[str, Stage]:
    """A stage for each library, which ends with this process."""
    as_accelerate = make_variables({name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ})
    return {
        # Where one of its ranks hangs when it is done (see below), nobody waits for it.
        "accelerate": Stage(["accelerate", *PRELOADED], grace_s=1.0),
        "headway": Stage(["accelerate", "headway.accelerator", *PRELOADED], as_accelerate),
    }


class Both:
    """Runs scripts on both libraries.

    Args:
        folder: for what the runs write.
        scripts: the folder that the scripts stand in.
    """

    def __init__(self, folder: Path, scripts: Path = SCRIPTS) -> None:
        self.folder = folder
        self.scripts = scripts
        self._num_runs = 0

    def run(self, script: str, *args: str, world_size: int = 1, timeout_s: float = 240) -> Sides:
        """Run SCRIPT.py with ARGS on so many processes of each library.

        Raises:
            AssertionError: a rank failed; what it printed is the message.
        """
        self._num_runs += 1
        return Sides(*(self._one(library, script, args, world_size, timeout_s) for library in LIBRARIES))

    def run_on(
        self, library: str, script: str, *args: str, world_size: int = 1, timeout_s: float = 240
    ) -> list[Numbers]:
        """Run it on one of the two, "accelerate" or "headway"; returns what each rank noted.

        Raises:
            AssertionError: a rank failed; what it printed is the message.
        """
        self._num_runs += 1
        return self._one(library, script, args, world_size, timeout_s)

    def latest(self, library: str, script: str) -> Path:
        """The folder that the latest run had as its current one."""
        return self.folder / f"{self._num_runs}-{script}-{library}"

    def _one(self, library: str, script: str, args: Sequence[str], world_size: int, timeout_s: float) -> list[Numbers]:
        folder = self.folder / f"{self._num_runs}-{script}-{library}"
        path = self.scripts / f"{script}.py"
        codes = _stages()[library].run(path, *args, folder=folder, world_size=world_size, timeout_s=timeout_s)
        told = "".join((folder / f"log{rank}").read_text()[-6000:] for rank in range(world_size))
        # With gloo a rank of Accelerate's may hang when it is done: the group is gone, and DDP's reducer is still there.
        assert set(codes) <= ({0} if library == "headway" else {0, None}), f"{library}: {codes}\n{told}"
        return [json.loads((folder / "evidence" / f"rank{rank}.json").read_text()) for rank in range(world_size)]
