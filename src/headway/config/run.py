"""Settings of a run that the user's code may give: data loading, accumulation, project folders, preemption.

What the Accelerator's arguments mean together: windows, loading, project folders, and where they were written.

How a run answers a request to end: which signals, which deadline, and what happens then.
"""

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from headway.common import env
from headway.common.callsite import call_site
from headway.config.load import UNSET, run_setting
from headway.config.values import KwargsHandler, known_keywords
from headway.errors import ConfigError


@known_keywords
@dataclass(unsafe_hash=True)
class DataLoaderConfiguration(KwargsHandler):
    """How prepared loaders split, pad and move batches.

    Attributes:
        split_batches: False: the loader's batch size is per process, the global batch is that times the processes.
            True: it is the global batch, split over the processes (a multiple of their number).
        dispatch_batches: True: only the main process reads the data and hands each rank its part. None and False: every
            process reads its own part.
        even_batches: True: the last round is completed with samples from the start, which the validity mask marks.
            False: nothing is repeated; a rank without a batch of its own gets one of weight zero.
        use_seedable_sampler: False: each pass draws its order as torch's own loader would, from the loader's generator or from
            torch's global one (on several ranks: rank 0's draw), so that a prepared loop sees what the plain one sees. True:
            shuffling is a pure function of (seed, epoch), and no global generator is touched. None: True where
            `data_seed` is given.
        data_seed: the seed of a seedable order; None: derived from torch's initial seed, agreed over the ranks.
        non_blocking: None and True: batches are copied to an accelerator from pinned memory, on a separate stream, and the
            host does not wait. False: the host waits for each copy.
        use_stateful_dataloader: load with torchdata's StatefulDataLoader, which can resume iterable datasets.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool | None = None
    data_seed: int | None = None
    non_blocking: bool | None = None
    use_stateful_dataloader: bool = False

    @property
    def is_seedable(self) -> bool:
        """Is the order a pure function of (seed, epoch)?"""
        return self.data_seed is not None if self.use_seedable_sampler is None else self.use_seedable_sampler


@known_keywords
@dataclass(unsafe_hash=True)
class GradientAccumulationPlugin(KwargsHandler):
    """How micro-batches form an update.

    Attributes:
        num_steps: micro-batches per update, 1 or more.
        adjust_scheduler: the schedule was counted in micro-batches, so it ticks once for each of them.
        sync_with_dataloader: the last batch of a loader closes the window, however short.
        sync_each_batch: reduce gradients at every micro-batch: less memory where gradients are sharded, more traffic.
    """

    num_steps: int = 1
    adjust_scheduler: bool = False
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.num_steps, bool) or not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise ConfigError(
                f"gradient accumulation over {self.num_steps!r} steps; give a whole number of micro-batches per update, 1 or more"
            )


@known_keywords
@dataclass(unsafe_hash=True)
class ProjectConfiguration(KwargsHandler):
    """Where a run keeps its files.

    Attributes:
        project_dir: the run's folder; None: nothing is written unless a path is given.
        logging_dir: where trackers and logs go; defaults to `project_dir`.
        automatic_checkpoint_naming: save_state names its folders itself: `<project_dir>/checkpoints/checkpoint_<n>`.
        total_limit: how many of those stay, the newest ones; None: all.
        iteration: the number of the first one.
        keep_best: "max" or "min": the checkpoint with the highest or lowest `metric` stays beside them.
        save_on_each_node: accepted for the name's sake: whether machines share the folder is found out.
        save_frozen: False: checkpoints hold a digest of each frozen weight instead of its values, as beside adapters; a resumed run
            must build its models on the same base.
        keep_in_memory: n: after every n-th update, each machine keeps the run's state in shared memory, which `headway launch` holds
            until the run ends; `resume("latest")` restores it if it is newer than the newest checkpoint on the disk. 0: off.
        overlap_saves: True: `save_state(blocking=False)` copies parameters and optimizer states during the next forward and
            backward, and the optimizer's step waits for the copy. Nothing else may change them in between, such as your own
            `weight.clamp_()`: the save fails or, if `.data` hides the change from torch, contains part of it.
        keep_compiled: True: checkpoints hold what torch.compile has produced, and `resume("latest")` loads it, so that a run on a new
            machine does not compile again. These are executable artifacts: they are loaded only if sealed with this user's key.
    """

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    keep_best: str | None = None
    save_on_each_node: bool = False
    save_frozen: bool = True
    keep_in_memory: int = 0
    overlap_saves: bool = False
    keep_compiled: bool = False

    def __post_init__(self) -> None:
        limit = self.total_limit
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise ConfigError(f"total_limit={limit!r}; give how many checkpoints stay, 1 or more, or None for all")
        if self.keep_best not in (None, "max", "min"):
            raise ConfigError(f"keep_best={self.keep_best!r}; allowed: 'max', 'min' or None")
        every = self.keep_in_memory
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ConfigError(f"keep_in_memory={every!r}; give a number of updates, 1 or more, or 0 to turn it off")
        if every and not self.automatic_checkpoint_naming:
            raise ConfigError(
                f"keep_in_memory={every} needs automatic_checkpoint_naming=True: resume('latest') chooses between memory and disk"
            )

    def with_defaults(self) -> "ProjectConfiguration":
        """The same with `logging_dir` filled in."""
        return self if self.logging_dir is not None else replace(self, logging_dir=self.project_dir)

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Set `project_dir`, and `logging_dir` if it is not set."""
        self.project_dir = project_dir
        self.logging_dir = project_dir if self.logging_dir is None else self.logging_dir


