"""Test the warning about copies of a script that srun or mpirun has started without the launcher."""

import pytest

from headway import Accelerator
from headway.core.runtime import process
from headway.core.runtime.separate_tasks import warn_of_separate_tasks


@pytest.mark.parametrize(
    ("environment", "starter"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, "srun"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, "mpirun"),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, "mpirun"),
    ],
)
def test_accelerator_warns_once(environment, starter, monkeypatch, caplog):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    process.reset()
    Accelerator(cpu=True)
    process.reset()
    Accelerator(cpu=True)
    process.reset()
    assert [f"`{starter} headway launch SCRIPT`" in message for message in caplog.messages] == [True]
    assert "4 tasks" in caplog.text


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # the batch script, which srun has not started
        {"PMI_SIZE": "4", "PMI_RANK": "1"},  # only the first task warns
        {"PMI_SIZE": "many", "PMI_RANK": "0"},
    ],
)
def test_no_warning_for_one_task(environment, caplog):
    warn_of_separate_tasks(environment)
    assert not caplog.messages
