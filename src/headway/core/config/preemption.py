"""Settings for preemption: the signals and the time limit that end a run, and whether it saves and exits by itself."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from headway.common import env
from headway.core.config.run import ProjectConfiguration
from headway.errors import ConfigError

_JOB_END = "SLURM_JOB_END_TIME"
"""Environment variable with the time at which SLURM ends the job, in seconds since 1970."""


@dataclass(frozen=True)
class Preemption:
    """Signals and a time limit that end a run early, for `Accelerator(preemption=...)`.

    By default, all ranks then save after the same step and exit with code 75. If the same command is started again,
    `resume` continues the run. Automatic saves need a `ProjectConfiguration` with `project_dir` and
    `automatic_checkpoint_naming=True`. Create the Accelerator in the main thread, where Python handles signals.

    Attributes:
        signals: Name, or names, of the signals that end the run. They can be sent to any rank or to the launcher. Empty:
            only the time limit applies. Default: "SIGTERM" and "SIGUSR1".
        time_limit: Maximum duration of the run as a `timedelta`, counted from the creation of the Accelerator. None (the
            default): until SLURM_JOB_END_TIME if it is set, else unlimited.
        reserve: Time before the end at which ranks save, at most a quarter of the time that is left at the start. Choose more
            than one save plus one step takes. Default: 2 minutes.
        exits: Whether to save and exit automatically. False: `accelerator.preempted` becomes True on all ranks in the same
            step, and the script must save and end the loop. Default: True.

    Raises:
        ConfigError: If a name is not a signal that a process can catch, `time_limit` is not positive, or `reserve` is
            negative.

    Example::

        accelerator = Accelerator(
            project_config=ProjectConfiguration("runs/first", automatic_checkpoint_naming=True),
            preemption=Preemption(time_limit=timedelta(hours=4)),
        )
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.resume()
    """

    signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1")
    time_limit: timedelta | None = None
    reserve: timedelta = timedelta(minutes=2)
    exits: bool = True

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a field has an invalid value."""
        signals = self.signals
        object.__setattr__(self, "signals", (signals,) if isinstance(signals, str) else tuple(signals))
        self.numbers  # noqa: B018  (raises an error for an unknown signal)
        if self.reserve < timedelta(0) or (self.time_limit is not None and self.time_limit <= timedelta(0)):
            raise ConfigError(
                f"Preemption(time_limit={self.time_limit!r}, reserve={self.reserve!r}): a limit above 0, a reserve of 0 or more"
            )

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the signals that request the end of the run.

        Raises:
            ConfigError: If a name does not belong to a signal, or the signal cannot be caught.
        """
        allowed = {member.name: int(member) for member in signal.Signals if member.name not in ("SIGKILL", "SIGSTOP")}
        unknown = [name for name in self.signals if name not in allowed]
        if unknown:
            raise ConfigError(
                f"Preemption(signals={self.signals!r}): {unknown[0]!r} is not a signal that a process can catch; give names such as "
                "'SIGTERM' and 'SIGUSR1'"
            )
        return tuple(allowed[name] for name in self.signals)

    def compute_deadline(self) -> "Deadline | None":
        """Return the deadline at which to save; None if there is no time limit.

        It comes `reserve` before the end of the run, but no earlier than after three quarters of the remaining time.
        `time_limit` is measured with the monotonic clock, which ignores corrections of the system time and stops while
        the machine is suspended. The end of a SLURM job is compared with the system time.
        """
        if self.time_limit is not None:
            clock: Callable[[], float] = time.monotonic
            end = clock() + self.time_limit.total_seconds()
        else:
            clock = time.time
            end = float(env.get_int(_JOB_END) or 0)
            if not end:
                return None
        available_seconds = max(0.0, end - clock())
        reserve_seconds = min(self.reserve.total_seconds(), available_seconds / 4)
        return Deadline(clock, end - reserve_seconds)


@dataclass(frozen=True)
class Deadline:
    """Point in time, measured by one of the machine's clocks, at which a run must save.

    Attributes:
        clock: Function that reads the clock, in seconds.
        seconds: Reading of the clock at the deadline.
    """

    clock: Callable[[], float]
    seconds: float

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self.clock() >= self.seconds


def resolve_preemption(given: "Preemption | bool | None", project: ProjectConfiguration) -> Preemption | None:
    """Return the settings for the Accelerator's argument `preemption`, or None if signals keep their usual effect.

    Args:
        given: Settings of the script. True: the defaults of `Preemption`. False: off. None: the defaults if a directory
            for checkpoints is configured, else off.
        project: Locations of the run's files.

    Raises:
        ConfigError: If automatic saving is requested but no directory for checkpoints is configured.
    """
    has_checkpoint_folder = project.project_dir is not None and project.automatic_checkpoint_naming
    if given is None:
        return Preemption() if has_checkpoint_folder else None
    if given is False:
        return None
    preemption = Preemption() if given is True else given
    if not has_checkpoint_folder and preemption.exits:
        raise ConfigError(
            "preemption saves where accelerator.resume('latest') looks: pass project_config=ProjectConfiguration("
            "project_dir, automatic_checkpoint_naming=True), or Preemption(exits=False) and save yourself"
        )
    return preemption
