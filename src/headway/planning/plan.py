"""Plan one layout of a run: its memory, communication and checkpoint size (`headway.plan`)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from headway.core.config.engines import collect_options
from headway.core.config.mesh import Layout, parse_layout
from headway.core.config.values import check_count
from headway.errors import ConfigError, UnsupportedError
from headway.forecasting.device.devices import DEVICES
from headway.forecasting.tracing.recipe import check_precision
from headway.planning.dry_run.fake_collectives import PeerObjects
from headway.planning.dry_run.fake_group import refuse_parameter_offload
from headway.planning.dry_run.rank_update import StepDryRun, dry_run_rank, dry_run_stages
from headway.planning.dry_run.repeated import can_repeat_blocks, dry_run_repeated
from headway.planning.dry_run.step_drivers import BatchStep, Step
from headway.planning.dry_run.updates import find_fullest_owner
from headway.planning.make_model import make_model
from headway.planning.optimizers import Optimizer, resolve_optimizer
from headway.planning.outcome import Plan, build_plan

_ASSUMED_DEVICE = replace(DEVICES["h100"], cublas=0)
"""Device that a plan assumes when it adds the scratch memory of kernels.

cuBLAS's workspace is left out, because it is equal for all models.
"""


def plan(
    make: Callable[[], nn.Module],
    strategy: str | Layout,
    num_ranks: int,
    *,
    step: Step | None = None,
    optimizer: Optimizer = "adamw",
    precision: str = "no",
    tokens: int = 0,
    kwargs_handlers: list[Any] | None = None,
    machine_ranks: int = 8,
) -> Plan:
    """Plan the memory, communication and checkpoint size of each rank of a run.

    The model is prepared as in the run, but without allocating memory and without starting processes. Call it in one
    process, without an Accelerator. No accelerator is needed.

    Args:
        make: Function that makes the model. It is called within `init_empty_weights()`, where parameters take no
            memory.
        strategy: Layout, such as "fsdp", "hsdp=8" or "fsdp+tp=8", or a `Layout` object.
        num_ranks: World size of the run.
        step: Function from the model to the loss of one data shard's batch. It is called with tensors that have shapes
            but no values. A transformers model builds no causal mask, as in a run without padding, unless the step has a
            method `inputs()` whose result has position IDs. None (the default): the plan does not count communication,
            computation and activations.
        optimizer: Name of an optimizer, as for `headway.forecast`, or a function that makes a torch optimizer from
            parameters. "none" plans without an update. Default: "adamw".
        precision: "no" (the default), "bf16" or "fp16", like the Accelerator's `mixed_precision`.
        tokens: Tokens in the batch of one data shard, used to compute tokens per second. 0 (the default): unknown.
        kwargs_handlers: Options that the Accelerator accepts as `kwargs_handlers`: ShardingOptions,
            TensorParallelOptions, PipelineOptions, TorchContextParallelConfig, ActivationCheckpointing. None (the
            default): none. Offloaded activations are not counted, and `ShardingOptions(cpu_offload=True)` is refused.
        machine_ranks: Ranks per machine. Default: 8.

    Returns:
        The plan, whose sizes are in bytes. `print` shows it as a table. `total` is the memory of the fullest rank,
        `shares` that of each rank, and `saved` the size of a checkpoint.

    Raises:
        ConfigError: If the layout does not divide the ranks, or another argument is wrong.
        OptionalDependencyMissing: If the package of a named optimizer is not installed.
        PrepareError: If the model cannot be sharded.
        StateError: If this process has joined a process group.
        UnsupportedError: If the layout cannot be planned, parameters are offloaded, or the step cannot be run without
            values.

    Example::

        print(plan(build_model, "hsdp=8", num_ranks=16))
    """
    check_count(num_ranks=num_ranks, machine_ranks=machine_ranks)
    if tokens < 0:
        raise ConfigError(f"tokens={tokens!r}; give the tokens in a batch, or 0 if unknown")
    check_precision(precision)
    layout = _resolve_layout(strategy, num_ranks, machine_ranks) if isinstance(strategy, str) else strategy
    if layout.num_ranks != num_ranks:
        raise ConfigError(f"the layout {layout} takes {layout.num_ranks} ranks, but the run has {num_ranks}")
    name = strategy if isinstance(strategy, str) else "+".join(f"{k}={v}" for k, v in layout.sizes.items())
    options = collect_options(kwargs_handlers)
    refuse_parameter_offload(options)
    make_optimizer = resolve_optimizer(optimizer)

    def make_unmasked() -> nn.Module:
        return make_model(make, step.inputs() if isinstance(step, BatchStep) else None, argument="make")

    def dry_run(
        rank: int, peer_objects: PeerObjects | None = None, model_fn: Callable[[], nn.Module] = make_unmasked
    ) -> StepDryRun:
        return dry_run_rank(
            model_fn,
            layout,
            rank,
            step=step,
            make_optimizer=make_optimizer,
            precision=precision,
            options=options,
            machine_ranks=machine_ranks,
            peer_objects=peer_objects,
            device=_ASSUMED_DEVICE,
        )

    if layout.pp > 1:
        return build_plan(name, layout, dry_run_stages(layout, dry_run), tokens)
    if step is None:
        return build_plan(name, layout, (dry_run(0),), tokens)
    owner = find_fullest_owner(make_unmasked, optimizer, make_optimizer, layout, options, machine_ranks)
    extrapolated: StepDryRun | None = None
    # With owners, another block can change the owners of all parameters.
    if owner is None and can_repeat_blocks(options):
        extrapolated = dry_run_repeated(make_unmasked, lambda make_shortened: dry_run(0, model_fn=make_shortened))
    return build_plan(name, layout, (extrapolated or dry_run(owner or 0),), tokens)


def _resolve_layout(strategy: str, num_ranks: int, machine_ranks: int) -> Layout:
    """Return the layout that a strategy names, with the sizes of all axes.

    Args:
        strategy: Name of the layout, such as "fsdp+tp=8".
        num_ranks: World size.
        machine_ranks: Ranks per machine.

    Raises:
        ConfigError: If the layout does not divide the ranks.
        UnsupportedError: If the strategy is DeepSpeed.
    """
    requested = parse_layout(strategy)
    if requested.is_deepspeed:
        raise UnsupportedError(
            f"{strategy} is DeepSpeed's engine, which cannot be planned; plan fsdp instead, which shards what zero3 does"
        )
    return requested.resolve(num_ranks, machine_ranks)
