"""Warning about a script that srun or mpirun has started several times without the launcher: each copy trains alone."""

from collections.abc import Mapping

from headway.common.untrusted import parse_whole_number
from headway.log import get_logger

log = get_logger(__name__)

_STARTERS = (
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
)
"""Programs that start several tasks, and the environment variables with the number of tasks and the task's rank."""


def warn_of_separate_tasks(environment: Mapping[str, str]) -> None:
    """Warn if srun or mpirun has started several tasks of this script. Only the first task warns.

    Call this in a process that is not part of a process group. Without the launcher, each task would then train alone,
    on all of the data, and write the same files as the others.

    Args:
        environment: Environment variables of this process.
    """
    for starter, size, rank in _STARTERS:
        num_tasks = parse_whole_number(environment.get(size, ""))
        if num_tasks is None or num_tasks < 2 or rank not in environment:
            continue
        if parse_whole_number(environment[rank]) == 0:
            log.warning_once(
                "%s has started %d tasks of this script (%s), but each runs alone, as rank 0 of 1. To train on all of them "
                "together, start `%s headway launch SCRIPT`. Ignore this warning if they are meant to be separate runs",
                starter,
                num_tasks,
                size,
                starter,
            )
        return
