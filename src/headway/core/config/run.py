"""Settings that a script passes to the Accelerator: data loading, gradient accumulation and the project folder."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headway.common.callsite import find_call_site
from headway.common.object_path import expand_home
from headway.core.config.load import COMMAND_LINE, UNSET, resolve_run_setting
from headway.core.config.values import KwargsHandler, report_unknown_keywords
from headway.errors import ConfigError


def _is_positive_integer(value: object) -> bool:
    """Whether a value is an integer of at least 1. True and False are not integers here."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@report_unknown_keywords
@dataclass(unsafe_hash=True)
class DataLoaderConfiguration(KwargsHandler):
    """Options for splitting, padding and moving batches in prepared loaders.

    Pass it as `Accelerator(dataloader_config=...)`, with equal values on all ranks. It applies to all loaders that the
    Accelerator prepares. The number of ranks below is the number that read different data. Ranks of one tensor-parallel
    or pipeline group read equal batches.

    Attributes:
        split_batches: Whether the loader's batch size is the global batch size, which is split over the ranks and must
            be a multiple of their number. False (the default): it is the batch size per rank.
        dispatch_batches: Whether only the main process reads the data and sends each rank its batch, for data that only
            one process can reach. False or None (the default): every process reads its own part.
        even_batches: Whether to fill up the batches of the last step with samples from the beginning of the epoch. These
            samples have weight zero in losses, `PreparedLoader.mask` marks them, and `gather_for_metrics` removes them.
            False: no sample is repeated, and a rank without a batch gets one of weight zero. Default: True.
        use_seedable_sampler: Whether shuffling is a pure function of (seed, epoch), without any global generator.
            False: each pass draws its order like torch's own loader, so that a prepared loop sees the same order as a
            plain one. The order comes from the loader's generator, or else from torch's global generator of rank 0.
            None (the default): True if `data_seed` is given, else False.
        data_seed: Seed of a seedable order. None (the default): derived from torch's initial seed on rank 0.
        non_blocking: Whether to copy batches to an accelerator from pinned memory on a separate stream, without
            blocking the host. False: the host waits for each copy. None (the default): True. No effect on a CPU.
        use_stateful_dataloader: Whether to load with torchdata's StatefulDataLoader, which can resume iterable
            datasets that have a state_dict. Needs torchdata. Default: False.

    Example::

        config = DataLoaderConfiguration(split_batches=True, data_seed=0)
        accelerator = Accelerator(dataloader_config=config)
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
        """Whether the order of samples is a pure function of (seed, epoch)."""
        return self.data_seed is not None if self.use_seedable_sampler is None else self.use_seedable_sampler


@report_unknown_keywords
@dataclass(unsafe_hash=True)
class GradientAccumulationPlugin(KwargsHandler):
    """Options of gradient accumulation, for `Accelerator(gradient_accumulation_plugin=...)`.

    An accumulation window consists of the micro-batches of one update. The short form, with the defaults of the other
    options, is `Accelerator(gradient_accumulation_steps=...)`. Giving both raises an error.

    Attributes:
        num_steps: Number of micro-batches per update on each rank, at least 1. Default: 1.
        adjust_scheduler: Whether the schedule's length is counted in micro-batches, so that the scheduler steps once
            per micro-batch. False (the default): it is the length for a loop on one process, counted in updates.
        sync_with_dataloader: Whether a loader's last batch completes the accumulation window, even if the window has
            fewer micro-batches. False: the window continues in the next pass. Default: True.
        sync_each_batch: Whether to reduce gradients over ranks in every micro-batch. This needs less memory with sharded
            gradients, but more communication. Default: False.

    Raises:
        ConfigError: If `num_steps` is not an integer of at least 1.

    Example::

        plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
        accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    """

    num_steps: int = 1
    adjust_scheduler: bool = False
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if not _is_positive_integer(self.num_steps):
            raise ConfigError(
                f"gradient accumulation over {self.num_steps!r} steps; give a whole number of micro-batches per update, 1 or more"
            )


@report_unknown_keywords
@dataclass(unsafe_hash=True)
class ProjectConfiguration(KwargsHandler):
    """Directories of a run's files, and the naming and retention of its checkpoints.

    Pass it as `Accelerator(project_config=...)`, with equal values on all ranks. Nothing is written before the first
    `save_state` or `init_trackers`. The Accelerator uses a read-only copy.

    Attributes:
        project_dir: Directory of the run, a path or a URL such as "s3://bucket/run". None (the default): nothing is
            written unless a path is given.
        logging_dir: Directory for trackers and logs. None (the default): `project_dir`.
        automatic_checkpoint_naming: Whether save_state chooses its directory,
            `<project_dir>/checkpoints/checkpoint_<n>`. `resume("latest")` and automatic saves at preemption need it.
            Default: False.
        total_limit: Number of newest checkpoints to keep, at least 1. After each save, older ones are deleted. It has no
            effect without automatic naming. None (the default): all.
        iteration: Number n of the first checkpoint. A resumed run continues after the checkpoint that it loads.
            Default: 0.
        keep_best: "max" or "min": also keep the checkpoint with the highest or lowest `metric` passed to save_state, in
            addition to `total_limit`. None (the default): metrics do not matter.
        num_best: Number of best checkpoints that `keep_best` keeps, at least 1. Default: 1.
        keep_every: Also keep one checkpoint for every this many updates, in addition to `total_limit`: the first one
            that is saved at or after each multiple. It needs automatic naming, and has no effect without `total_limit`.
            None (the default): no additional checkpoints.
        total_limit_counts_best: Whether `total_limit` includes the checkpoints that `keep_best` keeps, so that fewer of
            the newest ones are kept. The newest one and the best ones are always kept. Default: False.
        save_on_each_node: Accepted for compatibility, without effect. Whether machines share the directory is detected.
        save_frozen: Whether checkpoints contain the values of frozen weights. False: they contain a digest of each
            frozen weight instead, for use with adapters. A resumed run must then build its models from the same base.
            Default: True.
        keep_in_memory: Number of updates between copies of the run's state to shared memory on each machine, which
            `headway launch` holds until the run ends. `resume("latest")` restores the copy if it is newer than the
            newest checkpoint on disk. 0 (the default): off.
        overlap_saves: Whether `save_state(blocking=False)` copies parameters and optimizer state during the next
            forward and backward. The optimizer step waits for the copy. Until then, other code must not change them,
            for example by `weight.clamp_()`. Otherwise the save fails or, if `.data` hides the change from torch,
            contains part of the change. Default: False.
        keep_compiled: Whether checkpoints contain the artifacts of torch.compile, which `resume("latest")` loads so
            that a new machine does not compile again. The artifacts are executable, and are loaded only if they are
            sealed with this user's key. Default: False.

    Raises:
        ConfigError: If a value is not allowed, or `keep_in_memory` is used without `automatic_checkpoint_naming`.

    Example::

        project = ProjectConfiguration("runs/first", automatic_checkpoint_naming=True, total_limit=2, keep_best="min")
        accelerator = Accelerator(project_config=project)
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
    num_best: int = 1
    keep_every: int | None = None
    total_limit_counts_best: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and not _is_positive_integer(self.total_limit):
            raise ConfigError(
                f"total_limit={self.total_limit!r}; give the number of checkpoints to keep, 1 or more, or None for all"
            )
        if self.keep_best not in (None, "max", "min"):
            raise ConfigError(f"keep_best={self.keep_best!r}; allowed: 'max', 'min' or None")
        if not _is_positive_integer(self.num_best):
            raise ConfigError(f"num_best={self.num_best!r}; give the number of best checkpoints to keep, 1 or more")
        if self.num_best > 1 and self.keep_best is None:
            raise ConfigError(f"num_best={self.num_best} needs keep_best='min' or keep_best='max'")
        if self.total_limit_counts_best and (self.keep_best is None or self.total_limit is None):
            raise ConfigError(
                "total_limit_counts_best=True needs total_limit and keep_best='min' or keep_best='max'; without them, "
                "there is nothing to count"
            )
        if self.keep_every is not None and not _is_positive_integer(self.keep_every):
            raise ConfigError(f"keep_every={self.keep_every!r}; give a number of updates, 1 or more, or None")
        if self.keep_every is not None and not self.automatic_checkpoint_naming:
            raise ConfigError(
                f"keep_every={self.keep_every} needs automatic_checkpoint_naming=True: checkpoints that the script names are never "
                "deleted"
            )
        num_updates = self.keep_in_memory
        if not _is_positive_integer(num_updates) and (num_updates != 0 or isinstance(num_updates, bool)):
            raise ConfigError(
                f"keep_in_memory={num_updates!r}; give a number of updates, 1 or more, or 0 to turn it off"
            )
        if num_updates and not self.automatic_checkpoint_naming:
            raise ConfigError(
                f"keep_in_memory={num_updates} needs automatic_checkpoint_naming=True: only resume('latest') chooses "
                "between memory and disk"
            )

    def with_defaults(self) -> "ProjectConfiguration":
        """Return this configuration, with `logging_dir` set to `project_dir` if it was not set."""
        return self if self.logging_dir is not None else replace(self, logging_dir=self.project_dir)

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Set `project_dir`, and use it for `logging_dir` too if that is not set. No directory is created.

        Args:
            project_dir: New directory of the run. None (the default): the run has no directory.

        Raises:
            ConfigError: If this is the copy that an Accelerator uses, which is read-only.
        """
        self.project_dir = project_dir
        self.logging_dir = project_dir if self.logging_dir is None else self.logging_dir


def describe_caller() -> str:
    """Return a description of the line that creates the Accelerator, such as "Accelerator(...) at train.py:12"."""
    return f"Accelerator(...) at {find_call_site()}"


def resolve_accumulation(
    steps: int | None, plugin: GradientAccumulationPlugin | None, global_batch_size: int | None, origin: str
) -> GradientAccumulationPlugin:
    """Return the options of gradient accumulation from the three arguments of the Accelerator that can set them.

    If neither `steps` nor `plugin` is given, the number of micro-batches is that of the launcher, or else 1. The result
    is read-only.

    Args:
        steps: Number of micro-batches per update (`gradient_accumulation_steps`). None if not given.
        plugin: All options (`gradient_accumulation_plugin`). None if not given.
        global_batch_size: Number of rows per update over all ranks, from which the number of micro-batches follows.
            None if not given.
        origin: Description of the script's line, for error messages.

    Raises:
        ConfigError: If more than one of the three arguments is given, one of them contradicts the command line, `steps`
            is not an integer of at least 1, or `plugin` has the wrong type.
    """
    _check_type("gradient_accumulation_plugin", plugin, GradientAccumulationPlugin)
    if plugin is not None and steps is not None:
        raise ConfigError("give gradient_accumulation_steps or gradient_accumulation_plugin, not both")
    if global_batch_size is not None and (steps is not None or plugin is not None):
        raise ConfigError(
            f"global_batch_size={global_batch_size} derives the accumulation; do not give the steps as well"
        )
    code_value = UNSET if steps is None else steps
    if plugin is not None:
        code_value, origin = plugin.num_steps, f"GradientAccumulationPlugin(num_steps={plugin.num_steps}) of {origin}"
    num_steps, num_steps_origin = resolve_run_setting(
        "gradient_accumulation_steps", code_value, 1, code_origin=origin, parse=int
    )
    if global_batch_size is not None and num_steps_origin.startswith(COMMAND_LINE):
        raise ConfigError(
            f"global_batch_size={global_batch_size} derives the accumulation; do not give gradient_accumulation_steps={num_steps} "
            f"({num_steps_origin}) as well"
        )
    return replace(plugin or GradientAccumulationPlugin(), num_steps=num_steps).freeze_copy()


def splits_batches_automatically(microbatching: str | None, plugin: GradientAccumulationPlugin) -> bool:
    """Whether batches are split into smaller micro-batches when memory runs out.

    Args:
        microbatching: Argument of the Accelerator: "auto" or None.
        plugin: Options of gradient accumulation.

    Raises:
        ConfigError: If `microbatching` is neither "auto" nor None, or gradients are to be reduced in every micro-batch.
    """
    if microbatching not in (None, "auto"):
        raise ConfigError(f"microbatching={microbatching!r}; allowed: 'auto', or None to leave batches unsplit")
    if microbatching == "auto" and plugin.sync_each_batch:
        raise ConfigError(
            "microbatching='auto' exchanges no gradients before the end of a window, but sync_each_batch=True does. Leave one of "
            "them out"
        )
    return microbatching == "auto"


def resolve_loading(config: DataLoaderConfiguration | None, split_batches: bool) -> DataLoaderConfiguration:
    """Return the options of data loading from the Accelerator's `dataloader_config` and `split_batches`.

    The result is a read-only copy.

    Args:
        config: Argument `dataloader_config` of the Accelerator, or None.
        split_batches: Argument `split_batches` of the Accelerator.

    Raises:
        ConfigError: If `split_batches` is True but `config.split_batches` is False, or `config` has the wrong type.
    """
    _check_type("dataloader_config", config, DataLoaderConfiguration)
    if config is not None and split_batches and not config.split_batches:
        raise ConfigError("split_batches=True contradicts dataloader_config.split_batches=False; set it in one place")
    return (config or DataLoaderConfiguration(split_batches=split_batches)).freeze_copy()


def resolve_project(folder: str | Path | None, config: ProjectConfiguration | None) -> ProjectConfiguration:
    """Return the project configuration from the Accelerator's `project_dir` and `project_config`.

    The result is a read-only copy, in which `logging_dir` is `project_dir` unless it was set, and a leading `~` is
    replaced by the home directory.

    Args:
        folder: Argument `project_dir` of the Accelerator, or None.
        config: Argument `project_config` of the Accelerator, or None.

    Raises:
        ConfigError: If the two arguments contradict each other, or `config` has the wrong type.
    """
    _check_type("project_config", config, ProjectConfiguration)
    config_folder = None if config is None else config.project_dir
    if config_folder is not None and folder is not None and Path(config_folder) != Path(folder):
        raise ConfigError(
            f"project_dir={str(folder)!r} contradicts project_config.project_dir={str(config_folder)!r}; set it in one place"
        )
    project = config or ProjectConfiguration(project_dir=folder)
    if project.project_dir is None and folder is not None:
        project = replace(project, project_dir=folder)
    project = project.with_defaults()
    expanded = replace(
        project, project_dir=expand_home(project.project_dir), logging_dir=expand_home(project.logging_dir)
    )
    return expanded.freeze_copy()


def _check_type(name: str, value: object, expected_class: type) -> None:
    """Raise an error if an argument of the Accelerator has the wrong type.

    Args:
        name: Name of the argument.
        value: Value of the argument. None is allowed. For a dict with string keys, the message shows the class with
            these arguments.
        expected_class: Class of which the value must be an instance.

    Raises:
        ConfigError: If the value is neither None nor an instance of the class.
    """
    if value is None or isinstance(value, expected_class):
        return
    example = f"{expected_class.__name__}(...)"
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        arguments = ", ".join(f"{key}={argument!r}" for key, argument in value.items())
        example = f"{expected_class.__name__}({arguments})"
    type_name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise ConfigError(
        f"{name} is of type {type_name}; give {name}={example}, with {expected_class.__name__} from headway"
    )
