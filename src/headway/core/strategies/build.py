"""Functions that create a run's strategy, from the core, from an extension, or from a package that registers one."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from headway.core import extensions
from headway.core.config import mesh
from headway.core.config.engine_plugin import EnginePlugin
from headway.core.config.engines import EngineOptions
from headway.core.config.float8 import Float8Options
from headway.core.config.layout_choice import ResolvedLayout
from headway.core.config.mesh import Layout
from headway.core.config.parallelism import PipelineOptions, ShardingOptions, TensorParallelOptions
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.base import SingleStrategy, Strategy
from headway.core.strategies.ddp import DDPStrategy
from headway.core.strategies.replica import ReplicaStrategy
from headway.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from headway.core.strategies.fully_sharded.mesh import MeshStrategy


def choose_strategy(
    chosen: ResolvedLayout, collectives: Collectives, number_format: str = "no", is_deferred: bool = False
) -> Strategy:
    """Create the strategy that the run requests: one of Headway's own, or one that a package has registered.

    Args:
        chosen: Requested strategy, as text and as a layout.
        collectives: Collectives over all ranks.
        number_format: Mixed precision of the run, such as "bf16". Default: "no".
        is_deferred: Whether gradients are reduced only once per accumulation window, after its last backward. Default:
            False.

    Raises:
        ConfigError: If the strategy is unknown, or the registered object is not a strategy.
        UnsupportedError: If the layout is not supported.
    """
    registered = mesh.find_entry_point(chosen.text)
    if registered is not None:
        return _load_registered(registered, chosen.text, collectives, chosen.options)
    return build_strategy(
        collectives,
        chosen.options,
        chosen.layout,
        number_format=number_format,
        is_deferred=is_deferred,
        engine=chosen.engine,
    )


def _load_registered(registered: "EntryPoint", text: str, collectives: Collectives, options: EngineOptions) -> Strategy:
    """Import and create a strategy that a package has registered.

    Raises:
        ConfigError: If it cannot be imported, lacks attributes of `Strategy`, or divides the data inconsistently.
    """
    where = f"strategy {text!r}, registered as {registered.value}"
    try:
        make = registered.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}, cannot be loaded: {error}; fix or uninstall that package") from error
    made: Strategy = make(collectives, text, options)
    members = {name for kind in Strategy.__mro__ for name in (*vars(kind), *vars(kind).get("__annotations__", {}))}
    missing = sorted(name for name in members if not name.startswith("_") and not hasattr(made, name))
    if missing:
        raise ConfigError(
            f"{where}, lacks {', '.join(missing)}; derive its class from SingleStrategy or DDPStrategy, which have them all"
        )
    group, shard = made.data_group, made.data_shard
    if (group.rank, group.world_size) != (shard.index, shard.count):
        raise ConfigError(
            f"{where}: on rank {collectives.rank} data_shard is {shard.index} of {shard.count}, but this process is rank "
            f"{group.rank} of {group.world_size} in data_group, which must contain one process of each shard, in order"
        )
    return made


def build_strategy(
    collectives: Collectives,
    options: EngineOptions,
    layout: Layout,
    number_format: str = "no",
    is_deferred: bool = False,
    engine: EnginePlugin | None = None,
    computes_on: str | None = None,
) -> Strategy:
    """Create the strategy for a layout. In a single-process run without an engine, this is `SingleStrategy`.

    Args:
        collectives: Collectives over all ranks.
        options: Options of DDP, FSDP and the other components.
        layout: Number of ranks along each axis.
        number_format: Mixed precision of the run, such as "bf16". Default: "no".
        is_deferred: Whether gradients are reduced only once per accumulation window, after its last backward. Default:
            False.
        engine: Settings of an engine such as DeepSpeed that replaces torch's DDP and FSDP. Default: None.
        computes_on: Device type for which number formats are chosen. If None, this process's device type.

    Raises:
        UnsupportedError: If the layout, or its combination with the options, is not supported.
    """
    if engine is not None:
        built: Strategy = engine.build_strategy(collectives, options, number_format, is_deferred)
        return built
    if not layout.is_replicas_only:
        _check_combination(layout, options, number_format, is_deferred)
        if layout.pp > 1:
            return _build_pipeline(collectives, options, layout, number_format, computes_on)
        return _build_mesh_strategy(collectives, options, layout, number_format, computes_on)
    if collectives.world_size > 1 and is_deferred:
        return ReplicaStrategy(collectives, options.ddp)
    if collectives.world_size > 1:
        return DDPStrategy(collectives, options.ddp)
    return SingleStrategy(collectives)


def _check_combination(layout: Layout, options: EngineOptions, number_format: str, is_deferred: bool) -> None:
    """Raise an error if a layout with more than plain data parallelism does not support the options of the run.

    Raises:
        UnsupportedError: If the combination is not supported.
    """
    float8 = (options.float8 or Float8Options()) if number_format == "fp8" else None
    if is_deferred:
        _check_replayed(layout, options.sharding or ShardingOptions(), float8)
    if float8 is not None:
        _check_float8(layout, options.sharding or ShardingOptions(), float8)
    if layout.pp > 1:
        _check_stages(options.sharding or ShardingOptions(), options.tensor or TensorParallelOptions())


def _build_mesh_strategy(
    collectives: Collectives, options: EngineOptions, layout: Layout, number_format: str, computes_on: str | None
) -> "MeshStrategy":
    from headway.core.strategies.fully_sharded.mesh import (
        MeshStrategy,  # imports torch's compiler, which takes one second
    )

    return MeshStrategy(
        collectives,
        layout,
        options.sharding or ShardingOptions(),
        number_format=number_format,
        tensor=options.tensor,
        context=options.context,
        float8=options.float8,
        computes_on=computes_on,
    )


def _build_pipeline(
    collectives: Collectives, options: EngineOptions, layout: Layout, number_format: str, computes_on: str | None
) -> Strategy:
    """Create the strategy of a pipeline. If the layout has axes other than pp and replicas, stages are sharded, too."""
    is_spread = bool(layout.sizes.keys() - {"pp", "replicate"})
    spread = _build_mesh_strategy(collectives, options, layout, number_format, computes_on) if is_spread else None
    make: Callable[..., Strategy] = extensions.load("strategy", "pp")
    return make(collectives, layout, options.pipeline or PipelineOptions(), spread)


def _check_stages(sharding: ShardingOptions, tensor: TensorParallelOptions) -> None:
    """Raise an error if pipeline stages cannot be sharded with these options.

    Raises:
        UnsupportedError: If the options do not support pipeline stages.
    """
    if tensor.loss_parallel:
        raise UnsupportedError(
            "TensorParallelOptions(loss_parallel=True) leaves logits split, which a pipeline hands to all its ranks; leave it out, "
            "or use strategy='fsdp+tp'"
        )
    if sharding.reshard_after_forward not in (None, False):
        raise UnsupportedError(
            f"reshard_after_forward={sharding.reshard_after_forward} gathers parameters for each micro-batch, but the ranks of a "
            "pipeline may have different numbers of micro-batches. Leave it out. Headway then keeps gathered parameters until the "
            "gradients are summed"
        )


def _check_float8(layout: Layout, sharding: ShardingOptions, float8: Float8Options) -> None:
    """Raise an error if float8 does not support the layout, or if the options request an impossible float8 all-gather.

    Raises:
        UnsupportedError: If the combination is not supported. The message names the supported ones.
    """
    reshards, gathers = sharding.reshard_after_forward, bool(float8.all_gather)
    checks = {
        "expert parallelism (ep): experts would compute in bf16": layout.ep > 1,
        "context parallelism (cp), whose parts of sequences would have scales of their own": layout.cp > 1,
        "pipelines with tensor parallelism (pp+tp)": layout.pp > 1 and layout.tp > 1,
        "fsdp_all_gather=True in pipelines (pp), which gather weights once per window": layout.pp > 1 and gathers,
        f"fsdp_all_gather=True with reshard_after_forward={reshards}": gathers
        and not isinstance(reshards, bool | None),
    }
    refused = next((text for text, is_refused in checks.items() if is_refused), None)
    if refused is not None:
        raise UnsupportedError(
            f"mixed_precision='fp8' does not support {refused}. Use Float8Options(fsdp_all_gather=False) or leave it out, with one "
            "of the layouts 'ddp', 'fsdp', 'hsdp', 'tp', 'fsdp+tp=2', 'pp' and 'pp=2+fsdp'; or mixed_precision='bf16'"
        )


def _check_replayed(layout: Layout, sharding: ShardingOptions, float8: Float8Options | None) -> None:
    """Raise an error if a rank that runs out of memory could not join all collectives of the layout.

    Without this check, its peers would wait in a collective forever.

    Raises:
        UnsupportedError: If the layout contains collectives that such a rank cannot join.
    """
    others = [axis for axis in ("pp", "ep", "cp", "tp") if getattr(layout, axis) > 1]
    if others:
        raise UnsupportedError(
            f"microbatching='auto' does not work with {', '.join(others)}: a rank whose memory ran out cannot take part in the "
            "exchanges of activations that the others wait in. Leave it out, or use strategy='ddp', 'fsdp' or 'hsdp'"
        )
    if layout.shard < 2:
        raise UnsupportedError(
            "microbatching='auto' needs shards or whole models, but this layout has replicas of one shard each; use strategy='ddp'"
        )
    if float8 is not None and float8.recipe == "tensorwise" and float8.all_gather is not False:
        raise UnsupportedError(
            "microbatching='auto' does not work with weights that are gathered in float8, whose scales are exchanged in forward; "
            "pass kwargs_handlers=[Float8Options(fsdp_all_gather=False)]"
        )
    kept = sharding.reshard_after_forward
    if kept is not None and not isinstance(kept, bool):
        raise UnsupportedError(
            f"microbatching='auto' does not work with ShardingOptions(reshard_after_forward={kept}), which gathers among other ranks "
            "in backward; use True, False or None, or leave microbatching off"
        )
