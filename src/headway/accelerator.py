"""The Accelerator: a table of contents, where each method delegates to the part that does the work."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from headway import traces
from headway.checkpoint.weights import save_object, save_pickled, save_weights
from headway.config.arguments import caller, is_automatic, loading_settings, project_settings, windows
from headway.config.load import UNSET, run_setting
from headway.config.preemption import Preemption, preemption_settings
from headway.config.run import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration
from headway.config.strategies import ActivationCheckpointing, AutocastKwargs, collect_options
from headway.data.loader import PreparedLoader
from headway.data.skip import skip_first_batches
from headway.errors import StateError, UnsupportedError
from headway.familiar.layouts import ParallelismConfig, TorchDynamoPlugin, check_layouts
from headway.familiar.members import Familiar
from headway.familiar.state import Run
from headway.log import get_logger, is_debugging
from headway.memory import report as memory_report
from headway.ops.collectives import Collectives
from headway.ops.ranks import RankAware
from headway.ops.streams import stream_names
from headway.ops.tree import Tree
from headway.precision.mixed import build_precision
from headway.runtime import process, watch
from headway.saving.methods import Saving
from headway.saving.run import RunState
from headway.strategies.build import build_strategy
from headway.tracking.methods import Tracking
from headway.training.accumulation import Accumulation, LossPolicy, MicroBatch, WeightedMean
from headway.training.checkpointing import checkpoint_activations, keep_activations
from headway.training.clock import Clock, TickRule
from headway.training.finite import NonFinitePolicy, build_guard
from headway.training.measuring import Measuring
from headway.training.metrics import gather_for_metrics
from headway.training.microbatch import build_microbatching
from headway.training.optimizer import PreparedOptimizer
from headway.training.prepare import Preparation, choose_rule
from headway.training.scheduler import PreparedScheduler
from headway.training.unprepared import Lookout

log = get_logger(__name__)


class Accelerator(RankAware, Saving, Tracking, Measuring, Familiar):
    """Runs a PyTorch loop on whatever the launcher started: one process or many, any device, any precision.

    Args:
        device_placement: move models and batches to `device`.
        split_batches: short for `DataLoaderConfiguration(split_batches=True)`.
        mixed_precision: "no" (the default), "bf16" or "fp16".
        gradient_accumulation_steps: micro-batches per update; default 1.
        cpu: compute on the CPU even where there is an accelerator.
        dataloader_config: how prepared loaders split, pad and move batches.
        deepspeed_plugin, fsdp_plugin, torch_tp_plugin, megatron_lm_plugin, deepspeed_plugins: layouts that are planned; anything
            but None is an error that says what to do today.
        gradient_accumulation_plugin: the same and more about windows; not together with the steps.
        step_scheduler_with_optimizer: a schedule's step() follows its optimizer's updates; False: each call is a tick.
        adjust_scheduler_to_accumulation: schedules were counted in micro-batches.
        scheduler_ticks: "updates": schedules were counted in real updates, one tick each. None: by the rule of
            `headway.training.clock`. An object with `name`, `reason` and `ticks(window_length)` is a rule of your own.
        global_batch_size: samples per update; derives the accumulation from ranks and the loader's batch size.
        rng_types: streams to make equal over ranks when a loader begins: "generator" (default), "torch", "python",
            "numpy", "device" (or its kind, "cuda" say).
        kwargs_handlers: options of the engines underneath, one each of `headway.config.strategies`.
        dynamo_backend, dynamo_plugin: None or "no": compile a model yourself, before prepare().
        parallelism_config: replicas by number; other sizes than 1 elsewhere are an error.
        project_dir: where the run keeps files; or a `project_config`.
        loss_policy: how losses are divided; default: the exact mean over the window and all ranks.
        microbatching: "auto": where memory runs out, the batch is run again in smaller pieces, on all ranks and with the
            same result; loops then use `forward_backward` or `microbatches`. None: batches stay whole.
        on_non_finite: "skip", "stop" or "raise" before an update from a loss or gradient that is nan or infinite; or a
            `NonFinitePolicy`. None: nobody looks.
        log_with: trackers that the run's log is fed to: "tensorboard", "wandb", "mlflow", "all" (that are installed), an
            instance of `headway.Tracker`, or a list of these.
        preemption: a signal or deadline makes all ranks save and end with exit code 75 (`Preemption`). True: as that class
            says; None: the same where checkpoints are named automatically; False: signals end the process as ever.

    Raises:
        ConfigError: contradicting or impossible settings.
        LaunchError: the launcher promised another number of processes than came.
        DeviceUnavailable: an accelerator was asked for that this process cannot use.
        UnsupportedError: a layout that is not there yet.
    """

    def __init__(
        self, device_placement: bool = True, split_batches: bool = False, mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None, cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: None = None, fsdp_plugin: None = None, torch_tp_plugin: None = None,
        megatron_lm_plugin: None = None, rng_types: Sequence[str] | None = ("generator",), log_with: Any = None,
        project_dir: str | Path | None = None, project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True, kwargs_handlers: list[Any] | None = None,
        dynamo_backend: str | None = None, dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: None = None, parallelism_config: ParallelismConfig | None = None,
        # Accelerate's end here; what follows is Headway's own.
        adjust_scheduler_to_accumulation: bool = False, scheduler_ticks: str | TickRule | None = None,
        global_batch_size: int | None = None, loss_policy: LossPolicy | None = None, microbatching: str | None = None,
        on_non_finite: str | NonFinitePolicy | None = None, preemption: Preemption | bool | None = None,
    ) -> None:  # fmt: skip
        traces.install(lambda: not is_debugging())
        origin = caller()
        compiling = check_layouts(deepspeed_plugin or deepspeed_plugins, fsdp_plugin, torch_tp_plugin, megatron_lm_plugin,
                                  dynamo_backend, dynamo_plugin, parallelism_config)  # fmt: skip
        options = collect_options(kwargs_handlers)
        on_cpu, _ = run_setting("cpu", UNSET if cpu is None else cpu, False, code_origin=origin)
        group = options.process_group
        runtime = process.start(cpu=on_cpu, backend=group.backend, init_method=group.init_method, timeout=group.timeout)
        watch.start()
        super().__init__(runtime, Collectives(runtime))
        self.options = options
        asked = str(mixed_precision) if mixed_precision else UNSET
        self.mixed_precision, _ = run_setting("mixed_precision", asked, "no", code_origin=origin)
        self.precision = build_precision(self.mixed_precision, runtime.hardware, options)
        plugin = windows(gradient_accumulation_steps, gradient_accumulation_plugin, global_batch_size, origin)
        cuts_batches = is_automatic(microbatching, plugin)
        self.strategy = build_strategy(self.collectives, options, is_deferred=cuts_batches)
        self.global_batch_size = global_batch_size
        self.project_configuration = project_settings(project_dir, project_config)
        self.clock = Clock()
        active: list[PreparedLoader] = []
        self._accumulation = Accumulation(plugin.num_steps, self.strategy, self.precision, loss_policy or WeightedMean(),
                                          active, plugin.sync_with_dataloader, plugin.sync_each_batch)  # fmt: skip
        loading = loading_settings(dataloader_config, split_batches)
        rule = choose_rule(scheduler_ticks, adjust_scheduler_to_accumulation or plugin.adjust_scheduler,
                           1 if loading.split_batches else self.strategy.data_shard.count)  # fmt: skip
        self._preparation = Preparation(
            self._accumulation, self.clock, runtime, loading, device_placement, rule, step_scheduler_with_optimizer,
            tuple(stream_names(rng_types or ())), global_batch_size)  # fmt: skip
        self._preparation.transforms = self._transforms(options.checkpointing)
        self._start_records(log_with, preemption)
        self._microbatching = build_microbatching(self._accumulation, self._preparation, self.clock, runtime,
                                                  cuts_batches)  # fmt: skip
        Familiar.__init__(self, Run(self.mixed_precision, self._accumulation, plugin.adjust_scheduler, parallelism_config,
                                    compiling))  # fmt: skip
        build_guard(on_non_finite, self._accumulation, self._preparation, self.clock)
        process.at_end(self._preparation.release)
        self._lookout = Lookout(self._accumulation)
        process.at_end(self._lookout.release)
        memory_report.arm()

    def _transforms(self, plan: ActivationCheckpointing | None) -> tuple[Callable[[torch.nn.Module], Any], ...]:
        return () if plan is None else (partial(checkpoint_activations, plan=plan, device=self.device),)

    def _start_records(self, log_with: Any, preemption: Preemption | bool | None) -> None:
        run_state = RunState(self.runtime, self.collectives, self.strategy, self.precision, self._preparation,
                             self._accumulation, self.clock)  # fmt: skip
        Saving.__init__(self, run_state, self.project_configuration)
        answer = preemption_settings(preemption, self.project_configuration)
        self._watch_for_preemption(answer, is_asked_for=bool(preemption))
        Tracking.__init__(self, log_with, self.clock, run_state.notes, self._has_checkpoints)

    # ---------------------------------------------------------------- prepare

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None, strict: bool = False) -> Any:
        """Make models, optimizers, loaders and schedules ready, in any order; returns them in the order given.

        The model comes back as the same object. One argument comes back alone, several as a tuple; None passes through;
        what is prepared already is returned as it is, and so is an object of another kind, with a warning.

        Args:
            objects: models, optimizers, DataLoaders, schedules.
            device_placement: one truth value for each object: move it to the device?
            strict: an object of another kind is an error.

        Raises:
            PrepareError: objects that do not belong together, or with `strict` one of another kind.
        """
        prepared = self._preparation.prepare(objects, device_placement, strict)
        self._run_state.watch_windows()
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(self, model: torch.nn.Module, device_placement: bool | None = None,
                      evaluation_mode: bool = False) -> torch.nn.Module:  # fmt: skip
        """Prepare one model; with `evaluation_mode` it gets no engine for gradients."""
        return self._preparation.model(model, device_placement, evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Prepare one optimizer; its state goes where the parameters are, whatever `device_placement` says."""
        return self._preparation.optimizer(optimizer)

    def prepare_data_loader(self, data_loader: DataLoader[Any], device_placement: bool | None = None,
                            slice_fn_for_dispatch: None = None) -> PreparedLoader:  # fmt: skip
        """Prepare one loader.

        Raises:
            UnsupportedError: a function that slices dispatched batches: they are cut by rows.
        """
        if slice_fn_for_dispatch is not None:
            raise UnsupportedError(
                "slice_fn_for_dispatch is not served: dispatched batches are cut by rows; leave it out"
            )
        prepared = self._preparation.loader(data_loader, device_placement)
        self._run_state.watch_windows()
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepare one schedule; its optimizer must be prepared."""
        return self._preparation.scheduler(scheduler)

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """The user's own module: what prepare() gave back is that object already.

        Args:
            model: prepared or not; a DistributedDataParallel instance of the user's own is opened too.
            keep_fp32_wrapper: accepted for the name's sake: outputs are never converted.
            keep_torch_compile: False: also take off torch.compile's wrapper.
        """
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        model = self.strategy.unwrap(model)
        return model if keep_torch_compile else getattr(model, "_orig_mod", model)

    def checkpoint_activations(
        self, model: torch.nn.Module, every: int = 1, policy: str | Callable[..., Any] = "recompute", offload: bool = False,
        blocks: Sequence[Any] = (),
    ) -> torch.nn.Module:  # fmt: skip
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
        count = checkpoint_activations(
            model, ActivationCheckpointing(every, policy, offload, tuple(blocks)), self.device
        )
        log.info("activations of %d blocks of %s are computed again in backward", count, type(model).__name__)
        return model

    def keep_activations(self, model: torch.nn.Module) -> torch.nn.Module:
        """Undo `checkpoint_activations`; returns the same object."""
        keep_activations(model)
        return model

    # ---------------------------------------------------------------- the step

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[None]:
        """The context of one micro-batch: in it and after it, step and zero_grad act only at the end of a window.

        Args:
            models: the models that learn in it; none: all that are prepared. Different sets have windows of their own.
        """
        self._begin_micro_batch()
        return MicroBatch(self._accumulation, models or tuple(self._preparation.models))

    def microbatches(self, batch: Tree) -> Iterator[Tree]:
        """The batch in pieces that fit into memory; all of them again, and smaller, where they did not (docs/microbatching.md).

        Each piece belongs in `with accelerator.accumulate(model)`, backward and step included. Without
        microbatching="auto" there is one piece, the batch.

        Args:
            batch: nested containers; what has one entry a row is cut, the rest is in every piece.

        Raises:
            MemoryExhausted: pieces of one row do not fit.
        """
        return self._microbatching.microbatches(batch)

    def forward_backward(self, batch: Tree, fn: Callable[[Tree], torch.Tensor],
                         weight: Callable[[Tree], Any] | None = None, reduction: str = "mean") -> torch.Tensor:  # fmt: skip
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
        self._check_resumed()
        return self._microbatching.forward_backward(batch, fn, weight, reduction)

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Backward passes of forwards made in this block keep their gradients on this process."""
        self.strategy.capabilities.require("deferred_sync", self.strategy.name, "reduce at every micro-batch")
        with self.strategy.accumulate(model, False):
            yield

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, reduction: str = "mean",
                 **kwargs: Any) -> None:  # fmt: skip
        """Add the gradient of the loss with its weight (see `headway.training.accumulation`).

        Args:
            loss: a scalar.
            weight: over how many items the loss was taken (e.g. tokens), on this rank; None: the valid samples of the
                micro-batch in iteration. Either on all ranks or on none.
            reduction: "mean": the loss is a mean over those items; "sum": their sum.
            kwargs: for torch.autograd.backward (retain_graph, create_graph, inputs).

        Raises:
            LossError: no scalar, no graph, an impossible weight.
        """
        self._check_resumed()
        self._warn_low_precision(loss)
        self._accumulation.backward(loss, None if weight is None else float(weight), reduction, **kwargs)

    def _warn_low_precision(self, loss: Any) -> None:
        if self.precision.is_mixed and getattr(loss, "dtype", None) in (torch.bfloat16, torch.float16):
            log.warning_once(
                "the loss was computed in %s, because it was computed outside autocast from half-precision outputs: "
                "wrap the loss function in `with accelerator.autocast():` to compute it in float32", loss.dtype,
            )  # fmt: skip

    def unscale_gradients(self, optimizer: PreparedOptimizer | Sequence[PreparedOptimizer] | None = None) -> None:
        """Make fp16 gradients true values, once a window; needed only before reading them by hand.

        Args:
            optimizer: one or several; None: all that are prepared.
        """
        if optimizer is None:
            optimizer = self._preparation.optimizers
        for one in [optimizer] if isinstance(optimizer, PreparedOptimizer) else optimizer:
            self._preparation.act(partial(self.precision.unscale, one.optimizer))

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip gradients by their global norm at the end of a window; inside one they are left alone.

        Returns:
            The norm before clipping, of true (unscaled) gradients: a 0-d tensor.
        """
        return self._preparation.clip(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp each gradient entry to [-clip_value, clip_value] at the end of a window."""
        self.strategy.capabilities.require("clip_by_value", self.strategy.name, "use clip_grad_norm_")
        if self._accumulation.is_final:
            self._preparation.clip_value(parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The forward context of the run's precision, for losses and code outside a model.

        Args:
            autocast_handler: `AutocastKwargs(enabled=False)` switches autocast off in the block.
        """
        if autocast_handler is not None and not autocast_handler.enabled:
            return torch.autocast(self.device.type, enabled=False)
        return self.precision.autocast()

    @property
    def sync_gradients(self) -> bool:
        """Does the current micro-batch end its window: will step() act? Settable, for windows made by hand."""
        return self._accumulation.will_step

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._accumulation.is_held = not value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self._accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, num_steps: int) -> None:
        self._accumulation.num_steps = GradientAccumulationPlugin(num_steps=num_steps).num_steps

    @property
    def num_updates(self) -> int:
        """Updates that happened since the start."""
        return self.clock.num_updates

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Did the last step() at the end of a window make no update?"""
        return any(optimizer.step_was_skipped for optimizer in self._preparation.optimizers)

    # ---------------------------------------------------------------- data and metrics

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
        active = self._accumulation.active
        if loader is not None and loader not in active:
            raise StateError(
                "gather_for_metrics(loader=...) was called outside that loader's loop; call it for each batch, inside"
            )
        chosen = loader if loader is not None else self._accumulation.loader
        if chosen is None:
            self._lookout.look_for_loader()
        return gather_for_metrics(input_data, chosen, self.collectives, use_gather_object)

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
        with ExitStack() as stack:
            if even_batches is not None:
                stack.enter_context(self._preparation.evenness(even_batches))
            yield

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
        return self._preparation.loading.non_blocking

    @property
    def use_seedable_sampler(self) -> bool:
        """Is shuffling a pure function of (seed, epoch)?"""
        return self._preparation.loading.is_seedable

    # ---------------------------------------------------------------- weights, memory, profile, end

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The model's tensors by the bare module's names (`unwrap=False`: as the object given names them)."""
        return dict(self.strategy.export_state(self.unwrap_model(model, keep_torch_compile=False) if unwrap else model))

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Write an object with torch.save (or a dict of tensors with safetensors) from the main process only."""
        if self.is_main_process:
            save_object(obj, f, safe_serialization)

    def save_model(self, model: torch.nn.Module, save_directory: str | Path, max_shard_size: int | str = "10GB",
                   safe_serialization: bool = True) -> None:  # fmt: skip
        """Write the weights as `model.safetensors`, or as shards with an index, from the main process; all wait for it.

        Args:
            model: prepared or not.
            save_directory: a folder, made where missing.
            max_shard_size: bytes or text such as "10GB".
            safe_serialization: False writes one `pytorch_model.bin` with torch.save instead, whatever its size.
        """
        if self.is_main_process:
            if safe_serialization:
                save_weights(self.get_state_dict(model).items(), save_directory, max_shard_size)
            else:
                save_pickled(self.get_state_dict(model), save_directory)
        self.wait_for_everyone()

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
