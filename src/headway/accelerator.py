"""The Accelerator: a table of contents, where each method delegates to the part that does the work."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from headway.checkpoint.weights import save_object, save_pickled, save_weights
from headway.config.load import UNSET, run_setting
from headway.config.run import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration
from headway.config.strategies import AutocastKwargs, ProfileKwargs, collect_options
from headway.data.loader import PreparedLoader
from headway.data.skip import skip_first_batches
from headway.errors import ConfigError, StateError
from headway.log import get_logger
from headway.ops.collectives import Collectives
from headway.ops.ranks import RankAware
from headway.ops.tree import Tree
from headway.precision.mixed import build_precision
from headway.runtime import process
from headway.strategies.build import build_strategy
from headway.training.accumulation import Accumulation, LossPolicy, MicroBatch, WeightedMean
from headway.training.clock import Clock, TickRule
from headway.training.metrics import gather_for_metrics
from headway.training.optimizer import PreparedOptimizer
from headway.training.prepare import Preparation, choose_rule
from headway.training.profile import profiling
from headway.training.scheduler import PreparedScheduler

log = get_logger(__name__)


class Accelerator(RankAware):
    """Runs a PyTorch loop on whatever the launcher started: one process or many, any device, any precision.

    Args:
        device_placement: move models and batches to `device`.
        split_batches: short for `DataLoaderConfiguration(split_batches=True)`.
        mixed_precision: "no" (the default), "bf16" or "fp16".
        gradient_accumulation_steps: micro-batches per update; default 1.
        cpu: compute on the CPU even where there is an accelerator.
        dataloader_config: how prepared loaders split, pad and move batches.
        gradient_accumulation_plugin: the same and more about windows; not together with the steps.
        step_scheduler_with_optimizer: a schedule's step() follows its optimizer's updates; False: each call is a tick.
        adjust_scheduler_to_accumulation: schedules were counted in micro-batches.
        scheduler_ticks: "updates": schedules were counted in real updates, one tick each. None: by the rule of
            `headway.training.clock`. An object with `name`, `reason` and `ticks(window_length)` is a rule of your own.
        global_batch_size: samples per update; derives the accumulation from ranks and the loader's batch size.
        rng_types: streams to make equal over ranks when a loader begins: "generator" (default), "torch", "python",
            "numpy", "device".
        kwargs_handlers: options of the engines underneath, one each of `headway.config.strategies`.
        project_dir: where the run keeps files; or a `project_config`.
        loss_policy: how losses are divided; default: the exact mean over the window and all ranks.

    Raises:
        ConfigError: contradicting or impossible settings.
        LaunchError: the launcher promised another number of processes than came.
        DeviceUnavailable: an accelerator was asked for that this process cannot use.
    """

    def __init__(
        self, device_placement: bool = True, split_batches: bool = False, mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None, cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True, adjust_scheduler_to_accumulation: bool = False,
        scheduler_ticks: str | TickRule | None = None, global_batch_size: int | None = None,
        rng_types: Sequence[str] | None = ("generator",), kwargs_handlers: list[Any] | None = None,
        project_dir: str | Path | None = None, project_config: ProjectConfiguration | None = None,
        loss_policy: LossPolicy | None = None,
    ) -> None:  # fmt: skip
        origin = _caller()
        options = collect_options(kwargs_handlers)
        on_cpu, _ = run_setting("cpu", UNSET if cpu is None else cpu, False, code_origin=origin)
        group = options.process_group
        runtime = process.start(cpu=on_cpu, backend=group.backend, init_method=group.init_method, timeout=group.timeout)
        super().__init__(runtime, Collectives(runtime))
        self.options = options
        self.mixed_precision, _ = run_setting("mixed_precision", mixed_precision or UNSET, "no", code_origin=origin)
        self.precision = build_precision(self.mixed_precision, runtime.hardware, options)
        self.strategy = build_strategy(self.collectives, options)
        plugin = _windows(gradient_accumulation_steps, gradient_accumulation_plugin, global_batch_size, origin)
        self.global_batch_size = global_batch_size
        self.project_configuration = _project(project_dir, project_config)
        self.clock = Clock()
        active: list[PreparedLoader] = []
        self._accumulation = Accumulation(plugin.num_steps, self.strategy, self.precision, loss_policy or WeightedMean(),
                                          active, plugin.sync_with_dataloader, plugin.sync_each_batch)  # fmt: skip
        loading = _loading(dataloader_config, split_batches)
        rule = choose_rule(
            scheduler_ticks, adjust_scheduler_to_accumulation or plugin.adjust_scheduler,
            1 if loading.split_batches else self.strategy.data_shard.count,
        )  # fmt: skip
        self._preparation = Preparation(
            self._accumulation, self.clock, runtime, loading, device_placement, rule, step_scheduler_with_optimizer,
            tuple(rng_types or ()), global_batch_size,
        )  # fmt: skip
        process.at_end(self._preparation.release)

    # ---------------------------------------------------------------- prepare

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Make models, optimizers, loaders and schedules ready, in any order; returns them in the order given.

        The model comes back as the same object. One argument comes back alone, several as a tuple; None passes through;
        what is prepared already is returned as it is.

        Args:
            objects: models, optimizers, DataLoaders, schedules.
            device_placement: one truth value for each object: move it to the device?

        Raises:
            PrepareError: an object of another kind, or objects that do not belong together.
        """
        prepared = self._preparation.prepare(objects, device_placement)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(self, model: torch.nn.Module, device_placement: bool | None = None,
                      evaluation_mode: bool = False) -> torch.nn.Module:  # fmt: skip
        """Prepare one model; with `evaluation_mode` it gets no engine for gradients."""
        return self._preparation.model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        """Prepare one optimizer."""
        return self._preparation.optimizer(optimizer)

    def prepare_data_loader(self, data_loader: DataLoader[Any], device_placement: bool | None = None) -> PreparedLoader:
        """Prepare one loader."""
        return self._preparation.loader(data_loader, device_placement)

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

    # ---------------------------------------------------------------- the step

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[None]:
        """The context of one micro-batch: in it and after it, step and zero_grad act only at the end of a window.

        Args:
            models: the models that learn in it; none: all that are prepared. Different sets have windows of their own.
        """
        return MicroBatch(self._accumulation, models or tuple(self._preparation.models))

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
            weight: over how many items the loss was taken (tokens, say), on this rank; None: the valid samples of the
                micro-batch in iteration. Either on all ranks or on none.
            reduction: "mean": the loss is a mean over those items; "sum": their sum.
            kwargs: for torch.autograd.backward (retain_graph, create_graph, inputs).

        Raises:
            LossError: no scalar, no graph, an impossible weight.
        """
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
            self.precision.unscale(one.optimizer)

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
            torch.nn.utils.clip_grad_value_(self._preparation.unscaled(parameters), clip_value)

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
        """Does the current micro-batch end its window: will step() act?"""
        return self._accumulation.is_last

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
        chosen = loader if loader is not None else active[-1] if active else None
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
        return self._preparation.loading.use_seedable_sampler

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

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """torch's profiler around the block; traces go to `output_trace_dir`, one file a rank."""
        return profiling(profile_handler or self.options.profile, self.process_index)

    @property
    def project_dir(self) -> str | Path | None:
        """Where the run keeps its files."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | Path | None:
        """Where logs go."""
        return self.project_configuration.logging_dir

    def end_training(self) -> None:
        """Wait for everyone, forget everything prepared, and end the process group that Headway started."""
        self.wait_for_everyone()
        process.reset()


def _caller() -> str:
    """`file:line` of the code that builds the Accelerator, for errors about its arguments."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("headway."):
        frame = frame.f_back
    return "code" if frame is None else f"Accelerator(...) at {frame.f_code.co_filename}:{frame.f_lineno}"


