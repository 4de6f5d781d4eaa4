"""Which strategy a run uses: the one place that names them; and a pipeline for inference, without a run."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headway.config import mesh
from headway.config.engines import EngineOptions, Float8Options
from headway.config.layout_choice import ResolvedLayout
from headway.config.mesh import Layout
from headway.config.parallelism import PipelineOptions, ShardingOptions, TensorParallelOptions
from headway.errors import ConfigError, UnsupportedError
from headway.runtime import process
from headway.runtime.collectives.checked import Collectives
from headway.strategies.base import SingleStrategy, Strategy
from headway.strategies.ddp import DDPStrategy
from headway.strategies.deepspeed.plugin import DeepSpeedPlugin
from headway.strategies.replica import ReplicaStrategy

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def choose_strategy(
    chosen: ResolvedLayout, collectives: Collectives, number_format: str = "no", is_deferred: bool = False
) -> Strategy:
    """The strategy that is asked for: a layout of Headway's own, or what a package has registered.

    Args:
        chosen: as it is written, and what that comes to on these processes.
        collectives: all processes.
        number_format: as for `build_strategy`.
        is_deferred: as for `build_strategy`.

    Raises:
        ConfigError: neither of both; or what was registered is no strategy.
        UnsupportedError: a layout that is not there yet.
    """
    registered = mesh.find(chosen.text)
    if registered is not None:
        return _load(registered, chosen.text, collectives, chosen.options)
    return build_strategy(collectives, chosen.options, chosen.layout, number_format, is_deferred, chosen.deepspeed)


def _load(registered: "EntryPoint", text: str, collectives: Collectives, options: EngineOptions) -> Strategy:
    where = f"strategy {text!r}, registered as {registered.value}"
    try:
        make = registered.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}, cannot be loaded: {error}; fix or uninstall that package") from error
    made: Strategy = make(collectives, text, options)
    wanted = {*Strategy.__annotations__, *(name for name in vars(Strategy) if not name.startswith("_"))}
    missing = sorted(name for name in wanted if not hasattr(made, name))
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
    deepspeed: DeepSpeedPlugin | None = None,
    computes_on: str | None = None,
) -> Strategy:
    """The layout's strategy; plain PyTorch where there is one process.

    Args:
        collectives: the processes.
        options: of the engines.
        layout: how many of them each axis takes.
        number_format: the run's mixed_precision.
        is_deferred: gradients travel once a window, after its last backward, and never while it runs.
        deepspeed: the settings of DeepSpeed, where that is the engine.
        computes_on: the type of device whose number formats are chosen; None: this process's own.

    Raises:
        UnsupportedError: a layout that is not there yet.
    """
    if deepspeed is not None and number_format == "fp8":
        raise UnsupportedError(
            "mixed_precision='fp8' is not supported with DeepSpeed; use strategy='fsdp', or mixed_precision='bf16'"
        )
    if deepspeed is not None:
        return _deepspeed(collectives, options, deepspeed, is_deferred)
    if not layout.is_replicas_only:
        mesh.check_served(layout)
        sharding = options.sharding or ShardingOptions()
        if is_deferred:
            _check_replayed(layout, sharding, (options.float8 or Float8Options()) if number_format == "fp8" else None)
        if number_format == "fp8" and max(layout.pp, layout.ep) > 1:
            raise UnsupportedError(
                f"mixed_precision='fp8' does not support {'pipelines (pp)' if layout.pp > 1 else 'expert parallelism (ep)'} yet; "
                "use strategy='fsdp' or mixed_precision='bf16'"
            )
        if layout.pp > 1:
            from headway.strategies.pipeline.strategy import PipelineStrategy

            pipeline = options.pipeline or PipelineOptions()
            _check_stages(sharding, options.tensor or TensorParallelOptions())
            if not layout.sizes.keys() - {"pp", "replicate"}:
                return PipelineStrategy(collectives, layout, pipeline)
        from headway.strategies.fully_sharded.mesh import MeshStrategy  # brings torch's compiler with it

        spread = MeshStrategy(
            collectives, layout, sharding, number_format, options.tensor, options.context, options.float8, computes_on
        )
        return PipelineStrategy(collectives, layout, pipeline, spread) if layout.pp > 1 else spread
    if collectives.world_size > 1 and is_deferred:
        return ReplicaStrategy(collectives, options.ddp)
    if collectives.world_size > 1:
        return DDPStrategy(collectives, options.ddp)
    return SingleStrategy(collectives)


def _check_stages(sharding: ShardingOptions, tensor: TensorParallelOptions) -> None:
    """Can stages be spread in this way?

    Raises:
        UnsupportedError: they cannot.
    """
    if tensor.loss_parallel:
        raise UnsupportedError(
            "TensorParallelOptions(loss_parallel=True) leaves logits split, which a pipeline hands to all its ranks; leave it out, "
            "or use strategy='fsdp+tp'"
        )
    if sharding.reshard_after_forward not in (None, False):
        raise UnsupportedError(
            f"reshard_after_forward={sharding.reshard_after_forward} would gather for each micro-batch, and ranks of a pipeline may "
            "have different numbers of them; leave it out: what is gathered stays until gradients are summed"
        )


def _check_replayed(layout: Layout, sharding: ShardingOptions, float8: Float8Options | None) -> None:
    """Can a rank whose memory ran out stand in for itself in all that the others still exchange?

    Raises:
        UnsupportedError: it cannot.
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


