"""How a run answers a request to end: which signals, which deadline, and what happens then."""

import signal
import time
from dataclasses import dataclass
from datetime import timedelta

from headway.common import env
from headway.config.run import ProjectConfiguration
from headway.errors import ConfigError

_JOB_END = "SLURM_JOB_END_TIME"


@dataclass(frozen=True)
class Preemption:
    """What asks a run to end, and what it does then: all ranks agree on a point, save there, and end with exit code 75.

    Attributes:
        signals: names of the signals that ask, to any rank or to the launcher.
        time_limit: how long the run may take, from the Accelerator on; None: until SLURM ends the job where SLURM says when
            (SLURM_JOB_END_TIME), else without end.
        reserve: how long before that end the ranks save: longer than a save and a step take. At most a quarter of the time
            that is left at the start, so that a run gets on.
        exits: save and end; False: only `accelerator.preempted` becomes True, on all ranks at the same check, and the loop
            saves and ends by itself.
    """

    signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1")
    time_limit: timedelta | None = None
    reserve: timedelta = timedelta(minutes=2)
    exits: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        self.numbers  # noqa: B018  (raises)
        if self.reserve < timedelta(0) or (self.time_limit is not None and self.time_limit <= timedelta(0)):
            raise ConfigError(
                f"Preemption(time_limit={self.time_limit!r}, reserve={self.reserve!r}): a limit above 0, a reserve of 0 or more"
            )

    @property
    def numbers(self) -> tuple[int, ...]:
        """The signals' numbers.

        Raises:
            ConfigError: a name that is not a signal, or one that cannot be caught.
        """
        allowed = {one.name: int(one) for one in signal.Signals if one.name not in ("SIGKILL", "SIGSTOP")}
        unknown = [name for name in self.signals if name not in allowed]
        if unknown:
            raise ConfigError(
                f"Preemption(signals={self.signals!r}): {unknown[0]!r} is not a signal that a process can catch; give names such as "
                "'SIGTERM' and 'SIGUSR1'"
            )
        return tuple(allowed[name] for name in self.signals)

    def end(self) -> float | None:
        """When to save, in seconds since the epoch; None where nothing says."""
        now = time.time()
        end = now + self.time_limit.total_seconds() if self.time_limit is not None else env.get_int(_JOB_END)
        return None if not end else end - min(self.reserve.total_seconds(), max(0.0, end - now) / 4)


def preemption_settings(given: "Preemption | bool | None", project: ProjectConfiguration) -> Preemption | None:
    """What the Accelerator's argument means; None: signals end the process as ever.

    Args:
        given: True: as the class says; None: the same where checkpoints have a place of their own, else off.
        project: where checkpoints go.

    Raises:
        ConfigError: asked for, but there is no place.
    """
    has_place = project.project_dir is not None and project.automatic_checkpoint_naming
    if given is None:
        return Preemption() if has_place else None
    if given is False:
        return None
    chosen = Preemption() if given is True else given
    if not has_place and chosen.exits:
        raise ConfigError(
            "preemption saves where accelerator.resume('latest') looks: pass project_config=ProjectConfiguration("
            "project_dir, automatic_checkpoint_naming=True), or Preemption(exits=False) and save yourself"
        )
    return chosen
