"""Which strategy a run uses: the one place that names them."""

from typing import TYPE_CHECKING

from headway.collectives.door import Collectives
from headway.config import mesh, outside
from headway.config.mesh import Layout
from headway.config.sharding import ShardingOptions
from headway.config.strategies import EngineOptions
from headway.errors import ConfigError, UnsupportedError
from headway.strategies.base import Strategy
from headway.strategies.ddp import DDPStrategy
from headway.strategies.mesh import MeshStrategy
from headway.strategies.replica import ReplicaStrategy
from headway.strategies.single import SingleStrategy

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def choose_strategy(
    text: str, collectives: Collectives, options: EngineOptions, number_format: str = "no", is_deferred: bool = False
) -> Strategy:
    """The strategy that is asked for: a layout of Headway's own, or what a package has registered.

    Args:
        text: as in "fsdp+tp=2", or a registered name, perhaps with more behind "=".
        collectives: all processes.
        options: of the engines.
        number_format: as for `build_strategy`.
        is_deferred: as for `build_strategy`.

    Raises:
        ConfigError: neither of both; or what was registered is no strategy.
        UnsupportedError: a layout that is not there yet.
    """
    registered = outside.find(text)
    if registered is not None:
        return _load(registered, text, collectives, options)
    layout = mesh.parse(text).resolve(collectives.world_size)
    return build_strategy(collectives, options, layout, number_format, is_deferred)


def _load(registered: "EntryPoint", text: str, collectives: Collectives, options: EngineOptions) -> Strategy:
    where = f"strategy {text!r}, registered as {registered.value}"
    try:
        make = registered.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}, cannot be loaded: {error}; mend or uninstall that package") from error
    made: Strategy = make(collectives, text, options)
    wanted = {*Strategy.__annotations__, *(name for name in vars(Strategy) if not name.startswith("_"))}
    missing = sorted(name for name in wanted if not hasattr(made, name))
    if missing:
        raise ConfigError(
            f"{where}, lacks {', '.join(missing)}; let its class extend SingleStrategy or DDPStrategy, which have them all"
        )
    group, shard = made.data_group, made.data_shard
    if (group.rank, group.world_size) != (shard.index, shard.count):
        raise ConfigError(
            f"{where}: on rank {collectives.rank} data_shard is {shard.index} of {shard.count}, but this process is number "
            f"{group.rank} of {group.world_size} in data_group, which must hold one process of each shard, in the shards' order"
        )
    return made


def build_strategy(
    collectives: Collectives,
    options: EngineOptions,
    layout: Layout,
    number_format: str = "no",
    is_deferred: bool = False,
) -> Strategy:
    """The layout's strategy; plain PyTorch where there is one process.

    Args:
        collectives: the processes.
        options: of the engines.
        layout: how many of them each axis takes.
        number_format: the run's mixed_precision.
        is_deferred: gradients travel once a window, after its last backward, and never while it runs.

    Raises:
        UnsupportedError: a layout that is not there yet.
    """
    if not layout.is_replicas_only:
        if layout.sizes.keys() - {"replicate", "shard", "tp"}:
            raise UnsupportedError(f"the layout {layout} is not there yet")
        if is_deferred:
            raise UnsupportedError(
                "microbatching='auto' needs whole models so far; leave it out, or use strategy='ddp'"
            )
        return MeshStrategy(collectives, layout, options.sharding or ShardingOptions(), number_format, options.tensor)
    if collectives.world_size > 1 and is_deferred:
        return ReplicaStrategy(collectives, options.ddp)
    if collectives.world_size > 1:
        return DDPStrategy(collectives, options.ddp)
    return SingleStrategy(collectives)
