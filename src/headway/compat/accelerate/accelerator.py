"""The `Accelerator` class that `import accelerate` provides when Headway replaces Accelerate.

Scripts and libraries written for Accelerate rely on two rules. Losses are divided by the number of accumulation steps,
and model outputs under mixed precision are float32. This class follows both rules. `headway.Accelerator` instead
weights losses by their number of samples and leaves outputs unchanged.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headway.accelerator import Accelerator
from headway.common import env
from headway.compat.accelerate.checkpoints import (
    AccelerateReader,
    AccelerateWriter,
    find_newest,
    is_accelerate_checkpoint,
)
from headway.compat.accelerate.constants import DistributedType
from headway.compat.accelerate.data.batches import (
    GATHER,
    PAD,
    REDUCE,
    convert_to_fp32,
    gather_and_truncate,
    is_per_sample,
    require_tensors,
)
from headway.compat.accelerate.data.loaders import AccelerateRules
from headway.compat.accelerate.members import AccelerateMembers
from headway.compat.accelerate.plugins import FullyShardedDataParallelPlugin, ParallelismConfig
from headway.compat.accelerate.prepared import AcceleratedOptimizer, AcceleratedScheduler, CountedWindows, check_scaler
from headway.compat.accelerate.recipes import check_handlers
from headway.compat.accelerate.trackers import replace_tracker_names
from headway.core.checkpoint.format.foreign import parse_number
from headway.core.checkpoint.resume.comparison import RestoreResult
from headway.core.config.run import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration
from headway.core.config.values import KwargsHandler
from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.tree import Tree
from headway.core.tracking.base import BlankTracker
from headway.core.training.behavior import Behavior
from headway.core.training.loss_policy import ConstantDivision
from headway.errors import ConfigError, MetricError, UnsupportedError
from headway.log import get_logger

log = get_logger(__name__)

_UNSET: Any = object()
_ACCELERATE_PREFIX = "ACCELERATE_"
"""Prefix of the environment variables with which Accelerate's launcher passes settings to its workers."""
_PREEMPTION_VARIABLE = "HEADWAY_PREEMPTION"
"""Name of the environment variable that makes the run save a checkpoint at a preemption signal or deadline.

Set it for scripts that only call `load_state` to resume.
"""
_HANDLER_CLASSES = {
    "autocast": ("AutocastKwargs",),
    "ddp": ("DistributedDataParallelKwargs",),
    "scaler": ("GradScalerKwargs",),
    "init": ("InitProcessGroupKwargs",),
    "profile": ("ProfileKwargs",),
    "fp8_recipe": ("FP8RecipeKwargs",),
    "te_recipe": ("TERecipeKwargs",),
    "msamp_recipe": ("MSAMPRecipeKwargs",),
    "ao_recipe": ("AORecipeKwargs", "Float8Options"),
}
"""Class names by prefix: the attribute `PREFIX_handler` returns the object in `kwargs_handlers` of such a class."""
ACCELERATES_BEHAVIOR = Behavior(
    loss_policy=ConstantDivision(),
    windows=CountedWindows,
    # Accelerate clips the current gradients at each call, in any micro-batch.
    clips_partial_gradients=True,
    optimizer=AcceleratedOptimizer,
    scheduler=AcceleratedScheduler,
    loading_rules=AccelerateRules(),
    keeps_precision=True,
    # Accelerate does not compare parameters between ranks, so its scripts continue if they differ.
    refuses_drift=False,
    refuses_leaks=False,
    # Scripts count epochs themselves and restart each loader.
    repeats_evaluations=False,
    resume_method="load_state",
)
"""Accelerate's rules for losses, accumulation windows, gradient clipping, data loaders and checkpoints."""
_SHARDED_TYPES = ("FSDP", "DEEPSPEED", "TP", "MEGATRON_LM")
_REPLICATED_TYPES = frozenset(each for each in DistributedType if each.name not in _SHARDED_TYPES)
"""Types of distribution in which each process holds full weights, so that one process can write Accelerate's files."""


def _drop_adjust_scheduler(plugin: Any) -> Any:
    # In Accelerate, `adjust_scheduler` changes a counter that schedulers do not read. They step once per update anyway.
    return replace(plugin, adjust_scheduler=False) if isinstance(plugin, GradientAccumulationPlugin) else plugin


