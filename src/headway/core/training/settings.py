"""Settings of an Accelerator, combined from its arguments, the command line, the environment and the config file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.config.compilation import Backend, TorchDynamoPlugin, resolve_compiler
from headway.core.config.engine_plugin import EnginePlugin
from headway.core.config.engines import EngineOptions, collect_options
from headway.core.config.guards import NonFinitePolicy, SpikePolicy
from headway.core.config.layout_choice import RequestedLayout
from headway.core.config.layout_request import LayoutPlugin
from headway.core.config.load import resolve_run_setting
from headway.core.config.preemption import Preemption, resolve_preemption
from headway.core.config.run import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    describe_caller,
    resolve_loading,
    resolve_project,
)
from headway.core.runtime.collectives.rng import resolve_generator_names
from headway.core.training.loss_policy import LossPolicy
from headway.core.training.prepared.scheduler import SchedulerStepRule


@dataclass(frozen=True)
class Settings:
    """Settings of one Accelerator, checked as far as that is possible without the other processes.

    `headway.core.training.build.build_run` applies them to the processes of the run. It also adds the settings that
    only the layout and its engine define, such as the precision in DeepSpeed's JSON.

    Attributes:
        origin: Description of the line that creates the Accelerator, for errors.
        is_on_cpu: Whether to compute on the CPU even if an accelerator is available.
        options: Options from `kwargs_handlers`: for DDP, autocast, GradScaler, the process group and layouts.
        layout: Requested layout.
        compilation: Settings of torch.compile.
        mixed_precision: Precision that the script requests, or None.
        accumulation_steps: Number of micro-batches per update that the script requests, or None.
        accumulation_plugin: Options of gradient accumulation that the script requests, or None.
        global_batch_size: Samples per update, from which the number of micro-batches is derived, or None.
        microbatching: "auto" to run a batch again in smaller micro-batches if memory runs out, else None.
        loss_policy: Policy for averaging losses. None: the policy of the Accelerator's `Behavior`.
        on_non_finite: Response to updates whose loss or gradients are not finite, or None.
        on_spike: Response to updates that are outliers, or None.
        loading: Settings for splitting, padding and moving batches.
        moves_objects: Whether to move models and batches to the device.
        rng_types: RNGs to synchronize across ranks at the start of each pass over a loader.
        scheduler_ticks: Rule for the number of scheduler steps per update, or its name. None: the usual rules.
        schedules_count_micro_batches: Whether the lengths of schedules are in micro-batches rather than updates.
        schedules_follow_updates: Whether a scheduler steps only when its optimizer does. If False, each step() call
            advances it.
        project: Locations of the run's files.
        log_with: Selection of trackers.
        preemption: Response to signals and to the end of the job's time limit. None: signals keep their usual effect.
        is_preemption_requested: Whether the script itself has passed `preemption`.
    """

    origin: str
    is_on_cpu: bool
    options: EngineOptions
    layout: RequestedLayout
    compilation: TorchDynamoPlugin
    mixed_precision: str | None
    accumulation_steps: int | None
    accumulation_plugin: GradientAccumulationPlugin | None
    global_batch_size: int | None
    microbatching: str | None
    loss_policy: LossPolicy | None
    on_non_finite: str | NonFinitePolicy | None
    on_spike: str | SpikePolicy | None
    loading: DataLoaderConfiguration
    moves_objects: bool
    rng_types: tuple[str, ...]
    scheduler_ticks: str | SchedulerStepRule | None
    schedules_count_micro_batches: bool
    schedules_follow_updates: bool
    project: ProjectConfiguration
    log_with: Any
    preemption: Preemption | None
    is_preemption_requested: bool


def resolve_settings(
    *,
    device_placement: bool,
    split_batches: bool,
    mixed_precision: str | None,
    gradient_accumulation_steps: int | None,
    cpu: bool | None,
    dataloader_config: DataLoaderConfiguration | None,
    deepspeed_plugin: EnginePlugin | None,
    fsdp_plugin: LayoutPlugin | None,
    torch_tp_plugin: LayoutPlugin | None,
    megatron_lm_plugin: None,
    rng_types: Sequence[str] | None,
    log_with: Any,
    project_dir: str | Path | None,
    project_config: ProjectConfiguration | None,
    gradient_accumulation_plugin: GradientAccumulationPlugin | None,
    step_scheduler_with_optimizer: bool,
    kwargs_handlers: list[Any] | None,
    dynamo_backend: Backend | None,
    dynamo_plugin: TorchDynamoPlugin | None,
    deepspeed_plugins: Mapping[str, EnginePlugin] | None,
    parallelism_config: LayoutPlugin | None,
    adjust_scheduler_to_accumulation: bool,
    scheduler_ticks: str | SchedulerStepRule | None,
    global_batch_size: int | None,
    loss_policy: LossPolicy | None,
    microbatching: str | None,
    on_non_finite: str | NonFinitePolicy | None,
    preemption: Preemption | bool | None,
    strategy: str | None,
    on_spike: str | SpikePolicy | None,
) -> Settings:
    """Combine an Accelerator's arguments with the settings of the launch. `Accelerator` documents the arguments.

    Raises:
        ConfigError: If settings are invalid or contradict each other.
        UnsupportedError: If a plugin or one of its fields is not supported.
    """
    origin = describe_caller()
    compilation = resolve_compiler(dynamo_backend, dynamo_plugin)
    options = collect_options(kwargs_handlers)
    layout = RequestedLayout(
        strategy,
        origin,
        fsdp_plugin=fsdp_plugin,
        parallelism_config=parallelism_config,
        torch_tp_plugin=torch_tp_plugin,
        megatron_lm_plugin=megatron_lm_plugin,
        deepspeed_plugin=deepspeed_plugin or deepspeed_plugins,
    )
    is_on_cpu, _ = resolve_run_setting("cpu", cpu, False, code_origin=origin)
    project = resolve_project(project_dir, project_config)
    return Settings(
        origin=origin,
        is_on_cpu=is_on_cpu,
        options=options,
        layout=layout,
        compilation=compilation,
        mixed_precision=str(mixed_precision) if mixed_precision else None,
        accumulation_steps=gradient_accumulation_steps,
        accumulation_plugin=gradient_accumulation_plugin,
        global_batch_size=global_batch_size,
        microbatching=microbatching,
        loss_policy=loss_policy,
        on_non_finite=on_non_finite,
        on_spike=on_spike,
        loading=resolve_loading(dataloader_config, split_batches),
        moves_objects=device_placement,
        rng_types=tuple(resolve_generator_names(rng_types or ())),
        scheduler_ticks=scheduler_ticks,
        schedules_count_micro_batches=adjust_scheduler_to_accumulation,
        schedules_follow_updates=step_scheduler_with_optimizer,
        project=project,
        log_with=log_with,
        preemption=resolve_preemption(preemption, project),
        is_preemption_requested=bool(preemption),
    )
