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


def choose_strategy(
    resolved: ResolvedLayout, collectives: Collectives, number_format: str = "no", is_deferred: bool = False
) -> Strategy:
    """Create the strategy that the run requests: one of Headway's own, or one that a package has registered.

    Args:
        resolved: Requested strategy, as text and as a layout, with the options that apply to it.
        collectives: Collectives over all ranks.
        number_format: Mixed precision of the run, such as "bf16". Default: "no".
        is_deferred: Whether gradients are reduced only once per accumulation window, after its last backward. Default:
            False.

    Raises:
        ConfigError: If the strategy is unknown, or the registered object is not a strategy.
        UnsupportedError: If the layout is not supported.
    """
    entry_point = mesh.find_entry_point(resolved.text)
    if entry_point is not None:
        return _load_registered(entry_point, resolved.text, collectives, resolved.options)
    return build_strategy(
        collectives,
        resolved.options,
        resolved.layout,
        number_format=number_format,
        is_deferred=is_deferred,
        engine=resolved.engine,
    )


def _load_registered(
    entry_point: "EntryPoint", text: str, collectives: Collectives, options: EngineOptions
) -> Strategy:
    """Import and create a strategy that a package has registered.

    Args:
        entry_point: Entry point of the package, which names the strategy's class or a function that creates it.
        text: Strategy as written by the user, such as "mirror=2".
        collectives: Collectives over all ranks.
        options: Options from the script's `kwargs_handlers`.

    Raises:
        ConfigError: If it cannot be imported, or lacks attributes of `Strategy`. Also if its `data_group` does not
            contain one process of each data shard, in order.
    """
    where = f"strategy {text!r}, registered as {entry_point.value}"
    try:
        factory = entry_point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}, cannot be loaded: {error}; fix or uninstall that package") from error
    strategy: Strategy = factory(collectives, text, options)
    required: set[str] = set()
    for base_class in Strategy.__mro__:
        # Attributes without a default are only annotated.
        required.update(vars(base_class), vars(base_class).get("__annotations__", {}))
    missing = sorted(name for name in required if not name.startswith("_") and not hasattr(strategy, name))
    if missing:
        raise ConfigError(
            f"{where}, lacks {', '.join(missing)}; derive its class from SingleStrategy or DDPStrategy, which have them all"
        )
    group, shard = strategy.data_group, strategy.data_shard
    if (group.rank, group.world_size) != (shard.index, shard.count):
        raise ConfigError(
            f"{where}: on rank {collectives.rank} data_shard is {shard.index} of {shard.count}, but this process is rank "
            f"{group.rank} of {group.world_size} in data_group, which must contain one process of each shard, in order"
        )
    return strategy


