"""What asks a run to end, and when it does by itself."""

import time
from datetime import timedelta

import pytest

from headway.common import env
from headway.config.run import Preemption, ProjectConfiguration, preemption_settings
from headway.errors import ConfigError

PLACE = ProjectConfiguration("run", automatic_checkpoint_naming=True)


def test_it_is_on_where_checkpoints_have_a_place():
    assert preemption_settings(None, PLACE) == Preemption()
    assert preemption_settings(None, ProjectConfiguration("run")) is None
    assert preemption_settings(None, ProjectConfiguration()) is None
    assert preemption_settings(False, PLACE) is None
    assert preemption_settings(True, PLACE) == Preemption()
    own_way = Preemption(exits=False)
    assert preemption_settings(own_way, ProjectConfiguration()) == own_way


def test_without_a_place_it_is_refused():
    with pytest.raises(ConfigError, match="automatic_checkpoint_naming=True"):
        preemption_settings(True, ProjectConfiguration("run"))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGNOTHING", "15"])
def test_a_signal_that_cannot_be_caught_is_refused(name):
    with pytest.raises(ConfigError, match="not a signal that a process can catch"):
        Preemption(signals=("SIGTERM", name))


def test_impossible_times_are_refused():
    with pytest.raises(ConfigError, match="a limit above 0"):
        Preemption(time_limit=timedelta(0))
    with pytest.raises(ConfigError, match="a reserve of 0 or more"):
        Preemption(reserve=timedelta(seconds=-1))


def test_the_deadline_is_the_end_less_the_reserve():
    now = time.time()
    assert Preemption().end() is None
    assert Preemption(time_limit=timedelta(hours=1)).end() == pytest.approx(now + 3600 - 120, abs=20)
    # A short run is not all reserve: three quarters of it are used.
    assert Preemption(time_limit=timedelta(minutes=4)).end() == pytest.approx(now + 180, abs=20)


def test_slurm_says_when_its_job_ends():
    now = int(time.time())
    with env.patched({"SLURM_JOB_END_TIME": str(now + 7200)}):
        assert Preemption().end() == pytest.approx(now + 7200 - 120, abs=1)
        assert Preemption(reserve=timedelta(minutes=10)).end() == pytest.approx(now + 6600, abs=1)
        assert Preemption(time_limit=timedelta(hours=1)).end() == pytest.approx(now + 3480, abs=20)
