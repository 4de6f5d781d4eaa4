"""Settings that a script passes to the Accelerator: data loading, gradient accumulation and the project folder."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headway.common.callsite import find_call_site
from headway.common.object_path import expand_home
from headway.core.config.load import COMMAND_LINE, UNSET, resolve_run_setting
from headway.core.config.values import KwargsHandler, report_unknown_keywords
from headway.errors import ConfigError


@report_unknown_keywords
@dataclass(unsafe_hash=True)
class DataLoaderConfiguration(KwargsHandler):
    """Options for splitting, padding and moving batches in prepared loaders.

    Attributes:
        split_batches: Whether the loader's batch size is the global batch size, which is split over the processes and
            must be a multiple of their number. If False, it is the batch size per process.
        dispatch_batches: Whether only the main process reads the data and sends each rank its part. If None or False,
            every process reads its own part.
        even_batches: Whether to fill up the batches of the last step with samples from the beginning of the epoch. The
            validity mask marks these samples. If False, no sample is repeated, and a rank without a batch gets one of
            weight zero.
        use_seedable_sampler: Whether shuffling is a pure function of (seed, epoch), without any global generator.
            False: each pass draws its order like torch's own loader, so that a prepared loop sees the same order as a
            plain one. The order comes from the loader's generator, or else from torch's global generator of rank 0.
            None: True if `data_seed` is given.
        data_seed: Seed of a seedable order. None: derived from torch's initial seed and agreed between ranks.
        non_blocking: Whether to copy batches to an accelerator from pinned memory on a separate stream, without
            blocking the host. None: True. False: the host waits for each copy.
        use_stateful_dataloader: Whether to load with torchdata's StatefulDataLoader, which can resume iterable
            datasets.
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
    """Options of gradient accumulation.

    Attributes:
        num_steps: Number of micro-batches per update, at least 1.
        adjust_scheduler: Whether the schedule's length is counted in micro-batches, so that the scheduler steps once
            per micro-batch.
        sync_with_dataloader: Whether a loader's last batch completes the accumulation window, even if the window has
            fewer micro-batches.
        sync_each_batch: Whether to reduce gradients in every micro-batch. This needs less memory with sharded
            gradients, but more communication.

    Raises:
        ConfigError: If `num_steps` is not an integer of at least 1.
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


@report_unknown_keywords
@dataclass(unsafe_hash=True)
class ProjectConfiguration(KwargsHandler):
    """Locations of a run's files.

    Attributes:
        project_dir: Folder of the run. None: nothing is written unless a path is given.
        logging_dir: Folder for trackers and logs. None: `project_dir`.
        automatic_checkpoint_naming: Whether save_state chooses its folder: `<project_dir>/checkpoints/checkpoint_<n>`.
        total_limit: Number of newest checkpoints to keep. None: all.
        iteration: Number of the first checkpoint.
        keep_best: "max" or "min": also keep the checkpoint with the highest or lowest `metric` passed to save_state.
            None: metrics do not matter.
        save_on_each_node: Accepted for compatibility, without effect. Whether machines share the folder is detected.
        save_frozen: Whether checkpoints contain the values of frozen weights. False: they contain a digest of each
            frozen weight instead, for use with adapters. A resumed run must then build its models from the same base.
        keep_in_memory: Number of updates between copies of the run's state to shared memory on each machine, which
            `headway launch` holds until the run ends. `resume("latest")` restores the copy if it is newer than the
            newest checkpoint on disk. 0: off.
        overlap_saves: Whether `save_state(blocking=False)` copies parameters and optimizer state during the next
            forward and backward. The optimizer step waits for the copy. Until then, other code must not change them,
            for example by `weight.clamp_()`. Otherwise the save fails or, if `.data` hides the change from torch,
            contains part of the change.
        keep_compiled: Whether checkpoints contain the artifacts of torch.compile, which `resume("latest")` loads so
            that a new machine does not compile again. The artifacts are executable, and are loaded only if they are
            sealed with this user's key.

    Raises:
        ConfigError: If a value is not allowed, or `keep_in_memory` is used without `automatic_checkpoint_naming`.
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
            raise ConfigError(
                f"total_limit={limit!r}; give the number of checkpoints to keep, 1 or more, or None for all"
            )
        if self.keep_best not in (None, "max", "min"):
            raise ConfigError(f"keep_best={self.keep_best!r}; allowed: 'max', 'min' or None")
        every = self.keep_in_memory
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ConfigError(f"keep_in_memory={every!r}; give a number of updates, 1 or more, or 0 to turn it off")
        if every and not self.automatic_checkpoint_naming:
            raise ConfigError(
                f"keep_in_memory={every} needs automatic_checkpoint_naming=True: only resume('latest') chooses "
                "between memory and disk"
            )

    def with_defaults(self) -> "ProjectConfiguration":
        """Return this configuration, with `logging_dir` set to `project_dir` if it was not set."""
        return self if self.logging_dir is not None else replace(self, logging_dir=self.project_dir)

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Set `project_dir`, and use the same folder for `logging_dir` if that is not set.

        Args:
            project_dir: New folder of the run. Default: None, the run has no folder.

        Raises:
            ConfigError: If this is the copy that an Accelerator uses, which is read-only.
        """
        self.project_dir = project_dir
        self.logging_dir = project_dir if self.logging_dir is None else self.logging_dir


def describe_caller() -> str:
    """Return a description of the line that creates the Accelerator, for error messages about its arguments."""
    return f"Accelerator(...) at {find_call_site()}"


def resolve_accumulation(
    steps: int | None, plugin: GradientAccumulationPlugin | None, global_batch_size: int | None, origin: str
) -> GradientAccumulationPlugin:
    """Return the options of gradient accumulation from the three arguments of the Accelerator that can set them.

    If neither `steps` nor `plugin` is given, the number of micro-batches is that of the launcher, or else 1. The result
    is read-only.

    Args:
        steps: Number of micro-batches per update (`gradient_accumulation_steps`).
        plugin: All options (`gradient_accumulation_plugin`).
        global_batch_size: Number of rows per update over all ranks, from which the number of micro-batches follows.
        origin: Description of the script's line, for error messages.

    Raises:
        ConfigError: If more than one of the three arguments is given, one of them contradicts the command line, `steps`
            is not an integer of at least 1, or `plugin` has the wrong type.
    """
    _check_kind("gradient_accumulation_plugin", plugin, GradientAccumulationPlugin)
    if plugin is not None and steps is not None:
        raise ConfigError("give gradient_accumulation_steps or gradient_accumulation_plugin, not both")
    if global_batch_size is not None and (steps is not None or plugin is not None):
        raise ConfigError(
            f"global_batch_size={global_batch_size} derives the accumulation; do not give the steps as well"
        )
    options = GradientAccumulationPlugin() if plugin is None else plugin
    if plugin is not None:
        steps, origin = plugin.num_steps, f"GradientAccumulationPlugin(num_steps={plugin.num_steps}) of {origin}"
    num_steps, num_steps_origin = resolve_run_setting(
        "gradient_accumulation_steps", UNSET if steps is None else steps, 1, code_origin=origin, parse=int
    )
    if global_batch_size is not None and num_steps_origin.startswith(COMMAND_LINE):
        raise ConfigError(
            f"global_batch_size={global_batch_size} derives the accumulation; do not give gradient_accumulation_steps={num_steps} "
            f"({num_steps_origin}) as well"
        )
    return replace(options, num_steps=num_steps).freeze_copy()


def is_automatic(microbatching: str | None, plugin: GradientAccumulationPlugin) -> bool:
    """Whether batches are split into smaller micro-batches when memory runs out.

    Args:
        microbatching: Argument of the Accelerator: "auto" or None.
        plugin: Options of gradient accumulation.

    Raises:
        ConfigError: If `microbatching` is neither "auto" nor None, or gradients are to be reduced in every micro-batch.
    """
    if microbatching not in (None, "auto"):
        raise ConfigError(f"microbatching={microbatching!r}; allowed: 'auto', or None to leave batches whole")
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
    _check_kind("dataloader_config", config, DataLoaderConfiguration)
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
    _check_kind("project_config", config, ProjectConfiguration)
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


def _check_kind(name: str, given: object, kind: type) -> None:
    """Raise an error if an argument of the Accelerator has the wrong type.

    Args:
        name: Name of the argument.
        given: Value of the argument; None is allowed.
        kind: Expected class. For a dict with string keys, the message shows the class with these arguments.

    Raises:
        ConfigError: If the value is neither None nor an instance of the class.
    """
    if given is None or isinstance(given, kind):
        return
    example = f"{kind.__name__}(...)"
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        example = f"{kind.__name__}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
    type_name = f"{type(given).__module__}.{type(given).__qualname__}".removeprefix("builtins.")
    raise ConfigError(f"{name} is of type {type_name}; give {name}={example}, with {kind.__name__} from headway")