def _read_setting(name: str) -> str | None:
    """Return the value of the environment variable `ACCELERATE_<name>`.

    None if the variable is not set, or if `HEADWAY_<name>` is set, which takes precedence.
    """
    return None if env.get(f"{env.PREFIX}{name}") else env.get(f"{_ACCELERATE_PREFIX}{name}")


def _convert_outputs_hook(module: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
    """Convert float16 and bfloat16 tensors in a module's outputs to float32. It is used as a forward hook.

    It is a module-level function, so that a model with the hook can be pickled.
    """
    return convert_to_fp32(outputs)


class _LiveSettings(KwargsHandler):
    """Mixin for settings classes: when a script assigns a field, the Accelerator uses the new value immediately.

    In a class definition, list this mixin before the settings class.

    Args:
        settings: Current settings.
        on_change: Function called after each assignment, with a dict of all fields.
    """

    _use: Callable[[dict[str, Any]], None]

    def __init__(self, settings: KwargsHandler, on_change: Callable[[dict[str, Any]], None]) -> None:
        vars(self).update(settings.to_dict(), _use=on_change)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value
        self._use(self.to_dict())


class LiveDataLoaderConfiguration(_LiveSettings, DataLoaderConfiguration):
    """Settings for splitting, padding and moving batches. Assigned fields apply to loaders that are prepared later.

    The fields are those of `DataLoaderConfiguration`.
    """


class LiveProjectConfiguration(_LiveSettings, ProjectConfiguration):
    """Settings for the directories of the run's files and for checkpoint names. Assigned fields apply immediately.

    The fields are those of `ProjectConfiguration`.
    """


class AccelerateAccelerator(AccelerateMembers, Accelerator):
    """Headway's Accelerator with Accelerate's arguments and arithmetic.

    Each loss is divided by the number of accumulation steps. All ranks have equal weight, even if their micro-batches
    have different numbers of samples. Under mixed precision, model outputs are float32.

    Args:
        split_batches: Ignored, as in Accelerate. Set it in `dataloader_config`.
        gradient_accumulation_steps: Micro-batches per update. The environment variable
            ACCELERATE_GRADIENT_ACCUMULATION_STEPS overrides it, unless `gradient_accumulation_plugin` is given.
            Default: 1, or the launcher's setting.
        rng_types: Names of random number generators to synchronize across ranks. None: only the generators of samplers
            ("generator").
        others: The other parameters are those of `headway.Accelerator`. Environment variables of Accelerate's launcher
            determine mixed_precision, fsdp_plugin and parallelism_config if these are not given.

    Raises:
        ConfigError: If an argument is invalid or contradicts a setting of the launcher.
        UnsupportedError: If settings are given that Headway does not support, such as those of Transformer Engine,
            MS-AMP or Megatron-LM.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: Any = _UNSET,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[str] | None = None,
        log_with: Any = None,
        project_dir: Any = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
    ) -> None:
        # Arguments with which an unpickled object is constructed (`__reduce__`).
        self._constructor_args = {
            "device_placement": device_placement, "mixed_precision": mixed_precision, "cpu": cpu, "rng_types": rng_types,
            "gradient_accumulation_steps": gradient_accumulation_steps, "dataloader_config": dataloader_config,
            "project_config": project_config, "gradient_accumulation_plugin": gradient_accumulation_plugin,
            "step_scheduler_with_optimizer": step_scheduler_with_optimizer, "kwargs_handlers": kwargs_handlers,
        }  # fmt: skip
        if gradient_accumulation_plugin is None and (
            launcher_steps := env.get_int(f"{_ACCELERATE_PREFIX}GRADIENT_ACCUMULATION_STEPS")
        ):
            gradient_accumulation_steps = launcher_steps
        if fsdp_plugin is None and env.get_bool(f"{_ACCELERATE_PREFIX}USE_FSDP"):
            fsdp_plugin = FullyShardedDataParallelPlugin()
        if parallelism_config is None and env.get_bool(f"{_ACCELERATE_PREFIX}USE_PARALLELISM_CONFIG"):
            parallelism_config = ParallelismConfig()
        if torch_tp_plugin is not None:
            warnings.warn(
                "`TorchTensorParallelPlugin` is deprecated and will be removed in a future version of Accelerate. Please use the "
                "`ParallelismConfig` with `tp_size` instead.",
                FutureWarning,
                stacklevel=2,
            )
        self._project = ""
        self._writer = AccelerateWriter(self)
        trackers = replace_tracker_names(log_with, lambda: self._project, lambda: self.logging_dir)
        self._has_requested_trackers = bool(trackers)
        self._behavior = replace(ACCELERATES_BEHAVIOR, choose_last_save_hook=self._choose_last_save_hook)
        super().__init__(
            device_placement=device_placement, mixed_precision=mixed_precision or _read_setting("MIXED_PRECISION"), cpu=cpu or None,
            gradient_accumulation_steps=None if gradient_accumulation_steps == 1 else gradient_accumulation_steps,
            gradient_accumulation_plugin=_drop_adjust_scheduler(gradient_accumulation_plugin),
            rng_types=rng_types if rng_types is not None else ("generator",), dataloader_config=dataloader_config,
            deepspeed_plugin=deepspeed_plugin, deepspeed_plugins=deepspeed_plugins, fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin, megatron_lm_plugin=megatron_lm_plugin, parallelism_config=parallelism_config,
            log_with=trackers, project_dir=project_dir, project_config=project_config,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer, dynamo_backend=dynamo_backend, dynamo_plugin=dynamo_plugin,
            kwargs_handlers=check_handlers(kwargs_handlers),
            # A checkpoint saved at preemption would be the newest, but lack files that the script adds to its own ones.
            preemption=None if env.get_bool(_PREEMPTION_VARIABLE) else False,
        )  # fmt: skip
        self._set_compatible_attributes(rng_types, log_with, kwargs_handlers)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._constructor_args), ()

    def __deepcopy__(self, memo: Any) -> "AccelerateAccelerator":
        return self  # as in Accelerate, because there is only one run

    def _set_compatible_attributes(
        self, rng_types: Sequence[str] | None, log_with: Any, handlers: list[Any] | None
    ) -> None:
        """Set attributes that scripts read or assign, such as `log_with`, although Headway itself does not use them.

        Args:
            rng_types: Argument of the constructor. None: ["generator"].
            log_with: Argument of the constructor. None: no trackers.
            handlers: Argument `kwargs_handlers` of the constructor. None: no handlers.
        """
        self.rng_types = ["generator"] if rng_types is None else rng_types
        self.log_with: list[Any] = []
        if log_with is not None:
            self.log_with = log_with if isinstance(log_with, list) else [log_with]
        self.flag_tensor: torch.Tensor | None = None
        self.has_lomo_optimizer = False
        self.delayed_fp8_autocast = False
        self.fp8_enabled = self.mixed_precision == "fp8"
        for name, class_names in _HANDLER_CLASSES.items():
            matching = [each for each in handlers or () if type(each).__name__ in class_names]
            setattr(self, f"{name}_handler", matching[0] if matching else None)
        self.has_fp8_handler = getattr(self, "ao_recipe_handler", None) is not None

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """Start a run and its trackers. For names in `log_with`, Accelerate's tracker classes are used.

        Args:
            project_name: Name of the run's directory, and of the project or experiment in the trackers.
            config: Configuration of the run: a mapping, a dataclass or an argparse.Namespace. None: no configuration.
            init_kwargs: Keyword arguments for the start of each tracker, by tracker name. None: none.
        """
        self._project = project_name
        super().init_trackers(project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by its name.

        If `log_with` names no installed tracker, return a placeholder on which every call does nothing.

        Args:
            name: Name of the tracker, as in `log_with`.
            unwrap: Whether to return the package's own object instead, such as W&B's run. Default: False.

        Raises:
            ConfigError: If `log_with` names installed trackers, but none of this name.
        """
        return super().get_tracker(name, unwrap) if self.trackers or self._has_requested_trackers else BlankTracker()

    def prepare(  # type: ignore[override]
        self, *objects: Any, device_placement: list[bool] | None = None, strict: bool = False
    ) -> Any:
        """Prepare objects for this run and return them in the given order.

        Under mixed precision, prepared models return float32 outputs.

        Args:
            objects: Models, optimizers, DataLoaders and schedulers, in any order.
            device_placement: One boolean per object: whether to move it to the device. Default: the constructor's
                setting.
            strict: Whether an object of any other type raises `PrepareError`. False (the default): it is returned
                unchanged.
        """
        prepared = super().prepare(*objects, device_placement=device_placement, strict=strict)
        for each in objects:
            self._convert_outputs_to_float32(each)
        return prepared

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare one model and return it. Under mixed precision, the model returns float32 outputs.

        Args:
            model: Model to prepare.
            device_placement: Whether to move the model to the device. None: the constructor's setting.
            evaluation_mode: Whether the model is only evaluated, so that its gradients are not reduced. Default: False.
        """
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        self._convert_outputs_to_float32(prepared)
        return prepared

    @property
    def step(self) -> int:
        """Number of micro-batches since a DataLoader was last exhausted. Can be assigned."""
        return self._counted_windows.step

    @step.setter
    def step(self, value: int) -> None:
        self._counted_windows.step = value

    @property
    def _counted_windows(self) -> CountedWindows:
        return self._training_step.windows  # type: ignore[return-value]  # made by ACCELERATES_BEHAVIOR

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Gradient scaler under fp16, else None. Only the current value can be assigned.

        Raises:
            ConfigError: If a different value is assigned.
        """
        return super().scaler

    @scaler.setter
    def scaler(self, value: Any) -> None:
        check_scaler(value, self.scaler)

    @property
    def device_placement(self) -> bool:
        """Whether to move models and batches to the device.

        Can be assigned; assignments apply to objects that are prepared later.
        """
        return self._preparation.moves_objects

    @device_placement.setter
    def device_placement(self, value: bool) -> None:
        self._preparation.moves_objects = value

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:  # type: ignore[override]
        """Divide a loss by the number of accumulation steps and run its backward, which accumulates gradients.

        Args:
            loss: Scalar loss, or with `gradient` a tensor of any shape.
            kwargs: Keyword arguments of `torch.Tensor.backward`. `gradient` is the gradient with respect to `loss`.
        """
        gradient = kwargs.pop("gradient", None)
        super().backward(loss if gradient is None else (loss * gradient).sum(), **kwargs)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Return a context manager for training on data that cannot be divided evenly among ranks.

        Args:
            joinables: Ignored. Objects that are not prepared are accepted too.
            even_batches: Value of `even_batches` within the context. None: unchanged. As in Accelerate, it has no
                effect if several processes run on CPUs.
        """
        if even_batches is not None and self.num_processes > 1 and self.device.type == "cpu":
            log.warning_once(
                "join_uneven_inputs(even_batches=%s) has no effect on CPUs, as in Accelerate", even_batches
            )
            even_batches = None
        with super().join_uneven_inputs((), even_batches):
            yield

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context manager for one micro-batch. All models share one counter and one accumulation window.

        Args:
            models: Ignored, because the accumulation window does not depend on the models.
        """
        return super().accumulate()

    def gather(self, tensor: Tree) -> Tree:
        """Return tensors of all ranks, concatenated along dimension 0. All ranks must call it.

        In a single-process run, the input is returned unchanged.

        Args:
            tensor: Tensor, or nested containers of tensors.

        Raises:
            TypeError: If there are several processes and a leaf is not a tensor.
        """
        if self.num_processes == 1:
            return tensor
        require_tensors(tensor, GATHER)
        return super().gather(tensor)

    def reduce(self, tensor: Tree, reduction: str = "sum", scale: float = 1.0) -> Tree:
        """Return the tensors combined over all ranks. Shapes must be equal on all ranks, and all ranks must call it.

        Args:
            tensor: Tensor, or nested containers of tensors.
            reduction: "sum" (the default), "mean", "max" or "min".
            scale: Factor by which the result is multiplied. Default: 1.

        Raises:
            TypeError: If a leaf is not a tensor, with Accelerate's message.
        """
        require_tensors(tensor, REDUCE)
        return super().reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Tree, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Tree:
        """Return tensors padded along one dimension to the largest size of all ranks, so that they can be gathered.

        All ranks must call it.

        Args:
            tensor: Tensor, or nested containers of tensors.
            dim: Dimension to pad. Default: 0.
            pad_index: Value of the padding. Default: 0.
            pad_first: Whether to pad at the beginning. Default: False.

        Raises:
            TypeError: If a leaf is not a tensor, with Accelerate's message.
        """
        require_tensors(tensor, PAD)
        return super().pad_across_processes(tensor, dim, pad_index, pad_first)

    def gather_for_metrics(
        self, input_data: Tree, use_gather_object: bool = False, loader: PreparedLoader | None = None
    ) -> Tree:
        """Return the concatenated results of all ranks, without samples that were repeated to fill the last batch.

        Values that do not have one entry per sample are concatenated too. If the last global batch of a loader is
        incomplete, they are truncated to the number of its samples, as in Accelerate. All ranks must call it.

        Args:
            input_data: Tensors, arrays or lists in nested containers, usually with one entry per sample.
            use_gather_object: Whether to treat every list as one item per sample, whatever it contains. Default: False.
            loader: Loader that the batch came from. Default: the innermost loader that is being iterated.

        Raises:
            StateError: If values have one entry per sample and `loader` is not being iterated.
        """
        chosen = loader if loader is not None else self._training_step.windows.reads.loader
        if not use_gather_object and not is_per_sample(input_data, chosen, self._shard_readers):
            return gather_and_truncate(input_data, use_gather_object)
        try:
            return super().gather_for_metrics(input_data, use_gather_object, loader)
        except MetricError as error:
            log.warning_once("%s. It is joined as it is", error)
        return gather_and_truncate(input_data, use_gather_object)

    @property
    def _split_position(self) -> tuple[int, int]:
        """Index of this rank's part in `split_between_processes`, and the number of parts: one per rank.

        Accelerate splits over all ranks in every layout, and scripts may rely on this to divide work that does not use
        the model.
        """
        if self.num_data_shards < self.num_processes:
            log.warning_once(
                "split_between_processes gives each of the %d processes its own items, as in Accelerate, but the layout has %d data "
                "shards: several processes hold parts of one model replica, and a forward pass would mix their items. To give them "
                "equal items, use items[accelerator.data_shard_index :: accelerator.num_data_shards], or headway.Accelerator",
                self.num_processes,
                self.num_data_shards,
            )
        return self.process_index, self.num_processes

    # ---------------------------------------------------------------- checkpoints

    def _choose_last_save_hook(self) -> AccelerateWriter | None:
        """Return the save hook that writes Accelerate's files, or None if checkpoints of this run have no such files.

        They have none if models are sharded, if the run uses several machines, or if HEADWAY_ACCELERATE_FILES is 0.
        """
        setting = env.get_bool("HEADWAY_ACCELERATE_FILES")
        is_replicated = self.distributed_type in _REPLICATED_TYPES
        is_one_machine = self.runtime.local_world_size == self.num_processes
        return self._writer if setting is not False and is_replicated and is_one_machine else None

    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        metric: float | None = None,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save a checkpoint of all prepared and registered objects, with Accelerate's files in the same directory.

        Accelerate's files are left out if models are sharded, if the run uses several machines, or if the environment
        variable HEADWAY_ACCELERATE_FILES is 0.

        Args:
            output_dir: Directory of the checkpoint. It must be given unless
                `ProjectConfiguration(automatic_checkpoint_naming=True)` chooses the directory. Then it is ignored.
                Default: None.
            safe_serialization: Whether Accelerate's weight files have the format safetensors. If False, `torch.save`
                writes them. Default: True.
            blocking: Whether to wait until the checkpoint is on disk. Default: True.
            metric: Value of the metric for this state, by which `ProjectConfiguration(keep_best=...)` selects
                checkpoints. None (the default): no metric.
            save_model_func_kwargs: Other keyword arguments of `headway.Accelerator.save_state`, such as `weights`.

        Returns:
            The directory of the checkpoint.
        """
        self._writer.safe_serialization = safe_serialization
        return super().save_state(output_dir, blocking=blocking, metric=metric, **save_model_func_kwargs)

    def load_state(
        self,
        input_dir: str | Path | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        strict: bool | None = None,
        changed: str | Collection[str] | None = None,
        **load_model_func_kwargs: Any,
    ) -> RestoreResult:
        """Load a checkpoint that Headway or Accelerate wrote.

        Loaders use the sample order of the interrupted epoch again, from its first batch. As with Accelerate, the
        script skips the finished batches, for example by `skip_first_batches`. Only stateful loaders restore their
        position.

        Args:
            input_dir: Directory of the checkpoint. None: the newest checkpoint, which requires automatic naming.
            load_kwargs: Ignored, as in `headway.Accelerator.load_state`.
            strict: For a checkpoint of Headway, whether to refuse one saved with a different world size, layout, batch
                size, precision or version. For a checkpoint of Accelerate, whether the weights must have exactly the
                names of the model's weights. None (the default): False for the former, True for the latter.
            changed: Intended differences from a checkpoint of Headway: "data", "schedule", "groups" or several of them,
                as in `headway.Accelerator.load_state`. A difference of these kinds that is not named raises
                `CheckpointError`. None (the default): only warn if data or schedules differ.
            load_model_func_kwargs: Ignored. Accelerate's arguments are accepted for compatibility.

        Returns:
            Description of what was restored.

        Raises:
            CheckpointError: If the checkpoint is missing, damaged or does not fit this run, or if it differs in a way
                that `strict` or `changed` does not allow.
            ConfigError: If `input_dir` does not exist, or if it is None and automatic naming is off. Also if an
                argument or a name in `changed` is unknown.
            UnsupportedError: If Accelerate wrote the checkpoint and this run's models are sharded.
        """
        checkpoint_folder = self._checkpoints.checkpoint_folder
        folder = None if input_dir is None else Path(input_dir).expanduser().absolute()
        if folder is not None and not folder.exists():
            raise ConfigError(f"Tried to find {folder} but folder does not exist; give one that save_state wrote")
        if folder is None and checkpoint_folder.is_automatic:
            folder = find_newest(checkpoint_folder.get_parent())
        if folder is None or not is_accelerate_checkpoint(folder):
            result = super().load_state(
                input_dir, load_kwargs, strict=bool(strict), changed=changed, **load_model_func_kwargs
            )
            self._checkpoint_state.progress.reads_from_start = not self.use_stateful_dataloader
            if not self.use_stateful_dataloader:
                for loader in self._preparation.loaders:
                    loader.restart_loaded_epoch()
            return result
        if self.distributed_type not in _REPLICATED_TYPES:
            raise UnsupportedError(
                f"{folder} was written by Accelerate, but this run's models are sharded; load it without sharding, then save it again"
            )
        models = list(self._preparation.models)
        self._checkpoints.hooks.call_load_hooks(models, folder)
        restored = AccelerateReader(self, folder).restore(models, strict is not False)
        checkpoint_folder.continue_numbering(folder, parse_number(folder))
        log.info("%s was written by Accelerate: weights, optimizers, schedules and random streams are restored", folder)
        return restored

    @property
    def _num_micro_batches_in_window(self) -> int:
        window = self._training_step.windows.current
        return 0 if window.is_closed else window.num_done

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """Settings for splitting, padding and moving batches. Assigned fields apply to loaders prepared later."""
        return LiveDataLoaderConfiguration(
            self._preparation.loading, lambda fields: self._preparation.set_loading(DataLoaderConfiguration(**fields))
        )

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        self._preparation.set_loading(value)

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Settings for the directories of the run's files and for checkpoint names.

        Fields can be assigned, including `iteration`, the number of the next checkpoint.
        """
        checkpoint_folder = self._checkpoints.checkpoint_folder
        return LiveProjectConfiguration(
            replace(checkpoint_folder.project, iteration=checkpoint_folder.iteration),
            lambda fields: self._set_project(ProjectConfiguration(**fields)),
        )

    @project_configuration.setter
    def project_configuration(self, value: ProjectConfiguration) -> None:
        self._set_project(value)

    def _set_project(self, project: ProjectConfiguration) -> None:
        checkpoint_folder = self._checkpoints.checkpoint_folder
        checkpoint_folder.project, checkpoint_folder.iteration = project.freeze_copy(), project.iteration

    @property
    def even_batches(self) -> bool:
        """Whether an incomplete last global batch is filled with samples from the start of the data.

        Assignments apply to loaders that are prepared later.
        """
        return self._preparation.loading.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._preparation.set_loading(replace(self._preparation.loading, even_batches=value))

    def _convert_outputs_to_float32(self, model: Any) -> None:
        is_model = isinstance(model, torch.nn.Module) and self.precision.is_mixed
        if is_model and _convert_outputs_hook not in model._forward_hooks.values():
            model.register_forward_hook(_convert_outputs_hook)
