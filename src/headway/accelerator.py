"""The Accelerator: a table of contents, where each method delegates to the part that does the work."""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, overload

import torch
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle
from typing_extensions import TypeVarTuple, Unpack

from headway.checkpoint.resume.checkpoints import (
    Checkpoints,
    LoadHook,
    SaveHook,
    check_load_arguments,
    check_save_arguments,
)
from headway.checkpoint.resume.comparison import Restored
from headway.checkpoint.resume.run import RunState
from headway.common import callsite, scope
from headway.common.optional import Later
from headway.config.engines import (
    ActivationCheckpointing,
    AutocastKwargs,
    Backend,
    Float8Options,
    ProfileKwargs,
    TorchDynamoPlugin,
    collect_options,
    compiler,
)
from headway.config.layout_choice import RequestedLayout
from headway.config.load import UNSET, run_setting
from headway.config.parallelism import LayoutPlugin
from headway.config.run import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    Preemption,
    ProjectConfiguration,
    caller,
    is_automatic,
    loading_settings,
    preemption_settings,
    project_settings,
    windows,
)
from headway.config.values import known_keywords
from headway.data.build import skip_first_batches
from headway.data.loader import LoaderEvents, PreparedLoader
from headway.data.sampling.order import LoadingRules
from headway.errors import ConfigError, StateError, UnsupportedError
from headway.forecasting import is_forecast
from headway.launch import watch
from headway.log import get_logger, is_debugging
from headway.memory.oom import EmergencyReserve, is_out_of_memory
from headway.precision import float8
from headway.precision.mixed import build_precision, halve_embeddings
from headway.runtime import events, process, pulse
from headway.runtime.collectives.checked import Collectives
from headway.runtime.collectives.ranks import RankAware, generator_names
from headway.runtime.collectives.tree import Tree
from headway.runtime.control_plane.attendance import Attendance
from headway.runtime.control_plane.control import note_progress
from headway.runtime.seed import RNGReader
from headway.strategies.build import choose_strategy
from headway.strategies.deepspeed import plugin as deepspeed
from headway.tracking.base import Tracker
from headway.tracking.record import RunRecorder, TrackerKwargs
from headway.training.checks.bypass import BypassDetector
from headway.training.checks.replicas import ReplicaCheck, RowCountCheck
from headway.training.hooks import NonFiniteNotice, RunParts, StepHooks
from headway.training.local_sgd import LocalTraining
from headway.training.metrics import gather_for_metrics, look_for_repeats
from headway.training.prepared.objects import PreparedObjects
from headway.training.prepared.optimizer import PreparedOptimizer
from headway.training.prepared.prepare import Preparation, Wrappers
from headway.training.prepared.registry import AcceleratorRegistry
from headway.training.prepared.scheduler import PreparedScheduler, SchedulerStepRule, choose_rule
from headway.training.run import AcceleratorRun
from headway.training.step import MicroBatch, StepGuard, TrainingStep, WholeStep
from headway.training.weights import WholeWeights
from headway.training.windows import AccumulationWindows, LossPolicy, UpdateClock
from headway.weights.export import save_object

# What only some runs use is loaded by its first use: a script that does without starts the sooner.
if TYPE_CHECKING:
    from headway.forecasting.answer import Forecast
    from headway.forecasting.tracing.step import Loop, Loss, MakeOptimizer
    from headway.memory import report as memory_report
    from headway.training import forecast as forecasts
    from headway.training import throughput, weight_stream
    from headway.training.checks import finite
    from headway.training.checks import spikes as spike_checks
    from headway.training.replay import step as replay
    from headway.training.transforms import activation_checkpointing as recompute
    from headway.training.transforms import compiling
else:
    compiling = Later("headway.training.transforms.compiling")
    memory_report = Later("headway.memory.report")
    recompute = Later("headway.training.transforms.activation_checkpointing")
    replay = Later("headway.training.replay.step")
    throughput = Later("headway.training.throughput")
    weight_stream = Later("headway.training.weight_stream")
    finite = Later("headway.training.checks.finite")
    spike_checks = Later("headway.training.checks.spikes")
    forecasts = Later("headway.training.forecast")

log = get_logger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=torch.nn.Module)
Ts = TypeVarTuple("Ts")