def _deepspeed(
    collectives: Collectives, options: EngineOptions, plugin: DeepSpeedPlugin, is_deferred: bool
) -> Strategy:
    if is_deferred:
        raise UnsupportedError(
            "microbatching='auto' is not supported with DeepSpeed; leave it out, or use strategy='fsdp'"
        )
    from headway.strategies.deepspeed.strategy import DeepSpeedStrategy

    return DeepSpeedStrategy(collectives, plugin, options)


def prepare_pippy(
    model: torch.nn.Module,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: str | Sequence[str] | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> torch.nn.Module:
    """Spread a model over the processes for inference: each keeps some of its blocks, on its device.

    The model comes back as the same object, in evaluation mode. Call it on every process with the same inputs; the batch passes
    through in chunks. For training, use `Accelerator(strategy="pp")`.

    Args:
        model: with its values, on every process.
        split_points: "auto": equally many blocks on each process; or the name of the first block of each process but the first.
        no_split_module_classes: class names of the blocks; None: what is repeated in the module tree.
        example_args: accepted for Accelerate's sake: shapes are found when the model is called.
        example_kwargs: as well.
        num_chunks: parts of a batch; None: as many as there are processes. A batch of fewer rows has a row in each.
        gather_output: outputs on all processes; False: on the last one, and None elsewhere.

    Raises:
        PrepareError: the model has fewer repeated blocks than there are processes.
        ConfigError: a split point that is no block, or a number of chunks below 1.
    """
    if split_points != "auto" and isinstance(split_points, str):
        raise ConfigError(f"split_points={split_points!r}; give 'auto' or a list of names of blocks")
    if num_chunks is not None and (isinstance(num_chunks, bool) or num_chunks < 1):
        raise ConfigError(f"num_chunks={num_chunks!r}; give a whole number, 1 or more, or None")
    runtime = process.start()
    collectives = Collectives(runtime)
    model.eval()
    if collectives.world_size == 1:
        return model.to(runtime.device)
    named = (no_split_module_classes,) if isinstance(no_split_module_classes, str) else no_split_module_classes
    options = PipelineOptions(
        num_microbatches=num_chunks or collectives.world_size,
        split=() if split_points == "auto" else tuple(split_points),
        blocks=tuple(named or ()),
    )
    from headway.strategies.pipeline.strategy import PipelineStrategy

    strategy = PipelineStrategy(collectives, Layout(pp=collectives.world_size), options)
    strategy.setup(model)
    strategy.answer_only(gather_output)
    return model