def _windows(steps: int | None, plugin: GradientAccumulationPlugin | None, global_batch_size: int | None,
             origin: str) -> GradientAccumulationPlugin:  # fmt: skip
    if plugin is not None and steps is not None:
        raise ConfigError("give gradient_accumulation_steps or gradient_accumulation_plugin, not both")
    if global_batch_size is not None and (steps is not None or plugin is not None):
        raise ConfigError(
            f"global_batch_size={global_batch_size} derives the accumulation; do not give the steps as well"
        )
    if plugin is not None:
        return plugin
    chosen, _ = run_setting(
        "gradient_accumulation_steps", UNSET if steps is None else steps, 1, code_origin=origin, parse=int
    )
    return GradientAccumulationPlugin(num_steps=chosen)


def _loading(config: DataLoaderConfiguration | None, split_batches: bool) -> DataLoaderConfiguration:
    if config is not None and split_batches and not config.split_batches:
        raise ConfigError("split_batches=True contradicts dataloader_config.split_batches=False; set it in one place")
    return config or DataLoaderConfiguration(split_batches=split_batches)


def _project(folder: str | Path | None, config: ProjectConfiguration | None) -> ProjectConfiguration:
    if config is not None and folder is not None and config.project_dir not in (None, folder):
        raise ConfigError(
            f"project_dir={str(folder)!r} contradicts project_config.project_dir={str(config.project_dir)!r}"
        )
    chosen = config or ProjectConfiguration(project_dir=folder)
    if chosen.project_dir is None and folder is not None:
        chosen = ProjectConfiguration(project_dir=folder, logging_dir=chosen.logging_dir)
    return chosen.with_defaults()