@known_keywords
class Accelerator(RankAware):
    """Runs a PyTorch loop on whatever the launcher started: one process or many, any device, any precision.

    Args:
        device_placement: move models and batches to `device`.
        split_batches: short for `DataLoaderConfiguration(split_batches=True)`.
        mixed_precision: "no" (the default), "bf16", "fp16" or "fp8" (float8 by torchao, `Float8Options`).
        gradient_accumulation_steps: micro-batches per update; default 1.
        cpu: compute on the CPU even where there is an accelerator.
        dataloader_config: how prepared loaders split, pad and move batches.
        fsdp_plugin, torch_tp_plugin, parallelism_config: the layout and its options by Accelerate's names; `strategy` says it in
            a word.
        deepspeed_plugin: DeepSpeed's settings (`headway.DeepSpeedPlugin`); `deepspeed_plugins` by name: one only.
        megatron_lm_plugin: planned; anything but None is an error that says what to do today.
        gradient_accumulation_plugin: the same and more about windows; not together with the steps.
        step_scheduler_with_optimizer: a schedule's step() follows its optimizer's updates; False: each call is a tick.
        adjust_scheduler_to_accumulation: schedules were counted in micro-batches.
        scheduler_ticks: "updates": schedules were counted in real updates, one tick each. None: by the rule of
            `headway.training.prepared.scheduler`. An object with `name`, `reason` and `ticks(window_length)` is a rule of your own.
        global_batch_size: samples per update; derives the accumulation from ranks and the loader's batch size.
        rng_types: streams to make equal over ranks when a loader begins: "generator" (default), "torch", "python",
            "numpy", "device" (or its kind, "cuda" say).
        kwargs_handlers: options of the engines underneath, one each of `headway.config.engines`.
        dynamo_backend: compile models at prepare() by torch.compile with this backend, "inductor" say; None or "no": do not.
        dynamo_plugin: the same with its settings, a `TorchDynamoPlugin`.
        project_dir: where the run keeps files; or a `project_config`.
        loss_policy: how losses are divided; default: the exact mean over the window and all ranks.
        microbatching: "auto": where memory runs out, the batch is run again in smaller pieces, on all ranks and with the
            same result; loops then use `forward_backward` or `microbatches`. None: batches stay whole.
        on_non_finite: "skip", "stop", "raise" or "explain" for an update whose loss or gradients are nan or infinite; or a
            `NonFinitePolicy`. None: one warning for the first such loss, and training continues.
        log_with: trackers that the run's log is fed to: "tensorboard", "wandb", "mlflow", "all" (that are installed), an
            instance of `headway.Tracker`, or a list of these.
        preemption: a signal or deadline makes all ranks save and end with exit code 75 (`Preemption`). True: as that class
            says; None: the same where checkpoints are named automatically; False: signals end the process as ever.
        strategy: the layout: "ddp" (the default: a replica per process), "fsdp", "hsdp=8", "tp", "fsdp+tp=2" ...
            (`headway.config.mesh`); "zero1", "zero2", "zero3", "deepspeed": by DeepSpeed.
        on_spike: "skip" or "go_back" for an update whose loss or gradient norm is far above those of recent updates; or a
            `SpikePolicy`. None: no check.

    Raises:
        ConfigError: contradicting or impossible settings.
        LaunchError: the launcher promised another number of processes than came.
        DeviceUnavailable: an accelerator was asked for that this process cannot use.
        UnsupportedError: a layout that is not there yet.
    """

    _refuses_drift: ClassVar[bool] = True
    """Are ranks whose models or optimizers are not alike an error? For a class that may only say so."""
    _wrappers: ClassVar[Wrappers] = Wrappers()
    _windows: ClassVar[type[AccumulationWindows]] = AccumulationWindows

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: deepspeed.DeepSpeedPlugin | None = None,
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
        deepspeed_plugins: "Mapping[str, deepspeed.DeepSpeedPlugin] | None" = None,
        parallelism_config: LayoutPlugin | None = None,
        # Accelerate's end here; what follows is Headway's own.
        adjust_scheduler_to_accumulation: bool = False,
        scheduler_ticks: str | SchedulerStepRule | None = None,
        global_batch_size: int | None = None,
        loss_policy: LossPolicy | None = None,
        microbatching: str | None = None,
        on_non_finite: "str | finite.NonFinitePolicy | None" = None,
        preemption: Preemption | bool | None = None,
        strategy: str | None = None,
        on_spike: "str | spike_checks.SpikePolicy | None" = None,
    ) -> None:
        scope.own(callsite.Hook).put_in(lambda: not is_debugging())
        origin = caller()
        dynamo = compiler(dynamo_backend, dynamo_plugin)
        options = collect_options(kwargs_handlers)
        engine = deepspeed_plugin or deepspeed_plugins
        plugins = (fsdp_plugin, parallelism_config, torch_tp_plugin, megatron_lm_plugin)
        requested = RequestedLayout(strategy, origin, *plugins, uses_deepspeed=engine is not None)
        on_cpu, _ = run_setting("cpu", UNSET if cpu is None else cpu, False, code_origin=origin)
        group = options.process_group
        runtime = process.start(cpu=on_cpu, backend=group.backend, init_method=group.init_method, timeout=group.timeout)
        watch.start()
        super().__init__(runtime, Collectives(runtime))
        asked = str(mixed_precision) if mixed_precision else UNSET
        chosen = deepspeed.resolve(requested, options, runtime, engine)
        self.options = options = chosen.options
        zero = chosen.deepspeed
        self.mixed_precision, _ = run_setting("mixed_precision", asked, deepspeed.precision(zero), code_origin=origin)
        steps = deepspeed.steps(zero, gradient_accumulation_steps, gradient_accumulation_plugin)
        plugin = windows(steps, gradient_accumulation_plugin, global_batch_size, origin)
        cuts_batches = is_automatic(microbatching, plugin)
        self.strategy = choose_strategy(chosen, self.collectives, self.mixed_precision, cuts_batches)
        scaling = deepspeed.unscaled(zero, options)
        self.precision = build_precision(self.mixed_precision, runtime.hardware, scaling, self.strategy)
        self.global_batch_size = global_batch_size
        self.clock = UpdateClock()
        self._events = LoaderEvents()
        neighbours = runtime.scope.own(AcceleratorRegistry)
        divides = loss_policy or LossPolicy()
        self._training_step = self._build_step(plugin, divides, (on_non_finite, on_spike), cuts_batches, neighbours)
        self.local_training = LocalTraining(self._training_step.windows)
        loading = loading_settings(dataloader_config, split_batches)
        more_updates = 1 if loading.split_batches else self.strategy.data_shard.count
        rule = choose_rule(scheduler_ticks, adjust_scheduler_to_accumulation or plugin.adjust_scheduler, more_updates)
        self._preparation = Preparation(
            self._training_step,
            neighbours,
            loading,
            device_placement,
            rule,
            step_scheduler_with_optimizer,
            tuple(generator_names(rng_types or ())),
            global_batch_size,
            partial(self._transforms, options.checkpointing, dynamo),
            self._loading_rules(),
            self._wrappers,
        )
        self._start_records(log_with, project_settings(project_dir, project_config), preemption)
        self._run = AcceleratorRun(
            self.collectives,
            self.mixed_precision,
            weakref.ref(self._training_step.windows),
            plugin.adjust_scheduler,
            chosen,
            dynamo,
            getattr(self.strategy, "mesh", None),
        )
        self._take_part(runtime)

    @property
    def _readers(self) -> Collectives:
        return self.strategy.data_group

    def _take_part(self, runtime: process.ProcessRuntime) -> None:
        """Be known to this process: what ends with it is let go of then."""
        runtime.scope.own(Attendance).start(runtime)
        process.at_end(self._preparation.release)
        self._whole_weights = WholeWeights(self.strategy, runtime)
        runtime.scope.own(RNGReader).index = self.strategy.data_shard.index
        self._bypasses = runtime.scope.own(BypassDetector)
        self._membership = self._bypasses.join(self._training_step)
        scope.own(EmergencyReserve).fill()
        scope.own(callsite.Hook).add(_use_of_memory)

    def _build_step(
        self,
        plugin: GradientAccumulationPlugin,
        policy: LossPolicy,
        guards: "tuple[str | finite.NonFinitePolicy | None, str | spike_checks.SpikePolicy | None]",
        cuts_batches: bool,
        neighbours: AcceleratorRegistry,
    ) -> TrainingStep:
        prepared, runtime = PreparedObjects(self.strategy.at_rest), self.runtime
        windows = self._windows(
            plugin.num_steps,
            self._events,
            plugin.sync_with_dataloader,
            plugin.sync_each_batch,
            partial(neighbours.loader_beside, prepared),
        )
        is_watched = pulse.is_watched() or runtime.world_size > 1
        moments = StepHooks(begun=[note_progress] if is_watched else [], phases=scope.own(events.Listeners).to_phases)
        parts = RunParts(windows, self.clock, prepared, self.strategy, self.precision, self._events, runtime, moments)
        on_non_finite, on_spike = guards
        if on_spike is not None:
            guard: StepGuard = spike_checks.SpikeGuard(on_spike, on_non_finite, parts, lambda: self._run_state)
        elif on_non_finite is not None:
            guard = finite.FiniteGuard(on_non_finite, parts)
        else:
            guard = StepGuard(parts, None if is_forecast() else NonFiniteNotice(windows, self.clock, runtime))
        if runtime.world_size > 1:
            moments.begun.append(runtime.scope.own(Attendance).count_micro_batch)
            self._compare_ranks(parts, cuts_batches, type(policy) is LossPolicy)
        return replay.PieceStep(parts, policy, guard) if cuts_batches else WholeStep(parts, policy, guard)

    def _compare_ranks(self, parts: RunParts, cuts_batches: bool, weighs: bool) -> None:
        moments, rows = parts.moments, RowCountCheck(parts.windows)
        replicas = ReplicaCheck(parts.prepared, self.strategy, rows, self._refuses_drift)
        moments.reduced.append(replicas.note)
        # In pieces, an update may be tried several times: ranks are together right after they have reduced gradients.
        (moments.reduced if cuts_batches else moments.before_update).append(replicas.check)
        if self.strategy.data_shard.count > 1 and weighs:
            moments.before_forward.append(rows.see)
            moments.unweighed.append(rows.unweighed)

    def _loading_rules(self) -> LoadingRules:
        """What loaders go by; for a class that loads in another way."""
        return LoadingRules()

    def _last_save_hook(self) -> SaveHook | None:
        """What is called after all save hooks; for a class that writes more into a checkpoint."""
        return None

    def _transforms(
        self, plan: ActivationCheckpointing | None, dynamo: TorchDynamoPlugin, learns: bool
    ) -> tuple[Callable[[torch.nn.Module], Any], ...]:
        """What is done to a model before it is wrapped: to float8, then checkpointed, then compiled."""
        made: list[Callable[[torch.nn.Module], Any]] = []
        if self.mixed_precision == "fp8":
            ranks = self.collectives if learns else None
            made.append(partial(float8.convert_model, options=self.options.float8 or Float8Options(), ranks=ranks))
        if self.options.autocast.half_residual:
            made.append(halve_embeddings)
        if plan is not None and learns:
            made.append(partial(recompute.checkpoint_activations, plan=plan, device=self.device))
        if dynamo.compiles:
            is_gathered = learns and not self.strategy.capabilities.lone_forward
            compiles = partial(compiling.compile_model, plugin=dynamo, device=self.device, is_gathered=is_gathered)
            made.append(partial(compiles, accumulates=self.gradient_accumulation_steps > 1))
        return tuple(made)

    def _start_records(
        self, log_with: Any, project: ProjectConfiguration, preemption: Preemption | bool | None
    ) -> None:
        run_state = RunState(
            self.runtime,
            self.collectives,
            self.strategy,
            self.precision,
            self._preparation,
            self._training_step,
            self.clock,
            self.local_training,
        )
        self._run_state = run_state
        self._checkpoints = Checkpoints(
            run_state, project, self._training_step.moments, self.collectives, self._last_save_hook
        )
        self._checkpoints.watch(preemption_settings(preemption, project), is_asked_for=bool(preemption))
        place = self._checkpoints.place
        self._record = RunRecorder(
            self.runtime,
            lambda: place.project,
            log_with,
            self.clock,
            run_state.notes,
            place.has_any,
            lambda: self._training_step.grad_norm,
        )

    # ---------------------------------------------------------------- what Accelerate's has besides

    @cached_property
    def _members_of_accelerate(self) -> Any:
        """What only scripts written for Accelerate read; nothing below knows that package, which is loaded by its first use."""
        return import_module("headway.compat.accelerate.members").Members(self)

    if not TYPE_CHECKING:  # a type checker goes on to report what does not exist

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # asked for by copies and the like
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self._members_of_accelerate, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._members_of_accelerate)})

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
        """Make models, optimizers, loaders and schedules ready, in any order; returns them in the order given.

        The model comes back as the same object. One argument comes back alone, several as a tuple; None passes through;
        what is prepared already is returned as it is, and so is an object of another kind, with a warning. For type checkers,
        each keeps the type that it came with: a prepared optimizer, loader or schedule has its attributes, too.

        Args:
            objects: models, optimizers, DataLoaders, schedules.
            device_placement: one truth value for each object: move it to the device?
            strict: an object of another kind is an error.

        Raises:
            PrepareError: objects that do not belong together, or with `strict` one of another kind.
        """
        prepared = self._preparation.prepare(objects, device_placement, strict)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare one model; with `evaluation_mode` it gets no engine for gradients."""
        prepared = self._preparation.model(model, device_placement, evaluation_mode)
        self._preparation.adopt()
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Prepare one optimizer; its state goes where the parameters are, whatever `device_placement` says."""
        prepared = self._preparation.optimizer(optimizer)
        self._preparation.adopt()
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: None = None
    ) -> PreparedLoader:
        """Prepare one loader.

        Raises:
            UnsupportedError: a function that slices dispatched batches: they are cut by rows.
        """
        if slice_fn_for_dispatch is not None:
            raise UnsupportedError(
                "slice_fn_for_dispatch is not served: dispatched batches are cut by rows; leave it out"
            )
        return self._preparation.loader(data_loader, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepare one schedule; its optimizer must be prepared."""
        return self._preparation.scheduler(scheduler)

    def unwrap_model(self, model: M, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> M:
        """The user's own module: what prepare() gave back is that object already.

        Args:
            model: prepared or not; a DistributedDataParallel instance of the user's own is opened too.
            keep_fp32_wrapper: accepted for the name's sake: outputs are never converted.
            keep_torch_compile: False: also take off the wrapper that torch.compile(model) made. A model that was compiled in place,
                as prepare() does it, has none and comes back as it is.
        """
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        own: Any = self.strategy.unwrap(model)
        return own if keep_torch_compile else getattr(own, "_orig_mod", own)  # type: ignore[no-any-return]

    def checkpoint_activations(
        self,
        model: torch.nn.Module,
        every: int = 1,
        policy: str | Callable[..., Any] = "recompute",
        offload: bool = False,
        blocks: Sequence[Any] = (),
    ) -> torch.nn.Module:
        """Let the model's blocks drop their activations and compute them again in backward; returns the same object.

        Args:
            model: prepared or not.
            every: every n-th block; 1: all of them.
            policy: what a block keeps: "recompute", "keep_matmul", "keep_attention", "keep_all" or a callable; see
                `headway.ActivationCheckpointing`, which does the same at prepare() for all models.
            offload: keep what is kept in host memory, on an accelerator.
            blocks: classes, class names or module names; none: what is repeated in the module tree.

        Raises:
            ConfigError: an unknown policy, or no blocks found.
        """
        count = recompute.checkpoint_activations(
            model, ActivationCheckpointing(every, policy, offload, tuple(blocks)), self.device
        )
        log.info("activations of %d blocks of %s are computed again in backward", count, type(model).__name__)
        return model

    def keep_activations(self, model: torch.nn.Module) -> torch.nn.Module:
        """Undo `checkpoint_activations`; returns the same object."""
        recompute.keep_activations(model)
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
        """Forecast the memory that a training step of the model takes here, and the largest batch that fits (docs/forecast.md).

        A copy without values is traced with this Accelerator's precision, accumulation and activation checkpointing. The model, its
        optimizer, RNG states and hooks stay as they are. Each process answers for itself.

        Args:
            model: prepared or not.
            batch: one real micro-batch, on any device; called as `model(**batch)`, `model(batch[0])` or `model(batch)`.
            optimizer: the model's, prepared or not, or a function that makes one from parameters; None: no update is forecast.
            loss: a function of the model's outputs and the batch's targets; None: the model returns the loss, or an object that has
                it as `loss`.
            forward: a function of the model and the batch that returns the loss, for any other way to call the model; instead of
                `loss`.
            budget: bytes, or text such as "24GiB", that the process may take; None: what the device has left for it. A CPU has no
                limit except that of the address space (`ulimit -v`); without one, there is no search for the largest batch.
            largest: also search for the largest batch within the budget.
            batch_fn: a function that makes a micro-batch of a given number of samples; None: rows of `batch` are repeated or cut.
            max_norm: gradients are clipped to this norm.
            device: one of those listed in docs/forecast.md; None: this process's.
            loop: what holds memory between the calls, as for `headway.forecast`.

        Raises:
            ConfigError: an argument is wrong.
            DataError: the batch has no rows.
            LossError: there is no loss, or it has no gradient.
            UnsupportedError: the step cannot be traced (the operation and the line are named), or models are sharded or compiled.
        """
        asked = model, batch, optimizer, loss, forward, budget, largest, batch_fn, max_norm, device, loop
        return forecasts.forecast(forecasts.ForecastRequest(*asked), self._forecast_setting())

    def _forecast_setting(self) -> "forecasts.TrainingSetup":
        plan, prepared = self.options.checkpointing, self._preparation.models
        return forecasts.TrainingSetup(
            self._training_step.parts,
            self.options,
            self._run.dynamo_plugin.compiles,
            partial(recompute.repeat_checkpointing, plan=plan, prepared=prepared),
        )

    # ---------------------------------------------------------------- the step

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[None]:
        """The context of one micro-batch: in it and after it, step and zero_grad act only at the end of a window.

        Args:
            models: the models that learn in it; none: all that are prepared. Different sets have windows of their own.
        """
        return MicroBatch(self._training_step, models or self._training_step.prepared.models)

    def microbatches(self, batch: Tree) -> Iterator[Tree]:
        """The batch in pieces that fit into memory; all of them again, and smaller, where they did not (docs/microbatching.md).

        Each piece belongs in `with accelerator.accumulate(model)`, backward and step included. Without
        microbatching="auto" there is one piece, the batch.

        Args:
            batch: nested containers; what has one entry a row is cut, the rest is in every piece.

        Raises:
            MemoryExhausted: pieces of one row do not fit.
        """
        return self._training_step.microbatches(batch)

    def forward_backward(
        self,
        batch: Tree,
        fn: Callable[[Tree], torch.Tensor],
        weight: Callable[[Tree], Any] | None = None,
        reduction: str = "mean",
    ) -> torch.Tensor:
        """Forward and backward of a batch as a function, in pieces where memory demands it; `accumulate` included.

        Args:
            batch: as for `microbatches`.
            fn: from a piece to its loss.
            weight: from a piece to the number of items its loss was taken over; None: its rows.
            reduction: as for `backward`.

        Returns:
            The batch's loss over all ranks: a 0-d tensor without a graph.

        Raises:
            MemoryExhausted: pieces of one row do not fit.
        """
        return self._training_step.forward_backward(batch, fn, weight, reduction)

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Backward passes of forwards made in this block keep their gradients on this process."""
        self.strategy.capabilities.require("deferred_sync", self.strategy.name, "reduce at every micro-batch")
        with self.strategy.accumulate(model, False):
            yield

    @contextmanager
    def trigger_sync_in_backward(self, model: torch.nn.Module) -> Iterator[None]:
        """Let the next backward send gradients although its forward ran in `no_sync`."""
        self.strategy.expect_backward([model])
        yield

    def backward(
        self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, reduction: str = "mean", **kwargs: Any
    ) -> None:
        """Add the gradient of the loss with its weight (see `headway.training.windows`).

        Args:
            loss: a scalar.
            weight: over how many items the loss was taken (e.g. tokens), on this rank; None: the valid samples of the
                micro-batch in iteration. Either on all ranks or on none.
            reduction: "mean": the loss is a mean over those items; "sum": their sum.
            kwargs: for torch.autograd.backward (retain_graph, create_graph, inputs).

        Raises:
            LossError: no scalar, no graph, an impossible weight.
        """
        if self.precision.is_mixed:
            self._warn_low_precision(loss)
        self._training_step.backward(loss, None if weight is None else float(weight), reduction, **kwargs)

    def _warn_low_precision(self, loss: Any) -> None:
        if getattr(loss, "dtype", None) in (torch.bfloat16, torch.float16):
            log.warning_once(
                "the loss was computed in %s, because it was computed outside autocast from half-precision outputs: "
                "wrap the loss function in `with accelerator.autocast():` to compute it in float32",
                loss.dtype,
            )

    def unscale_gradients(self, optimizer: PreparedOptimizer | Sequence[PreparedOptimizer] | None = None) -> None:
        """Make fp16 gradients true values, once a window; needed only before reading them by hand.

        Args:
            optimizer: one or several; None: all that are prepared.
        """
        chosen = self._preparation.optimizers if optimizer is None else optimizer
        for one in [chosen] if isinstance(chosen, PreparedOptimizer) else chosen:
            self._training_step.unscale(one.optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip gradients by their global norm at the end of a window; inside one they are left alone.

        Returns:
            The norm before clipping, of true (unscaled) gradients: a 0-d tensor.
        """
        return self._training_step.clip(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp each gradient entry to [-clip_value, clip_value] at the end of a window."""
        self.strategy.capabilities.require("clip_by_value", self.strategy.name, "use clip_grad_norm_")
        self._training_step.clip_value(parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The forward context of the run's precision, for losses and code outside a model.

        Args:
            autocast_handler: `AutocastKwargs(enabled=False)` switches autocast off in the block.
        """
        if autocast_handler is not None and not autocast_handler.enabled:
            return self.runtime.hardware.without_autocast()
        return self.precision.autocast()

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler under fp16, up to date with the steps done; None otherwise. prepare() makes optimizers use it."""
        self.precision.settle(len(self._preparation.optimizers))
        return self.precision.scaler

    @property
    def sync_gradients(self) -> bool:
        """Does the current micro-batch end its window: will step() act? Settable, for windows made by hand."""
        return self._training_step.windows.is_due

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._training_step.windows.set_due(value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self._training_step.windows.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, num_steps: int) -> None:
        self._training_step.windows.set_steps(GradientAccumulationPlugin(num_steps=num_steps).num_steps)

    @property
    def num_updates(self) -> int:
        """Updates that happened since the start."""
        return self.clock.num_updates

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Did the last step() at the end of a window make no update?"""
        return any(optimizer.step_was_skipped for optimizer in self._preparation.optimizers)

    @property
    def non_finite(self) -> "finite.FiniteGuard | None":
        """What `on_non_finite` has done so far; None where it was not asked for."""
        return cast("finite.FiniteGuard | None", self._training_step.guard.of_non_finite)

    @property
    def spikes(self) -> "spike_checks.SpikeGuard | None":
        """What `on_spike` has done so far; None without `on_spike`."""
        return cast("spike_checks.SpikeGuard | None", self._training_step.guard.of_spikes)

    # ---------------------------------------------------------------- data and metrics

    def gather(self, tensor: T) -> T:
        """Every rank's tensors, concatenated along dim 0 in rank order (a 0-d tensor counts as one row).

        First dimensions may differ between ranks. Nested structures keep their shape. Repeats that fill a batch up are among the
        rows, which is said once; `gather_for_metrics` leaves them out.
        """
        look_for_repeats(tensor, self._training_step.windows.loader, self.num_processes)
        return super().gather(tensor)  # type: ignore[no-any-return]

    def gather_for_metrics(
        self, input_data: Tree, use_gather_object: bool = False, loader: PreparedLoader | None = None
    ) -> Tree:
        """Join per-sample results of all ranks, in the data's order and without padding.

        Args:
            input_data: tuples and dicts of tensors or arrays with one row per sample, or lists with one item per sample.
            use_gather_object: take every list as one item per sample, whatever it holds.
            loader: whose batch it is; None: the innermost loader in iteration.

        Raises:
            MetricError: something that has no entry per sample.
            StateError: `loader` is not in iteration.
        """
        active = self._events.active
        if loader is not None and loader not in active:
            raise StateError(
                "gather_for_metrics(loader=...) was called outside that loader's loop; call it for each batch, inside"
            )
        chosen = loader if loader is not None else self._training_step.windows.loader
        if chosen is None:
            self._bypasses.look_for_loader(self._training_step)
        return gather_for_metrics(input_data, chosen, self._readers, use_gather_object)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The loader without its first `num_batches` batches, in its next epoch only; nothing is read to skip."""
        return skip_first_batches(dataloader, num_batches)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Train on prepared loaders whose ranks hold different amounts of data.

        Prepared loaders give every rank the same number of batches (the missing ones of weight zero), so nothing has to
        be joined; in the block, `even_batches` is what prepared loaders go by.

        Raises:
            StateError: a joinable that is not prepared.
        """
        for model in joinables:
            if not any(model is known for known in self._preparation.models):
                raise StateError(
                    f"join_uneven_inputs got a {type(model).__name__} that is not prepared; prepare it first"
                )
        with nullcontext() if even_batches is None else self._preparation.evenness(even_batches):
            yield

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How prepared loaders split, pad and move batches."""
        return self._preparation.loading

    @property
    def use_stateful_dataloader(self) -> bool:
        """Are loaders torchdata's StatefulDataLoader?"""
        return self._preparation.loading.use_stateful_dataloader

    @property
    def even_batches(self) -> bool:
        """Is the last round completed with samples from the start?"""
        return self._preparation.loading.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._preparation.set_evenness(value)

    @property
    def split_batches(self) -> bool:
        """Is a loader's batch size the global one?"""
        return self._preparation.loading.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Does the main process read for all?"""
        return self._preparation.loading.dispatch_batches

    @property
    def non_blocking(self) -> bool:
        """Are batches copied to the device without waiting?"""
        chosen = self._preparation.loading.non_blocking
        return self.device.type != "cpu" if chosen is None else chosen

    @property
    def use_seedable_sampler(self) -> bool:
        """Is shuffling a pure function of (seed, epoch)?"""
        return self._preparation.loading.is_seedable

    # ---------------------------------------------------------------- save and resume

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self._checkpoints.place.iteration

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
        """Commit a checkpoint of everything prepared and registered; every rank calls it.

        It is on the disk when this returns. A kill at any moment before leaves the former checkpoint as it was. Called under a
        condition that lets one rank pass only (`if accelerator.is_main_process:`), that rank writes everything but the other
        ranks' RNG states, and says so once; of a sharded model that is an error.

        Args:
            output_dir: its folder; a checkpoint that is there is exchanged for the new one. Not read with automatic naming,
                where it is `<project_dir>/checkpoints/checkpoint_<n>`.
            safe_serialization: accepted for the name's sake: checkpoints hold safetensors and JSON, never pickles.
            blocking: False: return when the state is copied to host memory, and write behind the loop. The next save waits
                for it; an error is raised by the next `accumulate`, save, or `end_training`.
            metric: how good this state is, for `ProjectConfiguration(keep_best=...)`.
            weights: "huggingface": also the model's full weights, with config.json and related files, so that `from_pretrained`
                opens the folder (with several models: the first; the others are in `model_1`, ...). None: only the checkpoint.
            save_model_func_kwargs: accepted for the name's sake: what engines that are not in use take.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: on every rank, where any could not write; former checkpoints are intact.
            ConfigError: no folder was given, and there is no automatic naming; or an unknown argument.
        """
        check_save_arguments(save_model_func_kwargs)
        if weights not in (None, "huggingface"):
            raise ConfigError(f"save_state(weights={weights!r}); allowed: 'huggingface' or None")
        also = None if weights is None else self._whole_weights.publish_all
        return self._checkpoints.save(output_dir, blocking, metric, also)

    def wait_for_save(self) -> None:
        """Wait until a save behind the loop is on the disk; every rank calls it.

        Raises:
            CheckpointError: on every rank, where any could not write.
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
    ) -> Restored:
        """Take a checkpoint up, after prepare: all of it or nothing; every rank calls it.

        Args:
            input_dir: its folder; None, with automatic naming: the newest one that verifies.
            load_kwargs: accepted for the name's sake: nothing is unpickled.
            strict: refuse a checkpoint of another world size, batch size, precision or version.
            changed: what is another one on purpose, which is refused otherwise: "data", whose number of samples is not that of the
                checkpoint (the epoch begins at its first batch), a "schedule", whose learning rate jumps or which counts otherwise,
                or both. None: warn of either, and keep the place in the data.
            load_model_func_kwargs: accepted for the name's sake: `map_location` ("cpu" or "on_device"), as the state goes
                to where each object is; and what engines that are not in use take.

        Returns:
            What was restored and what differs; printable.

        Raises:
            CheckpointError: on every rank: missing, damaged, or it does not fit; nothing is changed then.
            ConfigError: no folder was given, and there is no automatic naming; or an unknown argument.
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
    ) -> Restored | None:
        """Go on from a checkpoint where there is one; call it after prepare, and loop over `epochs(n)`.

        Args:
            checkpoint: "latest": the newest one in the project's folder that verifies; one that does not is named and
                passed over. Or a folder.
            strict, changed: as for load_state.
            run: with "latest", look among the checkpoints of this run only: "run" in their manifests. None: among all.

        Returns:
            What was restored, or None where "latest" found nothing yet.

        Raises:
            CheckpointError: on every rank: damaged (a folder that was given), or it does not fit.
        """
        return self._checkpoints.resume(checkpoint, strict, run, changed)

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The numbers of the epochs that are left of `num_epochs`: after a resume from the restored one.

        Args:
            num_epochs: of the whole training, 0 or more.
        """
        return self._checkpoints.epochs(num_epochs)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects too: anything with state_dict and load_state_dict, of values without pickle.

        Raises:
            ConfigError: naming those that lack one of the two.
        """
        self._checkpoints.register(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, folder)` in each save, on every rank, before anything is written.

        Files it writes into the folder belong to the checkpoint; a model whose entry it takes out of `weights` (one dict
        of name and tensor for each model) is not saved.
        """
        return self._checkpoints.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, folder)` in each load; a model it takes out of the list is not loaded."""
        return self._checkpoints.add_load_hook(hook)

    @property
    def preempted(self) -> bool:
        """Have all ranks agreed to stop? Then save and end; only with `Preemption(exits=False)`, else the run has ended."""
        return self._checkpoints.is_preempted

    def check_preemption(self) -> bool:
        """Stop here where the run is asked to end; for loops without a prepared loader. Every rank calls it alike.

        Returns:
            `preempted`.

        Raises:
            Preempted: a checkpoint was committed on all ranks; let it end the process.
        """
        return self._checkpoints.check_preemption()

    def stop_watching(self) -> None:
        """Leave signals and deadlines alone, and the folder to other runs, where the training is over; every rank calls it."""
        self._checkpoints.stop_watching()

    def start_watching(self) -> None:
        """Heed signals and deadlines again after `stop_watching`, or after another Accelerator has; every rank calls it.

        It does nothing where this Accelerator was not to heed them, and outside the main thread, where Python cannot.
        """
        self._checkpoints.start_watching()

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where the run keeps its files; settable."""
        return self._checkpoints.place.project

    @project_configuration.setter
    def project_configuration(self, project: ProjectConfiguration) -> None:
        self._checkpoints.place.project = project.taken()

    # ---------------------------------------------------------------- trackers and the run's log

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: TrackerKwargs | None = None) -> None:
        """Begin a run: its log in `<logging_dir>/<project_name>/log.jsonl`, and the trackers of `log_with`.

        A folder that has a log is continued: a run that was killed and is resumed goes on in the same log and in the same
        runs of the trackers. A run that is under way ends first; one that this Accelerator has ended is opened again, which is
        no further attempt.

        Args:
            project_name: names the folder, the project or experiment of the trackers.
            config: the run's configuration: a mapping, a dataclass or an argparse.Namespace.
            init_kwargs: for each tracker's own beginning, by its name, as in
                `{"wandb": {"tags": ["first"]}, "mlflow": {"run_name": "a"}}`.

        Raises:
            ConfigError: a name that is not a relative path, or a config that is not a mapping.
            TrackingError: the folder holds a `log.jsonl` of something else.
        """
        self._record.begin(project_name, config, init_kwargs)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: TrackerKwargs | None = None) -> None:
        """Log values of one step; any rank may call it, rank 0 writes.

        Args:
            values: names to numbers, texts, 0-d tensors, numpy scalars, or mappings of them (names are joined with '/'). None is
                left out. Anything else goes to the trackers that take it (`Tracker.takes`), and the run's log notes its kind.
            step: None: the number of updates so far.
            log_kwargs: for each tracker's own `log`, by its name.
        """
        self._record.log(values, step, log_kwargs)

    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: TrackerKwargs | None = None
    ) -> None:
        """Log images of one step, as PNG files in the run's folder and to the trackers that have a place for them.

        Args:
            values: names to images: arrays, tensors or PIL images [H, W], [H, W, C] or [C, H, W] (bytes, or floats 0..1);
                [N, H, W, C] or [N, C, H, W] and lists are several.
            step: as for `log`.
            log_kwargs: for each tracker's own `log_images`, by its name.

        Raises:
            TrackingError: another shape or type, with its name.
        """
        self._record.log_images(values, step, log_kwargs)

    def log_artifact(
        self,
        path: str | Path,
        name: str | None = None,
        step: int | None = None,
        log_kwargs: TrackerKwargs | None = None,
    ) -> None:
        """Log a file or folder that belongs to the run; it stays where it is, and trackers with a store copy it.

        Args:
            path: of what rank 0 sees.
            name: what it is called; None: its file name.
            step: as for `log`.
            log_kwargs: for each tracker's own `log_artifact`, by its name.

        Raises:
            TrackingError: on rank 0: there is nothing.
        """
        self._record.log_artifact(path, name, step, log_kwargs)

    def log_event(self, name: str, step: int | None = None, **details: Any) -> None:
        """Note in the run's log that something happened; any rank may call it, rank 0 writes.

        Args:
            name: what, as in "evaluation".
            step: None: the number of updates so far.
            details: what else is to be known.
        """
        self._record.log_event(name, step, details)

    @property
    def trackers(self) -> list[Tracker]:
        """This rank's trackers that are in use: on rank 0 those of `log_with`."""
        return self._record.trackers

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name.

        Args:
            name: as in `log_with`.
            unwrap: the object underneath: a SummaryWriter, W&B's run, MLflow's run.

        Returns:
            The tracker; where this rank has none (or it failed), an object that takes every call, does nothing and is false.

        Raises:
            ConfigError: `log_with` names no such tracker.
        """
        return self._record.tracker(name, unwrap)

    def end_trackers(self, summary: Mapping[str, Any] | None = None) -> None:
        """End the run, where one is under way, with its log and its trackers; the process goes on.

        Args:
            summary: what its last line says beside the number of updates and the seconds it took.
        """
        self._record.end(summary)

    # ---------------------------------------------------------------- weights, memory, profile, end

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The model's tensors by the bare module's names (`unwrap=False`: as the object given names them).

        Of a sharded model every rank must call it: rank 0 gets the whole tensors, on the host, the others an empty dict.

        Raises:
            UnsupportedError: the model is sharded, and only some ranks make the call.
        """
        bare = self.unwrap_model(model, keep_torch_compile=False) if unwrap else model
        return self._whole_weights.state_dict(bare)

    def stream_weights(
        self, model: torch.nn.Module, bucket_size: int | str = "64MiB", merge_adapters: bool = False
    ) -> "weight_stream.WeightStream":
        """The model's weights, for an engine that generates: buckets of (name, whole tensor) on rank 0; every rank iterates.

        Names and values are those that `save_model` writes, one of each tied pair. Rank 0 holds one bucket, and one tensor that is
        being put together; a bucket is emptied when the next one is asked for. The other ranks see the same names, with
        tensors that have no memory. A rank that breaks off, for an error of its receiver, say, makes it an error on all.

        Args:
            model: prepared or not.
            bucket_size: the most bytes at once, or text; a larger tensor comes alone.
            merge_adapters: True: PEFT adapters are merged into their layers, bit for bit like `merge_and_unload`, under the names of
                the model without them; the model itself does not change. False: adapters are sent separately.

        Returns:
            An iterable, for one pass; its `metadata` says what will come: (name, name of the dtype, shape) of each tensor.

        Raises:
            UnsupportedError: the model is sharded, and only some ranks make the call; or its adapters cannot be merged.
            ConfigError: the state dict holds something besides tensors.
        """
        bare = self.unwrap_model(model, keep_torch_compile=False)
        tensors = self._whole_weights.export(bare, "stream_weights")
        return weight_stream.WeightStream(
            tensors.items(), bucket_size, self.collectives, bare if merge_adapters else None
        )

    def load_weights(self, model: torch.nn.Module, source: str | Path, strict: bool = False) -> None:
        """Fill a model from pretrained weights; each rank reads its own part, once, and no rank holds more. Every rank calls it.

        Before `prepare`, names and shapes are checked at once, and values are read when the model is prepared: it can be built on
        the meta device. After `prepare`, values are read now.

        Args:
            model: the model, or a part of one (its base without a new head, say).
            source: a folder, an index or a file of safetensors or `.bin`, or a model id on the Hub; transformers' models take the
                names and layouts that `from_pretrained` takes.
            strict: stored names that the model has no place for are an error, not a warning.

        Raises:
            CheckpointError: missing or damaged, or it does not fit: nothing has changed. Or a rank could not read its part.
        """
        self._preparation.weights.add(model, source, strict, self._preparation.models)

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Write an object with torch.save (or a dict of tensors with safetensors) from the main process only."""
        if self.is_main_process:
            save_object(obj, f, safe_serialization)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights as `model.safetensors`, or as shards with an index, from the main process; every rank calls it.

        Of a sharded model one whole tensor at a time is brought to the main process. Of any other, a call under
        `if accelerator.is_main_process:` works too, and waits for nobody.

        Args:
            model: prepared or not.
            save_directory: a folder, made where missing.
            max_shard_size: bytes or text such as "10GB".
            safe_serialization: False writes one `pytorch_model.bin` with torch.save instead, whatever its size, for which all of a
                sharded model is brought there.

        Raises:
            UnsupportedError: the model is sharded, and only some ranks make the call.
        """
        bare = self.unwrap_model(model, keep_torch_compile=False)
        self._whole_weights.save(bare, save_directory, max_shard_size, safe_serialization)

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
        """Upload a model to the Hugging Face Hub, as a folder that `from_pretrained` opens; every rank calls it.

        Args:
            model: prepared or not; if it has PEFT adapters, only these are uploaded.
            repo_id: "name" or "owner/name"; created if it does not exist.
            parts: a tokenizer, a processor, or other objects with `save_pretrained`.
            private: whether a new repository is private; None: as the owner's settings say.
            token: None: that of `hf auth login`, or HF_TOKEN.
            revision: a branch, created if it does not exist; None: main.
            commit_message: the commit's message.
            max_shard_size: bytes, or text such as "5GB".

        Returns:
            The commit's URL on the main process, None elsewhere.

        Raises:
            OptionalDependencyMissing: huggingface_hub is not installed.
            UnsupportedError: the model is sharded, and only some ranks make the call.
        """
        bare = self.unwrap_model(model, keep_torch_compile=False)
        about = {"private": private, "token": token, "revision": revision, "commit_message": commit_message}
        return self._whole_weights.push(bare, repo_id, parts, max_shard_size, about)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """torch's profiler around the block; traces and a table go to `output_trace_dir`, one file a rank."""
        return throughput.profiling(profile_handler or self.options.profile, self.runtime.rank)

    @cached_property
    def throughput(self) -> "throughput.Throughput":
        """Measures the loop from its first use on: ask for it before the loop (docs/throughput.md)."""
        return throughput.Throughput(self._training_step, self._events, self.clock, self.runtime)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget everything prepared, collect garbage and empty the device's cache.

        Args:
            objects: only counted: rebind your own names, `model, optimizer = accelerator.free_memory(model, optimizer)`.

        Returns:
            As many Nones.
        """
        self._preparation.release()
        result = [None] * len(objects)
        del objects
        self.runtime.hardware.empty_cache()
        return result

    clear = free_memory

    @property
    def project_dir(self) -> str | Path | None:
        """Where the run keeps its files."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | Path | None:
        """Where logs go."""
        return self.project_configuration.logging_dir

    def end_training(self) -> None:
        """Wait for everyone, forget everything prepared, end the process group that Headway started, and then the run."""
        self.wait_for_save()
        self.wait_for_everyone()
        process.reset()
        self.end_trackers()  # last: where one is slow, no other rank waits


def _use_of_memory(error: BaseException) -> str:
    """What memory was used for, where it ran out and nobody caught the error."""
    if not is_out_of_memory(error):
        return ""
    scope.own(EmergencyReserve).release()
    return memory_report.untold(error)
