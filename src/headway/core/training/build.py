"""Functions that create a `Run`, its `TrainingStep` and its `Preparation` from the Accelerator's settings.

The Accelerator calls these functions in the order in which they are defined.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from headway.common import scope, tracebacks
from headway.core import extensions
from headway.core.config.float8 import Float8Options
from headway.core.config.load import resolve_run_setting
from headway.core.config.run import resolve_accumulation, splits_batches_automatically
from headway.core.data.batch_reads import BatchReads
from headway.core.data.loader import LoaderEvents
from headway.core.memory.oom import EmergencyReserve, is_out_of_memory
from headway.core.precision.build import build_precision
from headway.core.precision.mixed import halve_embeddings
from headway.core.runtime import events, heartbeat_file, process
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.control_plane.attendance import Attendance
from headway.core.runtime.control_plane.control import note_progress
from headway.core.runtime.dry_run import is_dry_run
from headway.core.runtime.process import ProcessRuntime
from headway.core.runtime.seed import DataShardIndex
from headway.core.strategies.build import choose_strategy
from headway.core.training.behavior import Behavior
from headway.core.training.checks.bypass import BypassDetector
from headway.core.training.checks.notices import NonFiniteNotice
from headway.core.training.checks.replicas import ReplicaCheck
from headway.core.training.checks.row_counts import RowCountCheck
from headway.core.training.guard import StepGuard
from headway.core.training.hooks import StepHooks
from headway.core.training.prepared.objects import PreparedObjects
from headway.core.training.prepared.prepare import Preparation
from headway.core.training.prepared.registry import AcceleratorRegistration, AcceleratorRegistry
from headway.core.training.prepared.scheduler import choose_rule
from headway.core.training.run import Run
from headway.core.training.seen_data import SeenData
from headway.core.training.settings import Settings
from headway.core.training.step import TrainingStep
from headway.core.training.update_clock import UpdateClock
from headway.core.training.whole_step import WholeStep

ModelTransform = Callable[[torch.nn.Module], Any]


def start_process(settings: Settings) -> ProcessRuntime:
    """Start this process's runtime, and its process group if there are several processes.

    Raises:
        LaunchError: If the number of processes that joined differs from the number that the launcher announced.
        ConfigError: If this process's runtime already computes on another device, or if code and command line disagree
            about the timeout.
        DeviceUnavailable: If a requested accelerator cannot be used by this process.
    """
    group = settings.options.process_group
    return process.start(
        cpu=settings.is_on_cpu, backend=group.backend, init_method=group.init_method, timeout=group.timeout
    )


def build_run(
    settings: Settings,
    runtime: ProcessRuntime,
    behavior: Behavior,
) -> Run:
    """Create the `Run` that the settings describe.

    Args:
        settings: Settings of the Accelerator.
        runtime: Runtime of this process.
        behavior: Rules of the Accelerator, such as how losses are averaged.

    Raises:
        ConfigError: If the settings contradict each other, or do not fit the number of processes.
        UnsupportedError: If the layout or the precision is not supported.
    """
    collectives = Collectives(runtime)
    layout = settings.layout.resolve(settings.options, runtime.world_size, runtime.local_world_size)
    mixed_precision, _ = resolve_run_setting(
        "mixed_precision",
        settings.mixed_precision,
        layout.default_precision,
        code_origin=settings.origin,
    )
    steps = settings.accumulation_steps
    if steps is None and settings.accumulation_plugin is None:
        steps = layout.default_num_steps
    accumulation = resolve_accumulation(
        steps, settings.accumulation_plugin, settings.global_batch_size, settings.origin
    )
    replays_batches = splits_batches_automatically(settings.microbatching, accumulation)
    strategy = choose_strategy(layout, collectives, mixed_precision, replays_batches)
    # An engine such as DeepSpeed scales losses itself.
    scaler_options = layout.options.disable_loss_scaling() if strategy.capabilities.scales_losses else layout.options
    prepared = PreparedObjects(strategy.free_gathered)
    reads = BatchReads(partial(runtime.scope.get_or_create(AcceleratorRegistry).find_other_loader, prepared))
    is_watched = heartbeat_file.is_watched() or runtime.world_size > 1
    return Run(
        runtime=runtime,
        collectives=collectives,
        layout=layout,
        mixed_precision=mixed_precision,
        accumulation=accumulation,
        compilation=settings.compilation,
        replays_batches=replays_batches,
        strategy=strategy,
        precision=build_precision(mixed_precision, runtime.hardware, scaler_options, strategy),
        clock=UpdateClock(),
        seen=SeenData(reads, collectives, strategy),
        events=LoaderEvents(reads),
        prepared=prepared,
        windows=behavior.windows(
            accumulation.num_steps,
            reads,
            accumulation.sync_with_dataloader,
            accumulation.sync_each_batch,
            clips_partial_gradients=behavior.clips_partial_gradients,
        ),
        hooks=StepHooks(
            micro_batch_begun=[note_progress] if is_watched else [],
            phases=scope.get_or_create(events.Listeners).phase_listeners,
        ),
    )


# ---------------------------------------------------------------- the step


def build_step(run: Run, settings: Settings, behavior: Behavior) -> TrainingStep:
    """Create the training step of a run with its `StepGuard`, and register the checks that compare ranks.

    Args:
        run: Run of the Accelerator.
        settings: Settings of the Accelerator.
        behavior: Rules of the Accelerator, such as how losses are averaged.

    Raises:
        ConfigError: If `on_non_finite` or `on_spike` names an unknown action.
        UnsupportedError: If the strategy does not support a requested feature, such as automatic micro-batching.
    """
    guard = _choose_guard(run, settings)
    policy = behavior.loss_policy
    if run.runtime.world_size > 1:
        run.hooks.micro_batch_begun.append(run.runtime.scope.get_or_create(Attendance).count_micro_batch)
        _compare_ranks(run, is_weighed=policy.weighs_losses, refuses_drift=behavior.refuses_drift)
    make_step = extensions.load("feature", "microbatching") if run.replays_batches else WholeStep
    step: TrainingStep = make_step(run, policy, guard)
    return step


def _choose_guard(run: Run, settings: Settings) -> StepGuard:
    """Return the `StepGuard` that applies `on_non_finite` or `on_spike`, or one that only reports non-finite losses."""
    if settings.on_spike is not None:
        make_guard = extensions.load("feature", "on_spike")
        guard: StepGuard = make_guard(settings.on_spike, settings.on_non_finite, run, lambda: run)
        return guard
    if settings.on_non_finite is not None:
        from headway.core.training.checks.finite import FiniteGuard

        return FiniteGuard(settings.on_non_finite, run)
    if is_dry_run():  # the tensors of a forecast have no values
        return StepGuard(run)
    are_updates_skipped = run.precision.name == "fp16" and run.options.scaler.enabled
    return StepGuard(run, NonFiniteNotice(run.windows, run.clock, run.runtime, are_updates_skipped))


def _compare_ranks(run: Run, *, is_weighed: bool, refuses_drift: bool) -> None:
    """Register the checks that replicas have not diverged and that the batches of all ranks have equal numbers of rows.

    Args:
        run: Run of the Accelerator.
        is_weighed: Whether losses are weighted by their numbers of rows. Row counts are only checked if this is true.
        refuses_drift: Whether a difference between ranks is an error. If False, it causes one warning.
    """
    hooks = run.hooks
    row_count_check = RowCountCheck(run.windows)
    replica_check = ReplicaCheck(run.prepared, run.strategy, row_count_check, refuses_drift)
    hooks.gradients_final.append(replica_check.count_reduction)
    # With automatic micro-batching, one update can be attempted several times. All ranks are at the same position right
    # after the reduction of gradients, so the replicas are compared there.
    checks = hooks.gradients_final if run.replays_batches else hooks.before_update
    checks.append(replica_check.check)
    if run.strategy.data_shard.count > 1 and is_weighed:
        hooks.before_forward.append(row_count_check.record_rows)
        hooks.unweighed.append(row_count_check.warn_of_varying_rows)


# ---------------------------------------------------------------- prepare


def build_preparation(run: Run, settings: Settings, step: TrainingStep, behavior: Behavior) -> Preparation:
    """Create the object that prepares the run's models, optimizers, loaders and schedulers.

    Args:
        run: Run of the Accelerator.
        settings: Settings of the Accelerator.
        step: Training step of the run.
        behavior: Rules of the Accelerator, such as its classes of optimizers and schedulers.

    Raises:
        ConfigError: If the rule for scheduler steps is unknown, or if two settings select it.
    """
    counts_micro_batches = settings.schedules_count_micro_batches or run.accumulation.adjust_scheduler
    # If an update has as many samples as that of a single-process loop, that loop makes as many updates as this run.
    has_equal_updates = settings.loading.split_batches or (
        settings.global_batch_size is not None and not counts_micro_batches
    )
    num_processes = 1 if has_equal_updates else run.strategy.data_shard.count
    return Preparation(
        step=step,
        accelerators=run.runtime.scope.get_or_create(AcceleratorRegistry),
        loading=settings.loading,
        moves_objects=settings.moves_objects,
        rule=choose_rule(settings.scheduler_ticks, counts_micro_batches, num_processes),
        follows_optimizer=settings.schedules_follow_updates,
        rng_types=settings.rng_types,
        global_batch_size=settings.global_batch_size,
        transforms=partial(list_transforms, run),
        behavior=behavior,
    )


def list_transforms(run: Run, is_trained: bool) -> tuple[ModelTransform, ...]:
    """Return the transforms to apply to a model before it is wrapped, in order.

    They convert layers to float8, cast the outputs of embeddings to autocast's dtype, enable activation checkpointing,
    and compile the model. Transforms that the run does not request are left out. Activation checkpointing is also left
    out for models that are only evaluated.

    Args:
        run: Run of the Accelerator.
        is_trained: Whether the model is trained. If False, it is only evaluated.
    """
    options = run.options
    device = run.runtime.device
    transforms: list[ModelTransform] = []
    if run.mixed_precision == "fp8":
        float8 = extensions.load("feature", "float8")
        ranks = run.collectives if is_trained else None
        transforms.append(partial(float8.convert_model, options=options.float8 or Float8Options(), ranks=ranks))
    if options.autocast.half_residual:
        transforms.append(halve_embeddings)
    if options.checkpointing is not None and is_trained:
        checkpoint_activations = extensions.load("feature", "checkpoint_activations")
        transforms.append(partial(checkpoint_activations, plan=options.checkpointing, device=device))
    if run.compilation.compiles:
        compile_model = extensions.load("feature", "compile")
        transforms.append(
            partial(
                compile_model,
                plugin=run.compilation,
                device=device,
                is_gathered=is_trained and not run.strategy.capabilities.lone_forward,
                accumulates=run.windows.num_steps > 1,
            )
        )
    return tuple(transforms)


# ---------------------------------------------------------------- the process


def join_process(run: Run, step: TrainingStep, preparation: Preparation) -> AcceleratorRegistration:
    """Register a run with its process, for shutdown and for reports of uncaught errors.

    Shutdown then releases the prepared objects, and uncaught out-of-memory errors get a memory report.

    Args:
        run: Run of the Accelerator.
        step: Training step of the run.
        preparation: Preparation whose objects are released at shutdown.

    Returns:
        The registration. The run stays registered until this object is freed.
    """
    runtime = run.runtime
    runtime.scope.get_or_create(Attendance).start(runtime)
    process.release_at_end(preparation.release)
    runtime.scope.get_or_create(DataShardIndex).index = run.strategy.data_shard.index
    scope.get_or_create(EmergencyReserve).allocate_reserve()
    scope.get_or_create(tracebacks.ExceptionHook).add_note(_explain_memory_error)
    return runtime.scope.get_or_create(BypassDetector).join(step)


def _explain_memory_error(error: BaseException) -> str:
    """Return a report of memory use for an uncaught out-of-memory error, or "" for any other error."""
    if not is_out_of_memory(error):
        return ""
    scope.get_or_create(EmergencyReserve).release()
    return str(extensions.load("feature", "memory_report").explain_unless_noted(error))
