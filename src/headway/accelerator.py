"""`Accelerator`, Headway's public class.

The constructor converts its arguments to `Settings` and creates a `Run` from them. Each method delegates to one
component of the run. Methods about ranks, such as `print`, are in the base class `RankAware`
(`headway.core.runtime.collectives.ranks`). A module that only one method needs is imported in that method, so that
scripts start faster.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle
from typing_extensions import TypeVarTuple, Unpack

from headway.common import env, scope, tracebacks
from headway.core import extensions
from headway.core.checkpoint.resume.arguments import check_load_arguments, check_save_arguments
from headway.core.checkpoint.resume.comparison import RestoreResult
from headway.core.checkpoint.resume.hooks import LoadHook, SaveHook
from headway.core.checkpoint.resume.save_and_resume import Checkpoints
from headway.core.checkpoint.resume.state import CheckpointState
from headway.core.config.activation_checkpointing import ActivationCheckpointing
from headway.core.config.compilation import Backend, TorchDynamoPlugin
from headway.core.config.engine_plugin import EnginePlugin
from headway.core.config.guards import NonFinitePolicy, SpikePolicy
from headway.core.config.layout_request import LayoutPlugin
from headway.core.config.preemption import Preemption
from headway.core.config.run import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration
from headway.core.config.torch_kwargs import AutocastKwargs, ProfileKwargs
from headway.core.config.values import report_unknown_keywords
from headway.core.data.build import skip_first_batches
from headway.core.data.loader import PreparedLoader
from headway.core.runtime import process
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.ranks import RankAware
from headway.core.runtime.collectives.tree import Tree
from headway.core.runtime.hang_watch import start_hang_watch
from headway.core.tracking.base import Tracker
from headway.core.tracking.record import Recorder, TrackerKwargs
from headway.core.training.behavior import Behavior
from headway.core.training.build import build_preparation, build_run, build_step, join_process, start_process
from headway.core.training.checks.bypass import BypassDetector
from headway.core.training.facts import publish_facts
from headway.core.training.full_weights import FullWeights
from headway.core.training.local_blocks import LocalTraining
from headway.core.training.loss_policy import LossPolicy
from headway.core.training.metrics import gather_for_metrics, warn_of_repeats
from headway.core.training.prepared.optimizer import PreparedOptimizer
from headway.core.training.prepared.scheduler import PreparedScheduler, SchedulerStepRule
from headway.core.training.settings import Settings, resolve_settings
from headway.core.weights.compiled import remove_wrappers, unwrap_compiled
from headway.core.weights.export import save_object
from headway.errors import CallError, ConfigError, StateError, UnsupportedError
from headway.log import get_logger, is_debugging

if TYPE_CHECKING:
    from headway.core.training.checks.finite import FiniteGuard
    from headway.core.training.forecast_types import Forecast, Loop, Loss, MakeOptimizer
    from headway.core.training.interfaces import Proofs, SpikeReport, ThroughputMeter, WeightBuckets

log = get_logger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=torch.nn.Module)
Ts = TypeVarTuple("Ts")


@report_unknown_keywords
class Accelerator(RankAware):
    """Runs your PyTorch loop on any number of processes, on any device and in any precision.

    Pass your objects through `prepare`, and keep the loop that you would write for one process::

        accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

    Create it on every rank, with equal arguments, in the main thread. The first Accelerator of a process selects the
    device and starts the process group, if the launcher started several processes. A second Accelerator shares both,
    but prepares its own objects. No RNG is seeded; call `set_seed` for that.

    Precision, layout and similar settings that are not given here come from the launcher's flags, `HEADWAY_*`
    variables and the config file. A value that is given here takes precedence over variables and file. If it
    contradicts a flag on the command line, `ConfigError` is raised; with `headway launch --force`, the flag applies.

    Args:
        device_placement: Whether to move models and batches to `device`. Default: True.
        split_batches: Short form of `DataLoaderConfiguration(split_batches=True)`. Default: False.
        mixed_precision: Precision of forward passes. "no": that of the parameters. "bf16" and "fp16": torch.autocast
            ("fp16" with a gradient scaler). "fp8": float8 by torchao (`Float8Options`). Default: the launcher's
            setting, or "no".
        gradient_accumulation_steps: Number of micro-batches per update, at least 1. Default: the launcher's setting,
            or 1.
        cpu: Whether to compute on the CPU even if an accelerator is available. Default: the launcher's setting, or
            False.
        dataloader_config: Settings for splitting, padding and moving batches of prepared loaders. None: the defaults of
            `DataLoaderConfiguration`.
        deepspeed_plugin: DeepSpeed's settings (`headway.DeepSpeedPlugin`).
        fsdp_plugin: Options of a sharded layout under Accelerate's names. The `strategy` argument is the short form.
        torch_tp_plugin: Tensor parallelism under Accelerate's older name.
        megatron_lm_plugin: Not supported. Any value but None raises an error that names an alternative.
        rng_types: RNGs whose state is copied from rank 0 to all ranks. "generator": those in the samplers of prepared
            loaders, at the start of each pass. "torch", "python", "numpy", "device" or a device type such as "cuda":
            the global ones, once for each loader, when it is prepared. None: no RNG. Default: ("generator",).
        log_with: Trackers that receive the run's log: a name such as "tensorboard", "wandb" or "mlflow" (`LoggerType`
            lists them), "all" (those that are installed), an instance of `headway.Tracker`, or a list of these. None
            (the default): no trackers.
        project_dir: Directory of the run's files, a path or a URL such as "s3://bucket/run". Short form of
            `ProjectConfiguration(project_dir=...)`. None (the default): no directory.
        project_config: Directory of the run's files, with naming and retention of checkpoints. It may be combined with
            `project_dir` unless the two directories differ.
        gradient_accumulation_plugin: Accumulation steps with more options. Cannot be combined with
            `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: Whether a scheduler steps only when its optimizer does. If False, each step()
            call advances the schedule. Default: True.
        kwargs_handlers: Options of torch components such as DDP and GradScaler, at most one of each class (see
            `headway.core.config.engines`).
        dynamo_backend: torch.compile backend, such as "inductor", that compiles models in prepare(). None or "no": do
            not compile.
        dynamo_plugin: torch.compile backend with its settings, a `TorchDynamoPlugin`.
        deepspeed_plugins: Mapping from names to DeepSpeed's settings. Only one entry is supported.
        parallelism_config: Sizes of the layout's axes under Accelerate's names. The `strategy` argument is the short
            form.
        adjust_scheduler_to_accumulation: Whether the lengths of schedules are given in micro-batches rather than
            updates. Default: False.
        scheduler_ticks: Rule for how many steps a schedule advances per update (docs/schedules.md). "updates": one. An
            object with `name`, `reason` and `ticks(window_length)` is a custom rule. None (the default): as many steps
            as a loop on one process would make for the update's data.
        global_batch_size: Samples per update over all ranks. The number of micro-batches per update is derived from the
            number of ranks and the batch size of the first prepared loader. It cannot be combined with
            `gradient_accumulation_steps` or `gradient_accumulation_plugin`. None (the default): not fixed.
        loss_policy: Rule by which losses are averaged. Default: the exact mean over the accumulation window and all
            ranks.
        microbatching: "auto" to run a batch again in smaller micro-batches on all ranks if memory runs out. The update
            is still that of the entire batch. Loops must use `forward_backward` or `microbatches`. None (the default):
            batches are never split.
        on_non_finite: Reaction to an update whose loss or gradients are NaN or infinite: "skip", "stop", "raise",
            "explain", or a `NonFinitePolicy`. None (the default): warn about the first such loss and continue.
        preemption: Whether all ranks save and exit with code 75 after a signal or at a deadline, or a `Preemption` with
            options. None (the default): True if checkpoints are named automatically and a project directory is set,
            else False. False: signals keep their usual effect.
        strategy: Layout: "ddp" (the default, one replica per process), "fsdp", "hsdp=8", "tp", "fsdp+tp=2" and others
            (docs/layouts.md). A number is a number of ranks. "zero1", "zero2", "zero3" and "deepspeed" use DeepSpeed.
            None: the layout of the plugins, else that of the launcher, else "ddp".
        on_spike: Reaction to an update whose loss or gradient norm is far above those of recent updates: "skip",
            "go_back", or a `SpikePolicy`. None (the default): no check.

    Attributes:
        mixed_precision: Precision of the run: "no", "bf16", "fp16" or "fp8".
        global_batch_size: Argument `global_batch_size`.
        strategy: Strategy object that implements the layout. Its `name` is the layout's name (docs/own_strategy.md).
        collectives: Checked collectives over all ranks, which raise an error if ranks call different operations.

    Raises:
        ConfigError: If settings are invalid or contradict each other, or the process already computes on another device.
        CallError: If an argument's name is unknown.
        LaunchError: If the number of processes that joined differs from the number that the launcher announced.
        DeviceUnavailable: If a requested accelerator cannot be used by this process.
        UnsupportedError: If the layout, or an option of a plugin, is not supported.
        OptionalDependencyMissing: If the package of a tracker, of float8 or of DeepSpeed is not installed.
        StateError: If `preemption` is requested outside the main thread, where Python cannot handle signals.
    """

    _behavior: Behavior = Behavior()
    """Rules for losses, accumulation windows, loaders and checkpoints.

    A subclass with different rules assigns this attribute before it calls `Accelerator.__init__`.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: EnginePlugin | None = None,
        fsdp_plugin: LayoutPlugin | None = None,
        torch_tp_plugin: LayoutPlugin | None = None,
        megatron_lm_plugin: None = None,
        rng_types: Sequence[str] | None = ("generator",),
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[Any] | None = None,
        dynamo_backend: Backend | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Mapping[str, EnginePlugin] | None = None,
        parallelism_config: LayoutPlugin | None = None,
        # Accelerate's arguments end here. The following are Headway's own.
        adjust_scheduler_to_accumulation: bool = False,
        scheduler_ticks: str | SchedulerStepRule | None = None,
        global_batch_size: int | None = None,
        loss_policy: LossPolicy | None = None,
        microbatching: str | None = None,
        on_non_finite: str | NonFinitePolicy | None = None,
        preemption: Preemption | bool | None = None,
        strategy: str | None = None,
        on_spike: str | SpikePolicy | None = None,
    ) -> None:
        scope.get_or_create(tracebacks.ExceptionHook).install(lambda: not is_debugging())
        settings = resolve_settings(
            device_placement=device_placement,
            split_batches=split_batches,
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            cpu=cpu,
            dataloader_config=dataloader_config,
            deepspeed_plugin=deepspeed_plugin,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            rng_types=rng_types,
            log_with=log_with,
            project_dir=project_dir,
            project_config=project_config,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            kwargs_handlers=kwargs_handlers,
            dynamo_backend=dynamo_backend,
            dynamo_plugin=dynamo_plugin,
            deepspeed_plugins=deepspeed_plugins,
            parallelism_config=parallelism_config,
            adjust_scheduler_to_accumulation=adjust_scheduler_to_accumulation,
            scheduler_ticks=scheduler_ticks,
            global_batch_size=global_batch_size,
            loss_policy=loss_policy,
            microbatching=microbatching,
            on_non_finite=on_non_finite,
            preemption=preemption,
            strategy=strategy,
            on_spike=on_spike,
        )
        verify = extensions.load("feature", "verify") if env.get(env.VERIFY) else None
        if verify is not None:
            settings = verify.redirect_settings(settings)
        runtime = start_process(settings)
        start_hang_watch()
        if settings.loss_policy is not None:
            self._behavior = replace(self._behavior, loss_policy=settings.loss_policy)
        run = build_run(settings, runtime, self._behavior)
        super().__init__(runtime, run.collectives)
        self._run = run
        self.options = run.options
        self.mixed_precision = run.mixed_precision
        self.strategy = run.strategy
        self.precision = run.precision
        self.clock = run.clock
        self.global_batch_size = settings.global_batch_size
        recorder = None if verify is None else verify.record_run(run)
        self._build_parts(settings)
        if recorder is not None:
            recorder.attach_to(self, self._training_step, self._checkpoints)

    def _build_parts(self, settings: Settings) -> None:
        """Create the components to which the public methods delegate, such as the training step and checkpoints."""
        run = self._run
        self._training_step = build_step(run, settings, self._behavior)
        self._preparation = build_preparation(run, settings, self._training_step, self._behavior)
        self.local_training = LocalTraining(run.windows)
        self._checkpoint_state = CheckpointState(run, self._preparation, self._training_step, self.local_training)
        self._checkpoints = Checkpoints(
            self._checkpoint_state,
            settings.project,
            run.hooks,
            run.collectives,
            self._behavior.choose_last_save_hook,
            repeats_evaluations=self._behavior.repeats_evaluations,
            resume_method=self._behavior.resume_method,
        )
        self._checkpoints.start_listening(settings.preemption, is_requested=settings.is_preemption_requested)
        checkpoint_folder = self._checkpoints.checkpoint_folder
        self._recorder = Recorder(
            runtime=run.runtime,
            get_project=lambda: checkpoint_folder.project,
            log_with=settings.log_with,
            update_counter=run.clock,
            notes=run.notes,
            has_checkpoints=checkpoint_folder.has_checkpoints,
            get_grad_norm=lambda: self._training_step.grad_norm,
        )
        self._full_weights = FullWeights(run.strategy, run.runtime)
        self._facts = publish_facts(run)
        self._bypass_detector = run.runtime.scope.get_or_create(BypassDetector)
        self._registration = join_process(run, self._training_step, self._preparation)

    @property
    def _shard_readers(self) -> Collectives:
        return self.strategy.data_group

    @property
    def _split_position(self) -> tuple[int, int]:
        return self.data_shard_index, self.num_data_shards

    # ---------------------------------------------------------------- members of other libraries' Accelerators

    if not TYPE_CHECKING:  # hidden from type checkers, which still report unknown names

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # looked up by copy and pickle, which expect an AttributeError
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return extensions.load("members", "accelerate").read_member(self, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *extensions.load("members", "accelerate").list_members()})

    # ---------------------------------------------------------------- prepare

    @overload
    def prepare(self, obj: T, /, *, device_placement: list[bool] | None = None, strict: bool = False) -> T: ...

    @overload
    def prepare(
        self, *objects: Unpack[Ts], device_placement: list[bool] | None = None, strict: bool = False
    ) -> tuple[Unpack[Ts]]: ...

    def prepare(  # type: ignore[misc]  # mypy does not see that *objects takes what the second overload does
        self, *objects: Any, device_placement: list[bool] | None = None, strict: bool = False
    ) -> Any:
        """Prepare models, optimizers, loaders and schedulers for this run, and return them in the given order.

        Call it on every rank, with equal objects, because ranks compare and exchange them. Several calls may prepare
        several objects, as long as a scheduler does not come before its optimizer. What happens to each object:

        - Model: It is changed in place and returned as the same object. It is moved to `device`, gets rank 0's values on
          all ranks, and is replicated or sharded as the layout requires. Its forward runs under autocast.
        - Optimizer: It is wrapped. step() and zero_grad() take effect only at the end of an accumulation window. It may
          have been created before the model was sharded.
        - DataLoader: It is wrapped. Each rank reads its own part of the data, with batches on `device`.
        - Scheduler: It is wrapped. It advances with its optimizer's updates.

        None and objects that are already prepared are returned unchanged. Objects of other types are also returned
        unchanged, with a warning. For type checkers each object keeps its type; prepared optimizers, loaders and
        schedulers have the attributes of the originals.

        Args:
            objects: Models, optimizers, DataLoaders and schedulers, in any order.
            device_placement: One boolean per object: whether to move it, or a loader's batches, to the device. It is
                ignored for optimizers and schedulers. Default: the constructor's `device_placement` for all.
            strict: Whether an object of any other type raises `PrepareError`. Default: False.

        Returns:
            The prepared object if one was given, else a tuple of the prepared objects.

        Raises:
            PrepareError: If no object is given, one cannot be prepared, or they do not belong together, such as an
                optimizer with parameters of an unprepared model. Also if ranks built different models.
            ConfigError: If `device_placement` and the objects differ in number, or `global_batch_size` is not a
                multiple of what all ranks read at once.
            DataError: If a loader cannot be split among ranks, or their data differ in length.
            UnsupportedError: If the strategy does not support an object, such as a second model.

        Example::

            model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        """
        prepared = self._preparation.prepare(objects, device_placement, strict)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare one model in place and return it. A prepared model is returned unchanged.

        Call it on every rank. `prepare` describes what happens to a model.

        Args:
            model: Model to prepare.
            device_placement: Whether to move the model to the device. None (the default): the constructor's
                `device_placement`.
            evaluation_mode: Whether the model is only evaluated. It is then neither replicated nor sharded, under any
                strategy, and ranks may have different models. train() and eval() are not called. Default: False.

        Raises:
            PrepareError: If the model cannot be prepared, or if ranks built different models. With `evaluation_mode`,
                also if the model is on the meta device.
            UnsupportedError: If the strategy supports only one model, and another one is prepared already.
        """
        prepared = self._preparation.prepare_model(model, device_placement, evaluation_mode)
        self._preparation.create_engine_if_ready()
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Prepare one optimizer and return its wrapper. `prepare` describes what the wrapper does.

        Args:
            optimizer: Optimizer to prepare.
            device_placement: Ignored. The optimizer's state is always on the device of its parameters.

        Returns:
            The wrapper. If the optimizer is already prepared, it is the existing one.

        Raises:
            UnsupportedError: If the optimizer cannot step on the parameters as the strategy stores them.
            PrepareError: If it is a placeholder for DeepSpeed's optimizer, and the run does not use DeepSpeed.
        """
        prepared = self._preparation.prepare_optimizer(optimizer)
        self._preparation.create_engine_if_ready()
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: None = None
    ) -> PreparedLoader:
        """Prepare one loader and return its wrapper, which yields this rank's batches. Call it on every rank.

        Args:
            data_loader: DataLoader to prepare. A prepared loader is returned unchanged.
            device_placement: Whether to move batches to the device. None (the default): the constructor's
                `device_placement`.
            slice_fn_for_dispatch: Must be None (the default), because dispatched batches are split by rows.

        Raises:
            UnsupportedError: If `slice_fn_for_dispatch` is given.
            DataError: If the loader cannot be split among ranks, or their data differ in length.
            ConfigError: If `global_batch_size` is not a multiple of what all ranks read at once from the first loader.
        """
        if slice_fn_for_dispatch is not None:
            raise UnsupportedError(
                "slice_fn_for_dispatch is not supported, because Headway splits dispatched batches by rows. Leave it out"
            )
        prepared = self._preparation.prepare_loader(data_loader, device_placement)
        self._preparation.check_packed_models()
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepare one scheduler and return its wrapper, which advances with the updates of the scheduler's optimizer.

        Args:
            scheduler: Scheduler to prepare: one of torch's, or any object with `step`, `state_dict` and
                `load_state_dict`. If it is already prepared, the existing wrapper is returned.

        Raises:
            PrepareError: If the scheduler's optimizer is not prepared yet, unless `step_scheduler_with_optimizer` is
                False.
        """
        return self._preparation.prepare_scheduler(scheduler)

    def unwrap_model(self, model: M, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> M:
        """Return the module inside a model's wrappers. `prepare` itself adds no wrappers.

        No rank waits for another. Parameters of a sharded model stay sharded; `get_state_dict` returns full tensors.

        Args:
            model: Prepared or unprepared model. A DistributedDataParallel or DataParallel wrapper that you created is
                removed.
            keep_fp32_wrapper: Ignored, because outputs are never converted. Accepted for compatibility with Accelerate.
            keep_torch_compile: Whether to keep the wrappers that `torch.compile(module)` creates. If they are removed
                from submodules, the result is a copy of the module tree that shares all tensors with the model.
                prepare() compiles models in place, without wrappers. Default: True.
        """
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        unwrapped: Any = self.strategy.unwrap_model(model)
        return unwrapped if keep_torch_compile else remove_wrappers(unwrapped)  # type: ignore[return-value]

    def load_weights(
        self, model: torch.nn.Module, source: str | Path, strict: bool = False, *, weights: str | None = None
    ) -> None:
        """Load pretrained weights into a model. Call it on every rank; each rank reads only its own shards, once.

        Before `prepare`, names and shapes are checked immediately, and values are read when the model is prepared. The
        model can then be built on the meta device. After `prepare`, values are read immediately.

        Args:
            model: Model, or a part of a model, such as a pretrained base without the new head.
            source: Directory, index or file of safetensors or `.bin`, or a model ID on the Hub. Models of transformers
                accept the names and layouts that `from_pretrained` accepts. Or a checkpoint that `save_state` wrote in any
                layout; its optimizers and progress are ignored.
            strict: Whether stored names that the model does not have raise `CheckpointError` instead of a warning.
                Default: False.
            weights: Name of a `headway.ExponentialMovingAverage` in a checkpoint that `save_state` wrote, such as "ema",
                whose averages are loaded. None (the default): the model's own weights.

        Raises:
            CheckpointError: If the source is missing, damaged or does not fit; the model is then unchanged. Also if a
                rank cannot read its shards.
            ConfigError: If the source has no average of this name.
        """
        from headway.core.checkpoint.loading.model_weights import open_weights

        self._preparation.weights.add(model, open_weights(source, model, weights), strict, self._preparation.models)

    # ---------------------------------------------------------------- the step

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context manager for one micro-batch of an accumulation window.

        An accumulation window consists of the micro-batches of one update: `gradient_accumulation_steps` of them, or fewer at
        the end of an epoch. step() and zero_grad() have no effect until the window's last micro-batch. By default, gradients are
        reduced over ranks only in that micro-batch. Put the forward, the backward and step() of each micro-batch inside the
        context. Calls between this block and the next one still belong to this micro-batch.

        Every rank must enter the context equally often. Each entry counts as one micro-batch. If the last micro-batch of a
        window runs no backward, the window continues with the next one. After an error in the block, the window's gradients are
        dropped.

        Args:
            models: Models that are trained in the block. Default: all prepared models. Different sets of models have
                separate accumulation windows.

        Raises:
            CheckpointError: When the block is entered, if the project's directory contains checkpoints of an earlier run and
                `resume` was not called, or if a background save has failed.
            StateError: When the block is entered, if the run was resumed and its loop does not use `epochs`.

        Example::

            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_fn(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
        """
        step = self._training_step
        return step.micro_batch(step, models or step.prepared.models)

    def microbatches(self, batch: Tree, split: Callable[[Tree, int, int], Tree] | None = None) -> Iterator[Tree]:
        """Iterate over pieces of a batch that fit into memory (docs/microbatching.md).

        If memory runs out on any rank, the iterators of all ranks start again and yield the entire batch in smaller
        pieces. The update is that of the entire batch. Later batches start with the size that fitted. Run the forward,
        the backward and step() of each piece inside `with accelerator.accumulate(model)`. Every rank must call it.

        Args:
            batch: Nested containers of tensors. Values with one entry per row are split. Every piece contains all other
                values unchanged.
            split: Function `split(batch, start, stop)` that returns rows `start` to `stop` - 1 of the batch, for batches
                with values that have another number of entries, such as nodes of graphs. Default: None, which also
                splits the images of transformers' vision-language models correctly.

        Returns:
            An iterator over batches with the structure of `batch`. Without `microbatching="auto"`, it yields only
            `batch` itself.

        Raises:
            MemoryExhausted: If pieces of one row do not fit.
            DataError: If the images of a batch that must be split cannot be assigned to its rows.
            StateError: If it is called inside a piece, which is not split again.

        Example::

            for batch in loader:
                for inputs, targets in accelerator.microbatches(batch):
                    with accelerator.accumulate(model):
                        accelerator.backward(loss_fn(model(inputs), targets))
                        optimizer.step()
                        optimizer.zero_grad()
        """
        return self._training_step.microbatches(batch, split)

    def forward_backward(
        self,
        batch: Tree,
        fn: Callable[[Tree], torch.Tensor],
        weight: Callable[[Tree], Any] | None = None,
        reduction: str = "mean",
        split: Callable[[Tree, int, int], Tree] | None = None,
    ) -> torch.Tensor:
        """Run the forward and backward of a batch, split into pieces if memory requires it. Call it on every rank.

        The method enters `accumulate` itself. With `microbatching="auto"`, a batch that runs out of memory is run again
        in smaller pieces. Pipeline schedules other than "gpipe" need this method, because they mix forward and backward.

        Args:
            batch: Nested containers of tensors. Values with one entry per row are split. Every piece contains all other
                values unchanged.
            fn: Function that returns the loss of a piece.
            weight: Function that returns the number of items in a piece that its loss covers, such as tokens. None (the
                default): the number of rows in the piece.
            reduction: "mean" (the default) if the loss is a mean over those items, "sum" if it is their sum.
            split: Function `split(batch, start, stop)` that returns rows `start` to `stop` - 1 of the batch, for batches
                with values that have another number of entries, such as nodes of graphs. Default: None, which also
                splits the images of transformers' vision-language models correctly.

        Returns:
            The mean loss over the items of the batch on all ranks, a 0-d float32 tensor without a graph, equal on all
            ranks. NaN if the batch has no item.

        Raises:
            LossError: If `fn` or `weight` is not callable, or `fn` does not return a scalar loss with a graph.
            MemoryExhausted: If pieces of one row do not fit.
            DataError: If the images of a batch that must be split cannot be assigned to its rows.

        Example::

            loss = accelerator.forward_backward(batch, lambda piece: model(**piece).loss)
            optimizer.step()
            optimizer.zero_grad()
        """
        return self._training_step.forward_backward(batch, fn, weight, reduction, split)

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Return a context manager for forward passes whose backward does not reduce gradients across ranks.

        Loops that use `accumulate` do not need it. The gradients stay on each rank and are reduced together with those
        of the next backward outside the context, as in `DistributedDataParallel.no_sync`.

        Args:
            model: Prepared model.

        Raises:
            UnsupportedError: If the strategy cannot defer the reduction of gradients.
        """
        self.strategy.capabilities.require("deferred_sync", self.strategy.name, "reduce at every micro-batch")
        with self.strategy.micro_batch_context(model, False):
            yield

    @contextmanager
    def trigger_sync_in_backward(self, model: torch.nn.Module) -> Iterator[None]:
        """Return a context manager in which the next backward reduces gradients, even if its forward ran in `no_sync`.

        Use it if the decision to make an update comes only after the forward. The gradients of earlier backwards are
        reduced together with those of this one. It has no effect on one process. Loops that use `accumulate` do not
        need it.

        Args:
            model: Prepared model.

        Raises:
            UnsupportedError: If the layout is a pipeline, such as "pp".
        """
        self.strategy.expect_backward([model])
        yield

    def backward(
        self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, reduction: str = "mean", **kwargs: Any
    ) -> None:
        """Run backward on a loss, weighted so that the update uses the exact mean over the window and all ranks.

        The window consists of the micro-batches of one update. After its last backward, `.grad` is the gradient of the
        mean over all items (samples or tokens) of the window on all ranks. Do not divide the loss by the number of
        micro-batches or ranks. Every rank must call it in each micro-batch. In a window's last micro-batch, it is a
        collective. Under fp16, the loss is scaled here.

        Outside `accumulate`, each call is a window of its own, and its loss is divided by
        `gradient_accumulation_steps`.

        Args:
            loss: Tensor with one element and a graph.
            weight: Number of items on this rank that the loss covers, such as tokens; at least 0. With 0, the loss is
                left out, even if it is NaN. None (the default): the number of non-padding samples in the current
                micro-batch, or 1 outside a prepared loader; for a later loss of a micro-batch, the weight of the first
                one. Give it either on all ranks or on none.
            reduction: "mean" (the default) if the loss is a mean over those items, "sum" if it is their sum.
            kwargs: Keyword arguments of torch.autograd.backward (retain_graph, create_graph, inputs).

        Raises:
            LossError: If the loss has several elements or no graph, or if `weight` or `reduction` is invalid. Also if
                two losses of one micro-batch have different weights.
            StateError: If step() or zero_grad() was called earlier in a micro-batch whose window has several. Also if
                gradients were cleared inside the first window, a block of the first window reads several batches, or
                ranks have diverged. With `microbatching="auto"`, also outside `microbatches` and `forward_backward`.

        Example::

            accelerator.backward(loss, weight=(labels != -100).sum())
        """
        if self.precision.is_mixed:
            self._warn_low_precision(loss)
        self._training_step.backward(loss, None if weight is None else float(weight), reduction, **kwargs)

    def _warn_low_precision(self, loss: Any) -> None:
        """Warn once if a loss is in half precision, although the run uses autocast."""
        if getattr(loss, "dtype", None) in (torch.bfloat16, torch.float16):
            log.warning_once(
                "the loss was computed in %s, because it was computed outside autocast from half-precision outputs: "
                "wrap the loss function in `with accelerator.autocast():` to compute it in float32",
                loss.dtype,
            )

    def unscale_gradients(self, optimizer: PreparedOptimizer | Sequence[PreparedOptimizer] | None = None) -> None:
        """Divide fp16 gradients by the loss scale, at most once per accumulation window.

        Do nothing in other precisions. Call it only before your own code reads gradients, at the end of a window
        (`sync_gradients`). Clipping and updates unscale gradients automatically.

        Args:
            optimizer: One prepared optimizer or several, as returned by `prepare`. None (the default): all prepared
                optimizers.
        """
        optimizers = self._preparation.optimizers if optimizer is None else optimizer
        for each in [optimizers] if isinstance(optimizers, PreparedOptimizer) else optimizers:
            self._training_step.unscale(each.optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float | str = 2.0) -> torch.Tensor:
        """Clip gradients by their global norm at the end of an accumulation window. Call it on every rank.

        Call it after `backward` and before step(), in each micro-batch. Before the end of the window, gradients are left
        unchanged. fp16 gradients are unscaled first. Norms of sharded gradients include the shards of all ranks.

        Args:
            parameters: One parameter, or an iterable of parameters. Parameters that prepare() has replaced by shards are
                accepted.
            max_norm: Largest norm that gradients may have after clipping.
            norm_type: Type of the norm, as in torch. 2.0 (the default) is the Euclidean norm; "inf" is accepted.

        Returns:
            The norm of the unscaled gradients before clipping, a 0-d tensor, equal on all ranks. Before the end of the
            window, it is the norm of the gradients accumulated so far, which can differ between ranks.

        Raises:
            UnsupportedError: With DeepSpeed, if `norm_type` is not 2, or if `parameters` lacks some of the optimizer's.
            ConfigError: If DeepSpeed's JSON sets another norm.

        Example::

            with accelerator.accumulate(model):
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        """
        return self._training_step.clip(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp each gradient entry to [-clip_value, clip_value] at the end of an accumulation window.

        Call it on every rank, after `backward` and before step(). Before the end of the window, gradients are left
        unchanged. fp16 gradients are unscaled first.

        Args:
            parameters: One parameter, or an iterable of parameters.
            clip_value: Largest absolute value of a gradient entry.

        Raises:
            UnsupportedError: If the strategy cannot clip by value.
        """
        self.strategy.capabilities.require("clip_by_value", self.strategy.name, "use clip_grad_norm_")
        self._training_step.clip_value(parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return an autocast context in the run's precision, for losses and other code outside a model's forward.

        The forward of a prepared model runs under autocast anyway. Without mixed precision, the context does nothing.

        Args:
            autocast_handler: `enabled` and `cache_enabled` of autocast inside this context only, such as
                `AutocastKwargs(enabled=False)`. None (the default): the run's settings.

        Example::

            with accelerator.autocast():
                loss = loss_fn(outputs, targets)
        """
        if autocast_handler is not None and not autocast_handler.enabled:
            return self.runtime.hardware.disable_autocast()
        return self.precision.autocast(autocast_handler)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """torch's gradient scaler under fp16, with the loss scale for the next step. None in other precisions.

        `backward` and prepared optimizers use it automatically, so a loop does not need to call it.
        """
        self.precision.adjust_if_all_stepped(len(self._preparation.optimizers))
        return self.precision.scaler

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its accumulation window, so that step() takes effect.

        Loops that define their own accumulation windows can assign False, so that step() and zero_grad() have no effect
        until the next micro-batch begins. Assigning True undoes this.
        """
        windows = self._training_step.windows
        return windows.is_last and not windows.are_steps_disabled

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._training_step.windows.set_steps_enabled(value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of micro-batches per update, at least 1. An assigned value applies from the next micro-batch.

        Assign equal values on all ranks. An invalid value raises `ConfigError`.
        """
        return self._training_step.windows.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, num_steps: int) -> None:
        self._training_step.windows.set_num_steps(GradientAccumulationPlugin(num_steps=num_steps).num_steps)

    @property
    def num_updates(self) -> int:
        """Number of updates since training began, including those before a resume. Skipped steps do not count."""
        return self.clock.num_updates

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any prepared optimizer skipped its update in its last step() at the end of an accumulation window."""
        return any(optimizer.step_was_skipped for optimizer in self._preparation.optimizers)

    @property
    def non_finite(self) -> "FiniteGuard | None":
        """Guard that applies the policy `on_non_finite` and counts skipped updates. None without this policy."""
        return cast("FiniteGuard | None", self._training_step.guard.non_finite_guard)

    @property
    def spikes(self) -> "SpikeReport | None":
        """Guard that applies the policy `on_spike` and counts spikes and skipped updates. None without this policy."""
        return cast("SpikeReport | None", self._training_step.guard.spike_guard)

    # ---------------------------------------------------------------- data and metrics

    @property
    def num_data_shards(self) -> int:
        """Number of shards into which the data is split: the data-parallel degree of the layout.

        It equals `num_processes` under `ddp`, `fsdp`, `hsdp` and `ep`. It is smaller if several ranks share each sample,
        as under `tp`, `cp` and `pp`: `fsdp+tp=2` on 8 ranks has 4 data shards. The global batch of a prepared loader is
        its batch size times this number.
        """
        return self.strategy.data_shard.count

    @property
    def data_shard_index(self) -> int:
        """Index of the data shard that this process reads, from 0: its data-parallel rank.

        Ranks with equal indices must process equal samples. Use it with `num_data_shards` instead of `process_index` and
        `num_processes` in a script that splits data itself.

        Example::

            prompts = ["a", "b", "c", "d"]
            own_prompts = prompts[accelerator.data_shard_index :: accelerator.num_data_shards]
        """
        return self.strategy.data_shard.index

    def gather(self, tensor: T) -> T:
        """Concatenate tensors of all ranks along dimension 0, in rank order. Call it on every rank.

        The size of dimension 0 can differ between ranks. Samples that were repeated to complete a batch are included,
        with a warning the first time. If several ranks share a data shard, as under `tp`, the rows of each are included.
        `gather_for_metrics` returns each sample once.

        Args:
            tensor: Tensor, or nested containers of tensors. A 0-d tensor counts as one row.

        Returns:
            The structure of `tensor` with the concatenated tensors, on every rank and on the device of the inputs. With
            several ranks, they have no graph. With one rank, they are the inputs themselves, except that a 0-d tensor
            gets shape [1].

        Raises:
            CollectiveError: If ranks differ in structure, in dtype, or in any dimension except the first. Also if a rank
                calls something else or has ended.
            CallError: If a leaf is not a tensor. Inside a container, None is also allowed.
            StateError: If the process group has ended.

        Example::

            losses = accelerator.gather(loss.detach())  # shape [number of ranks]
        """
        warn_of_repeats(tensor, self._training_step.windows.reads.loader, self.num_processes)
        return super().gather(tensor)  # type: ignore[no-any-return]

    def gather_for_metrics(
        self, input_data: Tree, use_gather_object: bool = False, loader: PreparedLoader | None = None
    ) -> Tree:
        """Concatenate per-sample results of all ranks in data order, without padding or repeated samples.

        Call it on every rank. By default, a list with one item per sample is concatenated as a list. A list of tensors
        or containers counts as a structure, like a tuple, in two cases: its length differs from the batch size, or each
        item is a tensor with one row per sample.

        Args:
            input_data: Tuples and dicts of tensors or arrays with one row per sample, or lists with one item per
                sample.
            use_gather_object: Whether to treat every list as one item per sample, whatever it contains. Default: False.
            loader: Loader that the batch came from. None (the default): the innermost loader that is being iterated. If
                there is none, padding is unknown, and everything is concatenated.

        Returns:
            The concatenated results, in the structure of `input_data`, on every rank. Tensors stay on their device; with
            several ranks, they have no graph. Lists and arrays are sent by pickle.

        Raises:
            MetricError: If a value does not have one entry per sample. With several ranks, also if a list of tensors
                could be both: n tensors of n rows each for a batch of n samples.
            StateError: If `loader` is not being iterated.
            CollectiveError: If ranks differ in structure, in dtype, or in any dimension except the first.

        Example::

            for inputs, targets in eval_loader:
                predictions, targets = accelerator.gather_for_metrics((model(inputs), targets))
                metric.update(predictions, targets)
        """
        if loader is not None and loader not in self._run.windows.reads.active_loaders:
            raise StateError(
                "gather_for_metrics(loader=...) was called outside that loader's loop; call it for each batch, inside"
            )
        batch_loader = loader if loader is not None else self._training_step.windows.reads.loader
        if batch_loader is None:
            self._bypass_detector.search_for_unprepared_loader(self._training_step)
        return gather_for_metrics(input_data, batch_loader, self._shard_readers, use_gather_object)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that leaves out its first batches in the next epoch only.

        A run that continues with `resume` does not need it, because its loaders continue at the saved position. Skipped
        samples of a map-style dataset are not read. Those of an iterable dataset are read and dropped.

        Args:
            dataloader: Loader, prepared or not. The batches of an unprepared one are neither split among ranks nor moved.
            num_batches: Number of this rank's batches to skip. Default: 0.

        Returns:
            A new loader. `dataloader` itself skips nothing.

        Raises:
            DataError: If `num_batches` is negative or not an integer, or `dataloader` is not a DataLoader.
        """
        return skip_first_batches(dataloader, num_batches)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Return a context manager like torch's `Join`, for data that cannot be divided evenly among ranks.

        Prepared loaders already give every rank the same number of batches. Samples that are repeated to fill a batch
        have weight 0. The context therefore changes only the setting `even_batches` of prepared loaders.

        Args:
            joinables: Prepared models.
            even_batches: Value of `even_batches` in the context. None (the default): unchanged.

        Raises:
            StateError: If a model is not prepared.
        """
        for model in joinables:
            if not any(model is known for known in self._preparation.models):
                raise StateError(
                    f"join_uneven_inputs got a {type(model).__name__} that is not prepared; prepare it first"
                )
        with nullcontext() if even_batches is None else self._preparation.use_evenness(even_batches):
            yield

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """Settings for splitting, padding and moving batches of prepared loaders, as a read-only copy."""
        return self._preparation.loading

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether torchdata's StatefulDataLoader reads the data."""
        return self._preparation.loading.use_stateful_dataloader

    @property
    def even_batches(self) -> bool:
        """Whether incomplete last batches are filled with samples from the start of the data.

        An assigned value also applies to prepared loaders, from their next pass. Assign equal values on all ranks.
        """
        return self._preparation.loading.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._preparation.set_evenness(value)

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is the global batch size over all ranks."""
        return self._preparation.loading.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads the batches and sends them to all ranks. None has the effect of False."""
        return self._preparation.loading.dispatch_batches

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device asynchronously."""
        setting = self._preparation.loading.non_blocking
        return self.device.type != "cpu" if setting is None else setting

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of shuffled data depends only on the seed and the epoch."""
        return self._preparation.loading.is_seedable

    # ---------------------------------------------------------------- checkpoints: save, load, resume, stop

    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        metric: float | None = None,
        weights: str | None = None,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Commit a checkpoint of all prepared and registered objects. Call it on every rank.

        It contains models, optimizers, schedulers, positions of loaders, RNG states of all ranks, the loss scale and
        the number of updates. By default, the checkpoint is on disk when the method returns. If the process is killed
        earlier, the previous checkpoint is intact. Checkpoints beyond `ProjectConfiguration.total_limit` are deleted
        afterward.

        If only one rank calls it (`if accelerator.is_main_process:`), that rank warns once and writes everything except
        the other ranks' RNG states. For a sharded model, it raises `CheckpointError` instead.

        Args:
            output_dir: Directory or URL of the checkpoint, equal on all ranks. An existing checkpoint there is replaced.
                Ignored with automatic naming, which uses `<project_dir>/checkpoints/checkpoint_<n>`, with n counted
                from `ProjectConfiguration.iteration`. None (the default) requires automatic naming.
            safe_serialization: Ignored, because checkpoints contain safetensors and JSON, never pickles. Accepted for
                compatibility with Accelerate.
            blocking: Whether to wait until the checkpoint is on disk. False: return once the state is in host memory,
                and write the files in the background. The next save waits for these files. The next `accumulate`, save
                or `end_training` raises the errors of a background save. Default: True.
            metric: Value of the metric for this state, equal on all ranks, which `ProjectConfiguration(keep_best=...)`,
                `best_checkpoint` and `resume("best")` compare. None (the default), NaN or infinity: the checkpoint is
                never the best.
            weights: "huggingface" to add the full weights with config.json and related files, so that `from_pretrained`
                can open the directory. The directory itself then holds the first model's weights; subdirectories
                `model_1`, `model_2` and so on hold those of the other models. None (the default): only the checkpoint.
            save_model_func_kwargs: Ignored. Accepted for compatibility with Accelerate.

        Returns:
            The directory of the checkpoint. With `blocking=False`, it might not exist yet.

        Raises:
            CheckpointError: On every rank, if any rank could not write, or if another run saves into this directory.
                Also if this or an earlier background save failed, or an earlier run has used the next number. Previous
                checkpoints are intact.
            ConfigError: If an argument is unknown, or if no directory is given and automatic naming is off.
            StateError: If the process group has ended.

        Example::

            accelerator.save_state("checkpoints/step_100")  # in every process, not under is_main_process
        """
        check_save_arguments(save_model_func_kwargs)
        if weights not in (None, "huggingface"):
            raise ConfigError(f"save_state(weights={weights!r}); allowed: 'huggingface' or None")
        save_weights = None if weights is None else self._full_weights.save_all_pretrained
        return self._checkpoints.save(output_dir, blocking, metric, save_weights)

    def wait_for_save(self) -> None:
        """Wait until a background save is on disk, if there is one. Call it on every rank.

        Raises:
            CheckpointError: On every rank, if any rank could not write.
        """
        self._checkpoints.wait()

    def load_state(
        self,
        input_dir: str | Path | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        strict: bool = False,
        changed: str | Collection[str] | None = (),
        **load_model_func_kwargs: Any,
    ) -> RestoreResult:
        """Load a checkpoint into the prepared objects. Call it on every rank, after prepare.

        It restores what `save_state` stores, including RNG states and positions of loaders. Everything is checked on all
        ranks before anything is changed. The number of ranks and the layout may differ from those of the saved run.
        Gradients and unfinished accumulation windows are dropped. `resume` also finds the newest checkpoint and checks
        that the loop continues in the right epoch.

        Args:
            input_dir: Directory or URL of the checkpoint. None, with automatic naming: the newest valid checkpoint.
            load_kwargs: Ignored, because nothing is unpickled. Accepted for compatibility with Accelerate.
            strict: Whether to refuse a checkpoint saved with a different world size, layout, batch size, precision or
                version. False (the default): these differences are only listed in the result.
            changed: Intended differences from the checkpoint: "data", "schedule", "groups" or several of them. A
                difference of these kinds that is not named here raises `CheckpointError`:

                - "data": The data of a loader that was trained on has another number of samples. If named, the epoch
                  begins at its first batch.
                - "schedule": A scheduler counts its steps differently, or a LambdaLR's learning rate jumps after a
                  change of the world size. If the world size has not changed, a jump only leads to a warning.
                - "groups": Parameters are grouped differently. If named, each parameter keeps its state, and groups
                  that have changed keep the options that the script sets.

                None: only warn if data or schedules differ, and keep the position in the data. Default: ().
            load_model_func_kwargs: Ignored. `map_location` ("cpu" or "on_device") has no effect, because each state is
                loaded to its object's device. Accelerate's other arguments are accepted for compatibility.

        Returns:
            A printable summary, with the checkpoint's `folder` and a list of `differences` from this run.

        Raises:
            CheckpointError: On every rank, if the checkpoint is missing, damaged or does not fit. Also if it differs in
                a way that `strict` or `changed` does not allow. Nothing is changed then.
            ConfigError: If an argument or a name in `changed` is unknown, or if no directory is given and automatic
                naming is off.
            StateError: If only some ranks call it.

        Example::

            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            accelerator.load_state("checkpoints/step_100")
        """
        check_load_arguments({**(load_kwargs or {}), **load_model_func_kwargs})
        return self._checkpoints.load(input_dir, strict, changed)

    def resume(
        self,
        checkpoint: str | Path = "latest",
        *,
        strict: bool = False,
        run: str | None = None,
        changed: str | Collection[str] | None = (),
    ) -> RestoreResult | None:
        """Resume from a checkpoint if one exists. Call it on every rank, after prepare, and loop over `epochs(n)`.

        It restores what `save_state` stores, so that the run continues with the next batch of the interrupted epoch.
        Without a checkpoint, it changes nothing, so the same script starts and continues a run.

        Args:
            checkpoint: Directory or URL of a checkpoint, "latest" (the default) for the newest valid one in the
                project's directory, or "best" for `best_checkpoint`. Invalid ones are reported and skipped.
            strict: Whether to refuse a checkpoint saved with a different world size, layout, batch size, precision or
                version. False (the default): these differences are only listed in the result.
            run: ID of a run, as stored under "run" in manifests. "latest" and "best" consider only its checkpoints.
                None (the default): they consider the checkpoints of all runs, but "best" considers only those of the
                current run once it has saved or resumed.
            changed: Intended differences from the checkpoint: "data", "schedule", "groups" or several of them. Any
                other difference of these kinds raises `CheckpointError`. Exception: if the world size has not changed,
                a jump of the learning rate only leads to a warning. None: only warn if data or schedules differ.
                `load_state` describes the kinds. Default: ().

        Returns:
            A printable summary, with the checkpoint's `folder` and a list of `differences` from this run. None if
            "latest" or "best" found no checkpoint.

        Raises:
            CheckpointError: On every rank, if the checkpoint does not fit or differs in a way that `strict` or
                `changed` does not allow. Also if the given directory is missing or damaged, if all checkpoints are
                damaged, or if "best" finds only checkpoints without a metric.
            ConfigError: If "latest" or "best" is given without a project directory, or "best" without `keep_best` and
                automatic naming. Also if a name in `changed` is unknown.
            StateError: If only some ranks call it. The first `accumulate` of a loop that does not use `epochs` also
                raises it.

        Example::

            accelerator.resume()
            for epoch in accelerator.epochs(10):
                for batch in loader:
                    ...
        """
        return self._checkpoints.resume(checkpoint, strict, run, changed)

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Iterate over the numbers of the remaining epochs, from 0. After a resume, start with the interrupted epoch.

        A prepared loader then yields only the rest of that epoch. The iteration ends early if `on_non_finite="stop"` has
        stopped the training loaders. If all epochs are done, it yields nothing, with a warning after a resume.

        Args:
            num_epochs: Total number of epochs, including those before a resume: a whole number, or math.inf.

        Raises:
            ConfigError: If `num_epochs` is something else. The error is raised when the iteration begins.
        """
        return self._checkpoints.epochs(num_epochs)

    @property
    def best_checkpoint(self) -> Path | None:
        """Directory of the checkpoint with the best `save_state(metric=...)`, or None if none was saved with a metric.

        If several are equally good, it is the earliest of them. A background save counts once it is on disk. A run that
        has neither saved nor resumed considers the checkpoints of all runs in its directory.

        Raises:
            ConfigError: If the project has no `keep_best`, or checkpoints are not named automatically.
        """
        return self._checkpoints.best

    @property
    def save_iteration(self) -> int:
        """Number n of the next automatically named checkpoint, `checkpoint_<n>`."""
        return self._checkpoints.checkpoint_folder.iteration

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include objects in every later checkpoint, and restore them in every load.

        Call it on every rank, with the objects in an equal order in each run, before `resume`. Prepared objects are
        included anyway. An object that is registered already is not added again.

        Args:
            objects: Objects with state_dict() and load_state_dict(). State dicts must contain only values that can be
                stored without pickle: tensors, numbers, strings, None, and lists, tuples and dicts of these.

        Raises:
            ConfigError: If an object lacks one of the two methods. The message names the types of these objects.
        """
        self._checkpoints.register(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Register a hook that each save calls on every rank before anything is written.

        Args:
            hook: Called as `hook(models, weights, folder)`, with the prepared models, one dict of tensors by name per
                model, and the path of the folder as text. Files that it writes into the folder become part of the
                checkpoint. If the hook removes a model's entry from the list `weights`, that model is not saved.

        Returns:
            A handle whose `remove()` removes the hook.
        """
        return self._checkpoints.hooks.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Register a hook that each load calls on every rank before anything is loaded.

        Args:
            hook: Called as `hook(models, folder)`, with a list of the prepared models and the path of the checkpoint as
                text. If it removes a model from the list, that model is not loaded.

        Returns:
            A handle whose `remove()` removes the hook.
        """
        return self._checkpoints.hooks.add_load_hook(hook)

    @property
    def preempted(self) -> bool:
        """Whether all ranks have agreed to stop, so that the loop should save and end.

        True only with `Preemption(exits=False)`. Otherwise the process exits without help from the loop.
        """
        return self._checkpoints.is_preempted

    def check_preemption(self) -> bool:
        """Save a checkpoint and end the process if a signal or deadline requests the end of the run.

        With `Preemption(exits=False)`, the method only returns True, and the loop must save and stop. Only loops
        without a prepared loader need this method. Every rank must call it equally often.

        Returns:
            Whether all ranks have agreed to stop (`preempted`). Always False if preemption is disabled.

        Raises:
            Preempted: If a checkpoint was committed on all ranks. Do not catch it, so that it ends the process.
        """
        return self._checkpoints.check_preemption()

    def stop_watching(self) -> None:
        """Stop handling signals and deadlines, and release the checkpoint directory for other runs.

        Signals then have their usual effect again. Call it on every rank when the training is over.
        """
        self._checkpoints.stop_watching()

    def start_watching(self) -> None:
        """Handle signals and deadlines again after `stop_watching`, or after another Accelerator has taken them over.

        Call it on every rank. It does nothing if preemption is disabled, or if the calling thread is not the main
        thread, because Python handles signals only there.
        """
        self._checkpoints.start_watching()

    # ---------------------------------------------------------------- weights of models, in files and on the Hub

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return the model's parameters and persistent buffers by name, as full tensors.

        For a sharded model, every rank must call it. Rank 0 gets the full tensors, with those that were sharded in host
        memory, which must hold all of them. The other ranks get an empty dict. For any other model, each rank gets its
        own tensors, not copies, and no rank waits. `save_model` needs memory for only one full tensor at a time.

        Args:
            model: Prepared or unprepared model.
            unwrap: Whether to use the names of the unwrapped module. False: the names of the given object. Default:
                True.

        Raises:
            UnsupportedError: If the model is sharded and only some ranks call it.
            CheckpointError: If ranks hold different sharded tensors, or rank 0 fails to assemble them.
            StateError: If the model is sharded, and the process group has ended.
        """
        bare = unwrap_compiled(self.unwrap_model(model)) if unwrap else model
        return self._full_weights.state_dict(bare, is_bare=unwrap)

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Write an object to a file with torch.save or safetensors, on the main process only.

        The other ranks return at once and do not wait. Sharded tensors are written as they are; use `save_model` for
        the weights of a model.

        Args:
            obj: Object to write; a dict of tensors with `safe_serialization`.
            f: Path of the file. An existing file is replaced.
            safe_serialization: Whether to write safetensors instead of a pickle. Default: False.

        Raises:
            ConfigError: On the main process, if `safe_serialization` is True and `obj` is not a dict of tensors.
        """
        if self.is_main_process:
            save_object(obj, f, safe_serialization)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        weights: str | None = None,
    ) -> None:
        """Write the model's weights from the main process, as `model.safetensors` or as several files with an index.

        Call it on every rank; all ranks return after the files were written. For a sharded model, one full tensor at a
        time is sent to the main process. Any other model can also be saved under `if accelerator.is_main_process:`,
        without waiting for other ranks. Only weights are written, in their dtypes: no config and no optimizer state.

        Args:
            model: Prepared or unprepared model.
            save_directory: Directory or URL to write to, created if it does not exist. Earlier weights in it are
                replaced.
            max_shard_size: Largest size of a file, in bytes or as text such as "10GB" (the default).
            safe_serialization: Whether to write safetensors. False: write one `pytorch_model.bin` with torch.save, of
                any size. The full weights of a sharded model are then sent to the main process at once. Default: True.
            weights: Name of a `headway.ExponentialMovingAverage` of the model, such as "ema", whose averages are
                written in the model's dtypes. None (the default): the model's own weights.

        Raises:
            CallError: If `model` is not a module.
            ConfigError: If the model has no average of this name, or if its state dict holds something other than
                tensors and `safe_serialization` is True.
            CheckpointError: On the other ranks, if the model is sharded and the main process could not write.
            UnsupportedError: If the model is sharded and only some ranks call it.
            StateError: If the model is sharded, and the process group has ended.

        Example::

            accelerator.save_model(model, "weights")  # weights/model.safetensors
        """
        if not isinstance(model, torch.nn.Module):
            raise CallError(f"save_model() got a {type(model).__name__} first; write save_model(model, save_directory)")
        bare = unwrap_compiled(self.unwrap_model(model))
        use_weights: Callable[[], AbstractContextManager[Any]] = nullcontext
        if weights is not None:
            use_weights = extensions.load("feature", "average")(self._run.custom, bare, weights)
        with use_weights():
            self._full_weights.save(bare, save_directory, max_shard_size, safe_serialization)

    def push_to_hub(
        self,
        model: torch.nn.Module,
        repo_id: str,
        *parts: Any,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str = "Upload model",
        max_shard_size: int | str = "5GB",
    ) -> str | None:
        """Upload a model to the Hugging Face Hub, as a directory that `from_pretrained` can open.

        Call it on every rank. The main process uploads. If the upload fails, only the main process raises the error.

        Args:
            model: Prepared or unprepared model. If it has PEFT adapters, only these are uploaded.
            repo_id: "name" or "owner/name" of the repository, created if it does not exist.
            parts: A tokenizer, a processor, or other objects with `save_pretrained`.
            private: Whether a new repository is private. None (the default): the owner's settings decide.
            token: Access token. None (the default): the token of `hf auth login` or HF_TOKEN.
            revision: Branch, created if it does not exist. None (the default): the main branch.
            commit_message: Message of the commit. Default: "Upload model".
            max_shard_size: Largest size of a file, in bytes or as text such as "5GB" (the default).

        Returns:
            The URL of the commit on the main process, None on the others.

        Raises:
            OptionalDependencyMissing: If huggingface_hub is not installed.
            UnsupportedError: If the model is sharded and only some ranks call it.
        """
        bare = unwrap_compiled(self.unwrap_model(model))
        commit_options = {"private": private, "token": token, "revision": revision, "commit_message": commit_message}
        return self._full_weights.push_to_hub(bare, repo_id, parts, max_shard_size, commit_options)

    def stream_weights(
        self, model: torch.nn.Module, bucket_size: int | str = "64MiB", merge_adapters: bool = False
    ) -> "WeightBuckets":
        """Return an iterable over the model's weights, for an inference engine. Every rank must iterate over it.

        Rank 0 gets buckets of (name, full tensor) pairs. Names and values are those that `save_model` writes; of tied
        tensors, only one is included. A bucket is emptied when the next one is requested, so rank 0 needs memory only
        for one bucket and the tensor that is being assembled. Other ranks get buckets with the same names, whose
        tensors have no memory. If one rank fails and stops iterating, all ranks raise an error.

        Args:
            model: Prepared or unprepared model.
            bucket_size: Largest size of a bucket, in bytes or as text such as "64MiB" (the default). A larger tensor
                gets its own bucket.
            merge_adapters: Whether to yield weights with PEFT adapters merged into them, under the names of the model
                without adapters. Values are bitwise equal to those of `merge_and_unload`; the model itself does not
                change. False (the default): adapters are separate tensors.

        Returns:
            An iterable that can be iterated once. Its attribute `metadata` lists (name, dtype name, shape) of each
            tensor in advance.

        Raises:
            UnsupportedError: If the model is sharded and only some ranks call it, or if its adapters cannot be merged.
            ConfigError: If the state dict holds something other than tensors.
        """
        bare = unwrap_compiled(self.unwrap_model(model))
        tensors = self._full_weights.export(bare, "stream_weights")
        merged = bare if merge_adapters else None
        make_stream = extensions.load("feature", "stream_weights")
        stream: WeightBuckets = make_stream(tensors.items(), bucket_size, self.collectives, merged)
        return stream

    # ---------------------------------------------------------------- tracking: the run's files, log and trackers

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Directory of the run's files, with the naming and retention of checkpoints. Can be assigned."""
        return self._checkpoints.checkpoint_folder.project

    @project_configuration.setter
    def project_configuration(self, project: ProjectConfiguration) -> None:
        self._checkpoints.checkpoint_folder.project = project.freeze_copy()

    @property
    def project_dir(self) -> str | Path | None:
        """Directory of the run's files, or None if none was set."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | Path | None:
        """Directory for the run's log and for the files of trackers: `project_dir` unless set. None if neither is."""
        return self.project_configuration.logging_dir

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: TrackerKwargs | None = None) -> None:
        """Begin a run: open its log `<logging_dir>/<project_name>/log.jsonl` and start the trackers of `log_with`.

        Call it on every rank, before the first `log`. Without `project_dir` and `logging_dir`, only the trackers log.
        An existing log is continued. A run that was killed and resumed thus keeps its log and its runs in the trackers.
        A run in progress is ended first. If this Accelerator has already ended a run of this name, the run is reopened,
        and the log does not count another start.

        Args:
            project_name: Name of the directory, and of the project or experiment in the trackers.
            config: Configuration of the run: a mapping, a dataclass or an argparse.Namespace. None (the default):
                empty.
            init_kwargs: Options for the start of each tracker, by tracker name, such as `{"wandb": {"tags": ["first"]},
                "mlflow": {"run_name": "a"}}`. None (the default): no options.

        Raises:
            ConfigError: If the name is empty, absolute or contains "..", or if `config` has an unsupported type.
            TrackingError: If the directory holds a `log.jsonl` that is not a run's log.

        Example::

            accelerator = Accelerator(project_dir="runs", log_with="tensorboard")
            accelerator.init_trackers("first", config={"lr": 1e-3})
            accelerator.log({"train/loss": 0.5})
            accelerator.end_training()
        """
        self._recorder.start_run(project_name, config, init_kwargs)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: TrackerKwargs | None = None) -> None:
        """Log values of one step. Any rank may call it; only rank 0 writes the run's log.

        Before `init_trackers`, nothing is logged, with a warning. A value that cannot be logged never raises an error.
        Values are not averaged over ranks; use `reduce_mean` or `gather` before. A tensor on an accelerator makes the
        host wait for it.

        Args:
            values: Numbers, texts, 0-d tensors, numpy scalars, or mappings of these, by name. Names of nested mappings
                are joined with "/", and None is left out. Other values go to the trackers that accept them
                (`Tracker.takes`); the run's log then records only their type.
            step: Number of the step. None (the default): the number of updates so far.
            log_kwargs: Options for the `log` method of each tracker, by tracker name. None (the default): no options.

        Example::

            accelerator.log({"train/loss": loss, "lr": scheduler.get_last_lr()[0]})
        """
        self._recorder.log(values, step, log_kwargs)

    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: TrackerKwargs | None = None
    ) -> None:
        """Log images of one step, as PNG files in the run's directory and to the trackers that accept images.

        Args:
            values: Images by name: arrays, tensors or PIL images of shape [H, W], [H, W, C] or [C, H, W], where C is 1, 3
                or 4. Values are integers from 0 to 255, floats from 0 to 1, or booleans. Others are clipped, with one
                warning per name. A list, or an array of shape [N, H, W, C] or [N, C, H, W], contains several images.
            step: Number of the step. None (the default): the number of updates so far.
            log_kwargs: Options for the `log_images` method of each tracker, by tracker name. None (the default): no
                options.

        Raises:
            TrackingError: If an image has an unsupported shape or type. The message contains its name.
        """
        self._recorder.log_images(values, step, log_kwargs)

    def log_artifact(
        self,
        path: str | Path,
        name: str | None = None,
        step: int | None = None,
        log_kwargs: TrackerKwargs | None = None,
    ) -> None:
        """Log a file or directory that belongs to the run. It is not moved; trackers that store artifacts copy it.

        Before `init_trackers`, nothing is logged, with a warning.

        Args:
            path: Path of the file or directory. Rank 0 must be able to read it.
            name: Name of the artifact. None (the default): the last part of the path.
            step: Number of the step. None (the default): the number of updates so far.
            log_kwargs: Options for the `log_artifact` method of each tracker, by tracker name. None (the default): no
                options.

        Raises:
            TrackingError: On rank 0 and on other ranks with trackers, if the path does not exist.
        """
        self._recorder.log_artifact(path, name, step, log_kwargs)

    def log_event(self, name: str, step: int | None = None, **details: Any) -> None:
        """Record an event in the run's log. Any rank may call it; only rank 0 writes.

        Do nothing if `init_trackers` has not been called or the run has ended.

        Args:
            name: Name of the event, such as "evaluation".
            step: Number of the step. None (the default): the number of updates so far.
            details: Values that describe the event, by name. The run's log converts them to JSON.
        """
        self._recorder.log_event(name, step, details)

    @property
    def trackers(self) -> list[Tracker]:
        """Trackers of `log_with` that this rank uses and that have not failed. Empty before `init_trackers`.

        Ranks other than 0 use only trackers whose `main_process_only` is False.
        """
        return self._recorder.trackers

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by its name.

        Args:
            name: Name as in `log_with`.
            unwrap: Whether to return the package's own object: a SummaryWriter, W&B's run or MLflow's run. Default:
                False.

        Returns:
            The tracker. If this rank has no such tracker, or the tracker has failed, the result is a placeholder. It
            is false in a condition, accepts every call and does nothing.

        Raises:
            ConfigError: If `log_with` contains no tracker of this name.
        """
        return self._recorder.get_tracker(name, unwrap)

    def end_trackers(self, summary: Mapping[str, Any] | None = None) -> None:
        """End the run that `init_trackers` began, if any: close its log and its trackers. The process continues.

        Args:
            summary: Values for the log's last line, in addition to the number of updates and the duration in seconds.
                None (the default): no other values.
        """
        self._recorder.end_run(summary)

    # ---------------------------------------------------------------- memory, forecasts and measurements

    def checkpoint_activations(
        self,
        model: torch.nn.Module,
        every: int = 1,
        policy: str | Callable[..., Any] = "recompute",
        offload: bool = False,
        blocks: Sequence[Any] = (),
    ) -> torch.nn.Module:
        """Enable activation checkpointing in a model, and return the model.

        The model's blocks then drop their activations and recompute them in backward. An earlier call for this model is
        undone first.

        Args:
            model: Prepared or unprepared model, changed in place.
            every: Number n, to checkpoint only every n-th block. 1 (the default): all blocks.
            policy: Activations that a block keeps: "recompute" (the default: none), "keep_matmul", "keep_attention",
                "keep_all" or a callable. `headway.ActivationCheckpointing` describes them, and enables activation
                checkpointing for all models in prepare().
            offload: Whether to move kept activations to host memory. Has an effect only on an accelerator. Default:
                False.
            blocks: Classes, class names or module names of the blocks. Empty (the default): modules that are repeated
                in the module tree.

        Raises:
            ConfigError: If the policy is unknown or no blocks are found.
        """
        plan = ActivationCheckpointing(every, policy, offload, tuple(blocks))
        count = extensions.load("feature", "checkpoint_activations")(model, plan, self.device)
        log.info("activations of %d blocks of %s are recomputed in backward", count, type(model).__name__)
        return model

    def keep_activations(self, model: torch.nn.Module) -> torch.nn.Module:
        """Disable the activation checkpointing that `checkpoint_activations` enabled, and return the model.

        Args:
            model: Model that was passed to `checkpoint_activations`. Any other model is left unchanged.
        """
        extensions.load("feature", "keep_activations")(model)
        return model

    def forecast(
        self,
        model: torch.nn.Module,
        batch: Tree,
        *,
        optimizer: "torch.optim.Optimizer | MakeOptimizer | None" = None,
        loss: "Loss | None" = None,
        forward: "Callable[[Any, Any], torch.Tensor] | None" = None,
        budget: int | str | None = None,
        largest: bool = True,
        batch_fn: Callable[[int], Tree] | None = None,
        max_norm: float | None = None,
        device: str | None = None,
        loop: "str | Loop" = "plain",
    ) -> "Forecast":
        """Forecast the memory of one training step on this device, and the largest batch that fits (docs/forecast.md).

        A copy of the model on the meta device is traced with this Accelerator's precision, accumulation and activation
        checkpointing. The model, its optimizer, RNG states and hooks do not change. Each process forecasts for itself.

        Args:
            model: Prepared or unprepared model.
            batch: One real micro-batch, on any device. It is passed as `model(**batch)`, `model(batch[0])` or
                `model(batch)`.
            optimizer: Prepared or unprepared optimizer of the model, or a function that creates one from parameters.
                None (the default): no update is forecast.
            loss: Function of the model's outputs and the batch's targets. None (the default): the model returns the
                loss, or an object with an attribute `loss`.
            forward: Function of the model and the batch that returns the loss, for any other way to call the model.
                Replaces `loss`. None (the default): the model is called as described under `batch`.
            budget: Memory limit of the process, in bytes or as text such as "24GiB". None (the default): the memory
                that is available on the device. A CPU has no limit except that of the address space (`ulimit -v`).
                Without a limit, no largest batch is searched for.
            largest: Whether to search for the largest batch within the budget. Default: True.
            batch_fn: Function that creates a micro-batch with a given number of samples. None (the default): rows of
                `batch` are repeated or left out.
            max_norm: Norm to which gradients are clipped. None (the default): no clipping.
            device: Name of a device that docs/forecast.md lists. None (the default): this process's device.
            loop: Training loop, which determines how long outputs and gradients stay in memory (see
                `headway.forecast`). Default: "plain", a loop whose variables keep the outputs and the loss until they
                are assigned again.

        Returns:
            The forecast.

        Raises:
            ConfigError: If an argument is invalid.
            DataError: If the batch has no rows.
            LossError: If there is no loss, or the loss has no gradient.
            UnsupportedError: If a model is sharded or compiled, or if the training step cannot be traced. The message
                names the operation and the line in your code.

        Example::

            print(accelerator.forecast(model, batch, optimizer=optimizer, budget="24GiB"))
        """
        from headway.core.training.forecast_types import ForecastRequest, TrainingSetup

        request = ForecastRequest(
            model=model,
            batch=batch,
            optimizer=optimizer,
            loss=loss,
            forward=forward,
            budget=budget,
            largest=largest,
            batch_fn=batch_fn,
            max_norm=max_norm,
            device=device,
            loop=loop,
        )
        setup = TrainingSetup(
            run=self._run,
            recompute=partial(
                extensions.load("feature", "repeat_checkpointing"),
                plan=self.options.checkpointing,
                prepared_models=self._preparation.models,
            ),
        )
        forecast: Forecast = extensions.load("feature", "forecast")(request, setup)
        return forecast

    def verify(self, function: Callable[..., Any], args: Sequence[Any] = (), **options: Any) -> "Proofs":
        """Check a training function before its long run, and print a table of the checks (docs/verify.md).

        Each check is called a proof. The function must create its own Accelerator and train, as for
        `notebook_launcher`. It runs several times for a few updates, each time in new processes: in a single process,
        in several processes, and with a kill and a resume. The caller's objects do not change.

        Args:
            function: Function to check. It may be defined in a notebook cell.
            args: Positional arguments of the function. Default: none.
            options: Keyword arguments:

                - num_processes: Number of processes in the runs that are compared with the single-process run, at least
                  2. Default: 2.
                - strategy: Layout, such as "fsdp", of one more run with `num_processes` processes. Default: no such
                  run.
                - only, skip: Names of the proofs to run, and of those to leave out. Default: run all.
                - updates: Number of optimizer updates in each run. Default: 6.
                - time_limit: Number of seconds that each run may go without a batch or an update. In all, a run may
                  take three times as long plus 20 s. Default: 60.

        Returns:
            The status of each proof. Its attribute `passed` is True if none failed and at least one passed.

        Raises:
            ConfigError: If an argument is invalid, or if this process is one of several ranks.
            HeadwayError: If the function fails, or if it makes no update in the single-process run.
            OptionalDependencyMissing: If cloudpickle is not installed.

        Example::

            assert accelerator.verify(train, (1e-3,), only=["resume", "samples"]).passed
        """
        proofs: Proofs = extensions.load("feature", "verify_function")(self._run, function, args, **options)
        return proofs

    def free_memory(self, *objects: Any) -> list[None]:
        """Release all prepared objects, collect garbage and empty the device's cache. `clear` is another name for it.

        Ranks do not wait for each other. The Accelerator can prepare other objects afterward. Memory is freed only when
        your own variables no longer refer to the objects. A released model is an ordinary module again, without autocast.

        Args:
            objects: Objects to which your own variables refer. Only the number of objects matters.

        Returns:
            A list with one None per object, to assign to your variables so that they no longer refer to the objects. It
            is a list even for one object.

        Example::

            model, optimizer = accelerator.free_memory(model, optimizer)
        """
        self._preparation.release()
        result = [None] * len(objects)
        del objects
        self.runtime.hardware.empty_cache()
        return result

    clear = free_memory

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context manager that runs torch's profiler (`torch.profiler.profile`). `as` assigns the profiler.

        On exit, each rank writes `profile_<rank>.json`, a trace for Perfetto or chrome://tracing, and a table
        `profile_<rank>.txt` to the handler's `output_trace_dir`. Without this directory, nothing is written. With
        `schedule_option`, call `profiler.step()` after each step. Ranks may use it independently of each other.

        Args:
            profile_handler: Settings of the profiler. None: the `ProfileKwargs` of `kwargs_handlers`, or their
                defaults.

        Raises:
            ConfigError: On entering the context, if the handler names an unknown activity.

        Example::

            with accelerator.profile(ProfileKwargs(output_trace_dir="traces")) as profiler:
                train()
        """
        profile_block = extensions.load("feature", "profile")
        block: AbstractContextManager[Any] = profile_block(profile_handler or self.options.profile, self.runtime.rank)
        return block

    @cached_property
    def throughput(self) -> "ThroughputMeter":
        """Throughput meter of the training loop (docs/throughput.md).

        It begins to measure when this property is first read, so read it before the loop, on every rank. Its method
        `values()` returns samples and tokens per second since the last call.
        """
        make_meter = extensions.load("feature", "throughput")
        meter: ThroughputMeter = make_meter(self._training_step, self._run.events, self.clock, self.runtime)
        return meter

    # ---------------------------------------------------------------- processes (see also `RankAware`)

    def end_training(self) -> None:
        """End the training: wait for all ranks, release prepared objects, and end the process group and the trackers.

        Call it on every rank, once, after the last save. If a script does not call it, the process group and trackers
        end when the process exits. Only a process group that Headway started is ended. A second call has no further
        effect. Afterwards ranks can no longer communicate, and calls that need other ranks raise `StateError`. `print`,
        `unwrap_model` and `save` still work, and `log` only warns. `save_model` and `get_state_dict` still work for
        models that are not sharded.

        Raises:
            CheckpointError: If a background save failed.
        """
        self.wait_for_save()
        if not self.collectives.has_ended:
            self.wait_for_everyone()
        process.reset()
        self.end_trackers()  # last, so that no rank waits for another rank's slow tracker
