"""Settings of a run that the user's code may give: data loading, accumulation, project folders."""

from dataclasses import dataclass, replace
from pathlib import Path

from headway.config.values import known_keywords
from headway.errors import ConfigError


@known_keywords
@dataclass(frozen=True)
class DataLoaderConfiguration:
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
            shuffling is a pure function of (seed, epoch), and no global random stream is touched. None: True where
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
@dataclass(frozen=True)
class GradientAccumulationPlugin:
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
@dataclass(frozen=True)
class ProjectConfiguration:
    """Where a run keeps its files.

    Attributes:
        project_dir: the run's folder; None: nothing is written unless a path is given.
        logging_dir: where trackers and logs go; defaults to `project_dir`.
        automatic_checkpoint_naming: save_state names its folders itself: `<project_dir>/checkpoints/checkpoint_<n>`.
        total_limit: how many of those stay, the newest ones; None: all.
        iteration: the number of the first one.
        keep_best: "max" or "min": the checkpoint with the highest or lowest `metric` stays beside them.
        save_on_each_node: accepted for the name's sake: whether machines share the folder is found out.
    """

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    keep_best: str | None = None
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        limit = self.total_limit
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise ConfigError(f"total_limit={limit!r}; give how many checkpoints stay, 1 or more, or None for all")
        if self.keep_best not in (None, "max", "min"):
            raise ConfigError(f"keep_best={self.keep_best!r}; allowed: 'max', 'min' or None")

    def with_defaults(self) -> "ProjectConfiguration":
        """The same with `logging_dir` filled in."""
        return self if self.logging_dir is not None else replace(self, logging_dir=self.project_dir)