def build_strategy(
    collectives: Collectives,
    options: EngineOptions,
    layout: Layout,
    number_format: str = "no",
    is_deferred: bool = False,
    engine: EnginePlugin | None = None,
    device_type: str | None = None,
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
        device_type: Device type for which number formats are chosen. If None, this process's device type.

    Raises:
        UnsupportedError: If the layout, or its combination with the options, is not supported.
    """
    if engine is not None:
        strategy: Strategy = engine.build_strategy(collectives, options, number_format, is_deferred)
        return strategy
    if not layout.is_replicas_only:
        _check_combination(layout, options, number_format, is_deferred)
        return _build_model_parallel(collectives, options, layout, number_format, device_type)
    if collectives.world_size > 1 and is_deferred:
        return ReplicaStrategy(collectives, options.ddp)
    if collectives.world_size > 1:
        return DDPStrategy(collectives, options.ddp)
    return SingleStrategy(collectives)


def _check_combination(layout: Layout, options: EngineOptions, number_format: str, is_deferred: bool) -> None:
    """Raise an error if a layout with more than plain data parallelism does not support the options of the run.

    Args:
        layout: Layout of the run.
        options: Options of the run's engines.
        number_format: Mixed precision of the run, such as "fp8".
        is_deferred: Whether gradients are reduced only at the end of a window, as `microbatching="auto"` requires.

    Raises:
        UnsupportedError: If the layout does not support automatic micro-batching, float8, or options of sharding and
            tensor parallelism in a pipeline.
    """
    sharding = options.sharding or ShardingOptions()
    float8 = (options.float8 or Float8Options()) if number_format == "fp8" else None
    if is_deferred:
        _check_automatic_microbatching(layout, sharding, float8)
    if float8 is not None:
        _check_float8(layout, sharding, float8)
    if layout.pp > 1:
        _check_pipeline_options(sharding, options.tensor or TensorParallelOptions())


def _build_model_parallel(
    collectives: Collectives, options: EngineOptions, layout: Layout, number_format: str, device_type: str | None
) -> Strategy:
    """Create the strategy of a layout in which no rank has the full model: shards, a pipeline, or both.

    Args:
        collectives: Collectives over all ranks.
        options: Options of the run's engines.
        layout: Layout of the run.
        number_format: Mixed precision of the run, such as "bf16" or "no".
        device_type: Device type of the run, such as "cuda". None: this process's device type.
    """
    sharding_strategy: Strategy | None = None
    if layout.pp == 1 or layout.sizes.keys() - {"pp", "replicate"}:
        # Imported here, because it imports torch's compiler, which takes one second.
        from headway.core.strategies.fully_sharded.mesh import MeshStrategy

        sharding_strategy = MeshStrategy(
            collectives,
            layout,
            options.sharding or ShardingOptions(),
            number_format=number_format,
            tensor=options.tensor,
            context=options.context,
            float8=options.float8,
            device_type=device_type,
        )
        if layout.pp == 1:
            return sharding_strategy
    create_pipeline: Callable[..., Strategy] = extensions.load("strategy", "pp")
    return create_pipeline(collectives, layout, options.pipeline or PipelineOptions(), sharding_strategy)


def _check_pipeline_options(sharding: ShardingOptions, tensor: TensorParallelOptions) -> None:
    """Raise an error if a pipeline does not support these options of sharding and tensor parallelism.

    Raises:
        UnsupportedError: If `loss_parallel` is True, or `reshard_after_forward` is True or a number of ranks.
    """
    if tensor.loss_parallel:
        raise UnsupportedError(
            "TensorParallelOptions(loss_parallel=True) leaves logits sharded, but a pipeline sends them to all its ranks; "
            "leave it out, or use strategy='fsdp+tp'"
        )
    if sharding.reshard_after_forward not in (None, False):
        raise UnsupportedError(
            f"reshard_after_forward={sharding.reshard_after_forward} gathers parameters for each micro-batch, but the ranks of a "
            "pipeline may have different numbers of micro-batches. Leave it out. Headway then keeps gathered parameters until the "
            "gradients are summed"
        )


def _check_float8(layout: Layout, sharding: ShardingOptions, float8: Float8Options) -> None:
    """Raise an error if float8 does not support the layout, or if the options request an impossible float8 all-gather.

    Args:
        layout: Layout of the run.
        sharding: Options of sharding.
        float8: Options of float8.

    Raises:
        UnsupportedError: If the layout has expert or context parallelism, or a pipeline with tensor parallelism. Also
            if the float8 all-gather is requested in a pipeline, or together with an integer `reshard_after_forward`.
            The message names the supported layouts.
    """
    reshard, gathers_float8 = sharding.reshard_after_forward, bool(float8.all_gather)
    unsupported = ""
    if layout.ep > 1:
        unsupported = "expert parallelism (ep): experts would compute in bf16"
    elif layout.cp > 1:
        unsupported = "context parallelism (cp), whose parts of sequences would have scales of their own"
    elif layout.pp > 1 and layout.tp > 1:
        unsupported = "pipelines with tensor parallelism (pp+tp)"
    elif layout.pp > 1 and gathers_float8:
        unsupported = "fsdp_all_gather=True in pipelines (pp), which gather weights once per window"
    elif gathers_float8 and not isinstance(reshard, bool | None):
        unsupported = f"fsdp_all_gather=True with reshard_after_forward={reshard}"
    if unsupported:
        raise UnsupportedError(
            f"mixed_precision='fp8' does not support {unsupported}. Use Float8Options(fsdp_all_gather=False) or leave it out, "
            "with one of the layouts 'ddp', 'fsdp', 'hsdp', 'tp', 'fsdp+tp=2', 'pp' and 'pp=2+fsdp'; or mixed_precision='bf16'"
        )


def _check_automatic_microbatching(layout: Layout, sharding: ShardingOptions, float8: Float8Options | None) -> None:
    """Raise an error if the layout or the options do not support `microbatching="auto"`.

    A rank that runs out of memory must be able to join all collectives of its peers, which would otherwise wait forever.

    Args:
        layout: Layout of the run.
        sharding: Options of sharding.
        float8: Options of float8, or None if the run does not use it.

    Raises:
        UnsupportedError: If the layout has pipeline, expert, context or tensor parallelism, or no shards. Also if weights
            are gathered in float8, or `reshard_after_forward` is a number of ranks.
    """
    others = [axis for axis in ("pp", "ep", "cp", "tp") if getattr(layout, axis) > 1]
    if others:
        raise UnsupportedError(
            f"microbatching='auto' does not work with {', '.join(others)}: a rank whose memory ran out cannot take part in the "
            "exchanges of activations that the others wait in. Leave it out, or use strategy='ddp', 'fsdp' or 'hsdp'"
        )
    if layout.shard < 2:
        raise UnsupportedError(
            "microbatching='auto' needs sharded or unsharded models, but this layout has replicas of one shard each; use "
            "strategy='ddp'"
        )
    if float8 is not None and float8.recipe == "tensorwise" and float8.all_gather is not False:
        raise UnsupportedError(
            "microbatching='auto' does not work with weights that are gathered in float8, whose scales are exchanged in forward; "
            "pass kwargs_handlers=[Float8Options(fsdp_all_gather=False)]"
        )
    reshard = sharding.reshard_after_forward
    if reshard is not None and not isinstance(reshard, bool):
        raise UnsupportedError(
            f"microbatching='auto' does not work with ShardingOptions(reshard_after_forward={reshard}), which gathers "
            "among other ranks in backward; use True, False or None, or leave microbatching off"
        )
