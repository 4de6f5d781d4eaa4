"""`RunRequest`: options of one run of `headway verify`, which its processes read from an environment variable."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headway.common import env

STALLED_CODE = 70
"""Exit code with which a rank ends its process if any rank makes no progress for too long."""


@dataclass(frozen=True)
class RunRequest:
    """Options of one run of the user's script for `headway verify`.

    Attributes:
        name: Name of the run, such as "reference".
        folder: Folder for the records of the run.
        output: Folder that replaces the project folder and other output folders of the script.
        num_updates: Number of updates after which the run ends.
        splits_batches: Whether each batch of the script's loaders is split over all processes. A loader whose batch
            size the script has already divided by the number of processes is not changed.
        batch_sizes: Batch size of each loader in the single-process run, by loader number.
        shares_order: Whether loaders shuffle with a seeded sampler, so that the order does not depend on the number of
            processes.
        seed: Seed that is set when the Accelerator is created; -1 to keep the seeds of the script.
        shares_draws: Whether random numbers in the training loop are drawn for the global batch, so that they do not
            depend on the number of processes. Dropout is off in such a run.
        reverses_rows: Whether the rows of each batch are reversed, to change the order of summation.
        saves_after: Number of updates after which a checkpoint is saved; 0 for none.
        kills_after: Number of updates after which rank 0 kills itself by SIGKILL, before its next update; 0 for never.
        fails_in: Number of the backward pass, from 1, that raises an injected out-of-memory error; 0 for none.
        patience: Number of seconds without a batch or an update after which the run is ended.
        reverses_listings: Whether `os.listdir` and `os.scandir` return files in reverse order, to simulate another
            machine.
        probes_leaks: Whether to call the model with changed parts of its first batch, to find outputs that depend on
            other rows, documents, padding or later tokens.
        measures_tensors: Whether to measure the peak memory of tensors. Gradients are not recorded in such a run.
        is_recorded: Whether updates are recorded. If False, only the output of the script is redirected.
    """

    name: str
    folder: str
    output: str
    num_updates: int = 6
    splits_batches: bool = False
    batch_sizes: dict[str, int | None] = field(default_factory=dict)
    shares_order: bool = False
    seed: int = -1
    shares_draws: bool = False
    reverses_rows: bool = False
    saves_after: int = 0
    kills_after: int = 0
    fails_in: int = 0
    patience: float = 60.0
    reverses_listings: bool = False
    probes_leaks: bool = False
    measures_tensors: bool = False
    is_recorded: bool = True

    def format_json(self) -> str:
        """Return the request as JSON text, for the environment variable `HEADWAY_VERIFY`."""
        return json.dumps(asdict(self))


def read_request() -> RunRequest | None:
    """Return the request in this process's environment, or None if `headway verify` did not start this process."""
    text = env.get(env.VERIFY)
    return RunRequest(**json.loads(text)) if text else None


def redirect_path(path: Any, request: RunRequest) -> Path:
    """Return the path in the scratch folder that replaces a path to which the script writes.

    A path that is already in the run's output folder is only made absolute.

    Args:
        path: Path that the script uses, as text or a path object.
        request: Options of the run.
    """
    absolute = Path(os.path.abspath(os.path.expanduser(str(path))))
    if absolute.is_relative_to(request.output):
        return absolute
    return Path(request.output, *absolute.parts[1:])