def caller() -> str:
    """`file:line` of the code that builds the Accelerator, for errors about its arguments."""
    return f"Accelerator(...) at {call_site()}"


def windows(
    steps: int | None, plugin: GradientAccumulationPlugin | None, global_batch_size: int | None, origin: str
) -> GradientAccumulationPlugin:
    """How micro-batches form an update, from the three arguments that say so."""
    _check_kind("gradient_accumulation_plugin", plugin, GradientAccumulationPlugin)
    if plugin is not None and steps is not None:
        raise ConfigError("give gradient_accumulation_steps or gradient_accumulation_plugin, not both")
    if global_batch_size is not None and (steps is not None or plugin is not None):
        raise ConfigError(
            f"global_batch_size={global_batch_size} derives the accumulation; do not give the steps as well"
        )
    if plugin is not None:
        return plugin.taken()
    chosen, _ = run_setting(
        "gradient_accumulation_steps", UNSET if steps is None else steps, 1, code_origin=origin, parse=int
    )
    return GradientAccumulationPlugin(num_steps=chosen).taken()


def is_automatic(microbatching: str | None, plugin: GradientAccumulationPlugin) -> bool:
    """Are batches cut into pieces where memory demands it?

    Raises:
        ConfigError: another word than "auto", or gradients are to travel at every micro-batch.
    """
    if microbatching not in (None, "auto"):
        raise ConfigError(f"microbatching={microbatching!r}; allowed: 'auto', or None to leave batches whole")
    if microbatching == "auto" and plugin.sync_each_batch:
        raise ConfigError(
            "microbatching='auto' lets nothing travel before a window's end, sync_each_batch=True does; drop one"
        )
    return microbatching == "auto"


def loading_settings(config: DataLoaderConfiguration | None, split_batches: bool) -> DataLoaderConfiguration:
    """How loaders split, pad and move batches, from the two arguments that say so."""
    _check_kind("dataloader_config", config, DataLoaderConfiguration)
    if config is not None and split_batches and not config.split_batches:
        raise ConfigError("split_batches=True contradicts dataloader_config.split_batches=False; set it in one place")
    return (config or DataLoaderConfiguration(split_batches=split_batches)).taken()


def project_settings(folder: str | Path | None, config: ProjectConfiguration | None) -> ProjectConfiguration:
    """Where the run keeps files, from the two arguments that say so."""
    _check_kind("project_config", config, ProjectConfiguration)
    if config is not None and folder is not None and config.project_dir not in (None, folder):
        raise ConfigError(
            f"project_dir={str(folder)!r} contradicts project_config.project_dir={str(config.project_dir)!r}"
        )
    chosen = config or ProjectConfiguration(project_dir=folder)
    if chosen.project_dir is None and folder is not None:
        chosen = replace(chosen, project_dir=folder)
    return chosen.with_defaults().taken()


def _check_kind(name: str, given: object, kind: type) -> None:
    if given is None or isinstance(given, kind):
        return
    shown = f"{kind.__name__}(...)"
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        shown = f"{kind.__name__}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
    raise ConfigError(
        f"{name} is of type {type(given).__module__}.{type(given).__qualname__}; ".replace("builtins.", "")
        + f"give {name}={shown}, with {kind.__name__} from headway"
    )


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
