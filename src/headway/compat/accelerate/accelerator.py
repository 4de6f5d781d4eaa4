"""The Accelerator of `import accelerate` when Headway stands in for it: Headway's, with Accelerate's arithmetic.

Scripts and libraries that were written against Accelerate count on how it divides losses and on float32 outputs; those are
kept here. `headway.Accelerator` itself weighs losses and leaves outputs as they are.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headway.accelerator import Accelerator
from headway.checkpoint.format.foreign import number_of
from headway.checkpoint.resume.comparison import Restored
from headway.common import env
from headway.compat.accelerate.checkpoints import Reader, Writer, is_accelerates, newest_in
from headway.compat.accelerate.constants import DistributedType
from headway.compat.accelerate.data.batches import convert_to_fp32, gather_and_cut, is_per_sample
from headway.compat.accelerate.data.loaders import AccelerateRules
from headway.compat.accelerate.plugins import FullyShardedDataParallelPlugin, ParallelismConfig
from headway.compat.accelerate.prepared import AcceleratedOptimizer, AcceleratedScheduler, CountedWindows, check_scaler
from headway.compat.accelerate.recipes import usable
from headway.compat.accelerate.trackers import makers
from headway.config.run import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration
from headway.config.values import KwargsHandler
from headway.data.loader import PreparedLoader
from headway.errors import ConfigError, MetricError, UnsupportedError
from headway.log import get_logger
from headway.runtime.collectives.tree import Tree
from headway.tracking.base import BlankTracker
from headway.training.prepared.prepare import Wrappers
from headway.training.windows import ConstantDivision

log = get_logger(__name__)

_UNSET: Any = object()
_SAID = "ACCELERATE_"
"""The variable in which Accelerate's launcher says how to write sharded weights: whole, or a part from each rank."""
PREEMPTION = "HEADWAY_PREEMPTION"
"""The variable that lets a signal or a deadline save, for scripts that start from what `load_state` gives alone."""
_HANDLERS = {
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
"""What `accelerator.NAME_handler` is an instance of."""
_SHARDED = ("FSDP", "DEEPSPEED", "TP", "MEGATRON_LM")
_REPLICATED = frozenset(each for each in DistributedType if each.name not in _SHARDED)


def _without_adjusting(plugin: Any) -> Any:
    # Accelerate's `adjust_scheduler` moves a counter that schedules do not read: they tick per update whatever it says.
    return replace(plugin, adjust_scheduler=False) if isinstance(plugin, GradientAccumulationPlugin) else plugin


def _said(name: str) -> str | None:
    """What Accelerate's variable of that name says, where Headway's own says nothing."""
    return None if env.get(f"{env.PREFIX}{name}") else env.get(f"{_SAID}{name}")


def _in_float32(module: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
    """A forward hook; of a module, so that a model that has it can be pickled."""
    return convert_to_fp32(outputs)


def _member(name: str) -> property:
    return property(lambda accelerator: getattr(accelerator._members_of_accelerate, name))


class _TakenUp(KwargsHandler):
    """Mixed in before an Accelerator's own settings, which then take up each assignment to a field.

    Args:
        now: the settings in force.
        use: takes all fields after an assignment.
    """

    _use: Callable[[dict[str, Any]], None]

    def __init__(self, now: KwargsHandler, use: Callable[[dict[str, Any]], None]) -> None:
        vars(self).update(now.to_dict(), _use=use)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value
        self._use(self.to_dict())


class LiveDataLoaderConfiguration(_TakenUp, DataLoaderConfiguration):
    """How loaders that are prepared later split, pad and move batches."""


class LiveProjectConfiguration(_TakenUp, ProjectConfiguration):
    """Where the run keeps its files."""


class AccelerateAccelerator(Accelerator):
    """Headway's Accelerator with Accelerate's arguments and arithmetic.

    Each loss is divided by the accumulation steps, and ranks count alike, whatever the window held; under mixed precision
    outputs of the model are float32.

    Args:
        split_batches: ignored, as Accelerate ignores it; `dataloader_config` has it.
        others: as for `headway.Accelerator`.
    """

    _refuses_drift = False  # Accelerate has no word on it, and its scripts go on
    _wrappers = Wrappers(AcceleratedOptimizer, AcceleratedScheduler, keeps_precision=True)
    _windows = CountedWindows
    # Tests of libraries replace these in the class.
    context_parallel_rank = _member("context_parallel_rank")
    data_parallel_rank = _member("data_parallel_rank")
    data_parallel_shard_rank = _member("data_parallel_shard_rank")
    pipeline_parallel_rank = _member("pipeline_parallel_rank")
    tensor_parallel_rank = _member("tensor_parallel_rank")

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
        # By keyword, for pickle.
        self._given = {
            "device_placement": device_placement, "mixed_precision": mixed_precision, "cpu": cpu, "rng_types": rng_types,
            "gradient_accumulation_steps": gradient_accumulation_steps, "dataloader_config": dataloader_config,
            "project_config": project_config, "gradient_accumulation_plugin": gradient_accumulation_plugin,
            "step_scheduler_with_optimizer": step_scheduler_with_optimizer, "kwargs_handlers": kwargs_handlers,
        }  # fmt: skip
        if gradient_accumulation_plugin is None and (said := env.get_int(f"{_SAID}GRADIENT_ACCUMULATION_STEPS")):
            gradient_accumulation_steps = said
        if fsdp_plugin is None and env.get_bool(f"{_SAID}USE_FSDP"):
            fsdp_plugin = FullyShardedDataParallelPlugin()
        if parallelism_config is None and env.get_bool(f"{_SAID}USE_PARALLELISM_CONFIG"):
            parallelism_config = ParallelismConfig()
        self._project = ""
        self._writer = Writer(self)
        kept = makers(log_with, lambda: self._project, lambda: self.logging_dir)
        self._asked_trackers = bool(kept)
        super().__init__(
            device_placement=device_placement, mixed_precision=mixed_precision or _said("MIXED_PRECISION"), cpu=cpu or None,
            gradient_accumulation_steps=None if gradient_accumulation_steps == 1 else gradient_accumulation_steps,
            gradient_accumulation_plugin=_without_adjusting(gradient_accumulation_plugin),
            rng_types=rng_types if rng_types is not None else ("generator",), dataloader_config=dataloader_config,
            deepspeed_plugin=deepspeed_plugin, deepspeed_plugins=deepspeed_plugins, fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin, megatron_lm_plugin=megatron_lm_plugin, parallelism_config=parallelism_config,
            log_with=kept, project_dir=project_dir, project_config=project_config, loss_policy=ConstantDivision(),
            step_scheduler_with_optimizer=step_scheduler_with_optimizer, dynamo_backend=dynamo_backend, dynamo_plugin=dynamo_plugin,
            kwargs_handlers=usable(kwargs_handlers),
            # A checkpoint that the script does not know of lacks what it puts beside its own, and would be the newest.
            preemption=None if env.get_bool(PREEMPTION) else False,
        )  # fmt: skip
        self._remember(rng_types, log_with, kwargs_handlers)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._given), ()

    def __deepcopy__(self, memo: Any) -> "AccelerateAccelerator":
        return self  # as Accelerate's: there is one run

    def _remember(self, rng_types: Sequence[str] | None, log_with: Any, handlers: list[Any] | None) -> None:
        """What scripts read back, or set, of what was given; nothing else looks at it."""
        self.rng_types = ["generator"] if rng_types is None else rng_types
        self.log_with = log_with if isinstance(log_with, list) else [] if log_with is None else [log_with]
        self.flag_tensor: torch.Tensor | None = None
        self.has_lomo_optimizer = self.delayed_fp8_autocast = False
        self.fp8_enabled = self.mixed_precision == "fp8"
        for name, kinds in _HANDLERS.items():
            fits = [each for each in handlers or () if type(each).__name__ in kinds]
            setattr(self, f"{name}_handler", fits[0] if fits else None)
        self.has_fp8_handler = getattr(self, "ao_recipe_handler", None) is not None

    def _loading_rules(self) -> AccelerateRules:
        return AccelerateRules()

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """As Headway's; trackers named in `log_with` are instances of Accelerate's classes."""
        self._project = project_name
        super().init_trackers(project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """As Headway's; without any tracker, an object that takes every call and does nothing."""
        return super().get_tracker(name, unwrap) if self.trackers or self._asked_trackers else BlankTracker()

    def prepare(  # type: ignore[override]
        self, *objects: Any, device_placement: list[bool] | None = None, strict: bool = False
    ) -> Any:
        """As Headway's; under mixed precision, models return float32."""
        prepared = super().prepare(*objects, device_placement=device_placement, strict=strict)
        for each in objects:
            self._upcast(each)
        return prepared

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """As Headway's; under mixed precision, the model returns float32."""
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        self._upcast(prepared)
        return prepared

    @property
    def step(self) -> int:
        """Micro-batches since the data last ended; settable."""
        return self._counted.step

    @step.setter
    def step(self, value: int) -> None:
        self._counted.step = value

    @property
    def _counted(self) -> CountedWindows:
        return self._training_step.windows  # type: ignore[return-value]  # made by `_windows`

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """As Headway's; what it is, or None where losses are not scaled, may be assigned.

        Raises:
            ConfigError: another one is assigned.
        """
        return super().scaler

    @scaler.setter
    def scaler(self, value: Any) -> None:
        check_scaler(value, self.scaler)

    @property
    def device_placement(self) -> bool:
        """Are models and batches moved to the device? Settable, for what is prepared later."""
        return self._preparation.places

    @device_placement.setter
    def device_placement(self, value: bool) -> None:
        self._preparation.places = value

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:  # type: ignore[override]
        """As Headway's; `gradient=` of a loss that is no scalar is what torch's backward takes."""
        gradient = kwargs.pop("gradient", None)
        super().backward(loss if gradient is None else (loss * gradient).sum(), **kwargs)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """As Headway's; what is not prepared is left alone, and on CPUs `even_batches` has no effect."""
        if even_batches is not None and self.num_processes > 1 and self.device.type == "cpu":
            log.warning_once(
                "join_uneven_inputs(even_batches=%s) has no effect on CPUs, as in Accelerate", even_batches
            )
            even_batches = None
        with super().join_uneven_inputs((), even_batches):
            yield

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[None]:
        """As Headway's, with one counter and one set of gradients, whatever models are named."""
        return super().accumulate()

    def gather(self, tensor: Tree) -> Tree:
        """As Headway's; on one process the input is returned."""
        return tensor if self.num_processes == 1 else super().gather(tensor)

    def gather_for_metrics(
        self, input_data: Tree, use_gather_object: bool = False, loader: PreparedLoader | None = None
    ) -> Tree:
        """As Headway's; values without one entry per sample are joined too, and cut as Accelerate does at the end of the data."""
        chosen = loader if loader is not None else self._training_step.windows.loader
        if not use_gather_object and not is_per_sample(input_data, chosen, self._readers):
            return gather_and_cut(input_data, use_gather_object)
        try:
            return super().gather_for_metrics(input_data, use_gather_object, loader)
        except MetricError as error:
            log.warning_once("%s. It is joined as it is", error)
        return gather_and_cut(input_data, use_gather_object)

    # ---------------------------------------------------------------- checkpoints

    def _last_save_hook(self) -> Writer | None:
        asked = env.get_bool("HEADWAY_ACCELERATE_FILES")
        is_replicated = self._members_of_accelerate.distributed_type in _REPLICATED
        is_one_machine = self.runtime.local_world_size == self.num_processes
        return self._writer if asked is not False and is_replicated and is_one_machine else None

    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        metric: float | None = None,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """As Headway's, with Accelerate's files in the same folder.

        They are left out if models are sharded, on several machines, and with HEADWAY_ACCELERATE_FILES=0.
        """
        self._writer.safe_serialization = safe_serialization
        return super().save_state(output_dir, blocking=blocking, metric=metric, **save_model_func_kwargs)

    def load_state(
        self,
        input_dir: str | Path | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        strict: bool = False,
        changed: str | Collection[str] | None = None,
        **load_model_func_kwargs: Any,
    ) -> Restored:
        """As Headway's; also loads folders that Accelerate wrote.

        Loaders keep the interrupted epoch's order. Where in it the script goes on is its own business, as with Accelerate: by
        `skip_first_batches`, by `continue`, or not at all; only a stateful loader goes on by itself.

        Raises:
            CheckpointError: missing, damaged, or it does not fit.
            UnsupportedError: Accelerate wrote the folder, and this run's models are sharded.
        """
        place = self._checkpoints.place
        folder = None if input_dir is None else Path(input_dir).expanduser().absolute()
        if folder is not None and not folder.exists():
            raise ConfigError(f"Tried to find {folder} but folder does not exist; give one that save_state wrote")
        if folder is None and place.is_automatic:
            folder = newest_in(place.parent())
        if folder is None or not is_accelerates(folder):
            own = super().load_state(input_dir, load_kwargs, strict=strict, changed=changed, **load_model_func_kwargs)
            if not self.use_stateful_dataloader:
                for loader in self._preparation.loaders:
                    loader.read_from_start()
            return own
        if self._members_of_accelerate.distributed_type not in _REPLICATED:
            raise UnsupportedError(
                f"{folder} was written by Accelerate, but this run's models are sharded; load it without sharding, then save it again"
            )
        weights_strict = load_model_func_kwargs.get("strict", True)
        restored = Reader(self, folder).restore(self._checkpoints.models_to_load(folder), weights_strict)
        place.go_on_from(folder, number_of(folder))
        log.info("%s was written by Accelerate: weights, optimizers, schedules and random streams are restored", folder)
        return restored

    @property
    def _num_micro_batches_in_hand(self) -> int:
        window = self._training_step.windows.current
        return 0 if window.is_closed else window.num_done

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders split, pad and move batches; assignments apply to loaders prepared later."""
        return LiveDataLoaderConfiguration(
            self._preparation.loading, lambda fields: self._preparation.load_by(DataLoaderConfiguration(**fields))
        )

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        self._preparation.load_by(value)

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where the run keeps its files; its fields may be assigned, `iteration` too, which saves advance."""
        place = self._checkpoints.place
        return LiveProjectConfiguration(
            replace(place.project, iteration=place.iteration),
            lambda fields: self._use_project(ProjectConfiguration(**fields)),
        )

    @project_configuration.setter
    def project_configuration(self, value: ProjectConfiguration) -> None:
        self._use_project(value)

    def _use_project(self, project: ProjectConfiguration) -> None:
        self._checkpoints.place.project, self._checkpoints.place.iteration = project.taken(), project.iteration

    @property
    def even_batches(self) -> bool:
        """Is the last round filled up with samples from the start? Assignments apply to loaders prepared later."""
        return self._preparation.loading.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._preparation.load_by(replace(self._preparation.loading, even_batches=value))

    def _upcast(self, model: Any) -> None:
        is_model = isinstance(model, torch.nn.Module) and self.precision.is_mixed
        if is_model and _in_float32 not in model._forward_hooks.values():
            model.register_forward_hook(_in_float32)
