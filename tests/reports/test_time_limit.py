"""Tests that a run's time limit counts the machine's running time: setting the clock or suspending it ends no run."""

import time
from datetime import timedelta

import pytest

from headway.common import env
from headway.core.config.preemption import Preemption


@pytest.mark.parametrize("jump", [7200.0, -7200.0])
def test_setting_the_clock_does_not_move_the_limit(jump, monkeypatch):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    deadline = Preemption(time_limit=timedelta(hours=1)).compute_deadline()
    monkeypatch.setattr(time, "time", real)
    assert deadline is not None
    assert 0 < deadline.seconds - time.monotonic() < 3600
    assert not deadline.is_over


def test_limit_follows_the_monotonic_clock(monkeypatch):
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() - 7200)
    deadline = Preemption(time_limit=timedelta(hours=1)).compute_deadline()
    assert deadline is not None
    assert not deadline.is_over
    monkeypatch.setattr(time, "monotonic", real)
    assert real() > deadline.seconds


def test_end_of_a_slurm_job_is_a_wall_clock_time():
    with env.patch_variables({"SLURM_JOB_END_TIME": str(int(time.time()) - 1)}):
        deadline = Preemption().compute_deadline()
        assert deadline is not None
        assert deadline.is_over
