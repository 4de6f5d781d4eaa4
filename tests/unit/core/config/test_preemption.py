"""Preemption: the signals and the deadline that end a run."""

import time
from datetime import timedelta

import pytest

from headway.common import env
from headway.core.config.preemption import Preemption, resolve_preemption
from headway.core.config.run import ProjectConfiguration
from headway.errors import ConfigError

PLACE = ProjectConfiguration("run", automatic_checkpoint_naming=True)


def test_it_is_on_where_checkpoints_have_a_place():
    assert resolve_preemption(None, PLACE) == Preemption()
    assert resolve_preemption(None, ProjectConfiguration("run")) is None
    assert resolve_preemption(None, ProjectConfiguration()) is None
    assert resolve_preemption(False, PLACE) is None
    assert resolve_preemption(True, PLACE) == Preemption()
    own_way = Preemption(exits=False)
    assert resolve_preemption(own_way, ProjectConfiguration()) == own_way


def test_without_a_place_it_is_refused():
    with pytest.raises(ConfigError, match="automatic_checkpoint_naming=True"):
        resolve_preemption(True, ProjectConfiguration("run"))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGNOTHING", "15"])
def test_a_signal_that_cannot_be_caught_is_refused(name):
    with pytest.raises(ConfigError, match="not a signal that a process can catch"):
        Preemption(signals=("SIGTERM", name))


def test_impossible_times_are_refused():
    with pytest.raises(ConfigError, match="a limit above 0"):
        Preemption(time_limit=timedelta(0))
    with pytest.raises(ConfigError, match="a reserve of 0 or more"):
        Preemption(reserve=timedelta(seconds=-1))


def seconds_left(settings):
    deadline = settings.compute_deadline()
    return deadline.moment - deadline.clock()


def test_the_deadline_is_the_end_less_the_reserve():
    assert Preemption().compute_deadline() is None
    assert seconds_left(Preemption(time_limit=timedelta(hours=1))) == pytest.approx(3600 - 120, abs=20)
    # A short run is not all reserve: three quarters of it are used.
    assert seconds_left(Preemption(time_limit=timedelta(minutes=4))) == pytest.approx(180, abs=20)


def test_the_deadline_is_the_end_of_the_slurm_job():
    now = int(time.time())
    with env.patch_variables({"SLURM_JOB_END_TIME": str(now + 7200)}):
        assert Preemption().compute_deadline().moment == pytest.approx(now + 7200 - 120, abs=1)
        assert Preemption(reserve=timedelta(minutes=10)).compute_deadline().moment == pytest.approx(now + 6600, abs=1)
        assert seconds_left(Preemption(time_limit=timedelta(hours=1))) == pytest.approx(3480, abs=20)
