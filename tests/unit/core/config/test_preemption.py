"""Test the settings of preemption: signals, time limits, and the deadline at which a run ends."""

import time
from datetime import timedelta

import pytest

from headway.common import env
from headway.core.config.preemption import Preemption, resolve_preemption
from headway.core.config.run import ProjectConfiguration
from headway.errors import ConfigError

PLACE = ProjectConfiguration("run", automatic_checkpoint_naming=True)


def test_preemption_is_on_if_checkpoints_are_named_automatically():
    assert resolve_preemption(None, PLACE) == Preemption()
    assert resolve_preemption(None, ProjectConfiguration("run")) is None
    assert resolve_preemption(None, ProjectConfiguration()) is None
    assert resolve_preemption(False, PLACE) is None
    assert resolve_preemption(True, PLACE) == Preemption()
    own_way = Preemption(exits=False)
    assert resolve_preemption(own_way, ProjectConfiguration()) == own_way


def test_preemption_without_automatic_naming_is_refused():
    with pytest.raises(ConfigError, match="automatic_checkpoint_naming=True"):
        resolve_preemption(True, ProjectConfiguration("run"))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGNOTHING", "15"])
def test_signal_that_cannot_be_caught_is_refused(name):
    with pytest.raises(ConfigError, match="not a signal that a process can catch"):
        Preemption(signals=("SIGTERM", name))


def test_invalid_times_are_refused():
    with pytest.raises(ConfigError, match="a limit above 0"):
        Preemption(time_limit=timedelta(0))
    with pytest.raises(ConfigError, match="a reserve of 0 or more"):
        Preemption(reserve=timedelta(seconds=-1))


def measure_seconds_left(settings):
    deadline = settings.compute_deadline()
    return deadline.seconds - deadline.clock()


def test_deadline_is_the_end_minus_the_reserve():
    assert Preemption().compute_deadline() is None
    assert measure_seconds_left(Preemption(time_limit=timedelta(hours=1))) == pytest.approx(3600 - 120, abs=20)
    # In a short run, the reserve is at most a quarter of the time.
    assert measure_seconds_left(Preemption(time_limit=timedelta(minutes=4))) == pytest.approx(180, abs=20)


def test_deadline_is_the_end_of_the_slurm_job():
    now = int(time.time())
    with env.patch_variables({"SLURM_JOB_END_TIME": str(now + 7200)}):
        assert Preemption().compute_deadline().seconds == pytest.approx(now + 7200 - 120, abs=1)
        assert Preemption(reserve=timedelta(minutes=10)).compute_deadline().seconds == pytest.approx(now + 6600, abs=1)
        assert measure_seconds_left(Preemption(time_limit=timedelta(hours=1))) == pytest.approx(3480, abs=20)
