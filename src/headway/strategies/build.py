"""Which strategy a run uses: the one place that names them."""

from headway.collectives.door import Collectives
from headway.config.mesh import Layout
from headway.config.sharding import ShardingOptions
from headway.config.strategies import EngineOptions
from headway.errors import UnsupportedError
from headway.precision.base import Precision
from headway.strategies.base import Strategy
from headway.strategies.ddp import DDPStrategy
from headway.strategies.mesh import MeshStrategy
from headway.strategies.replica import ReplicaStrategy
from headway.strategies.single import SingleStrategy


def build_strategy(
    collectives: Collectives, options: EngineOptions, layout: Layout, precision: Precision, is_deferred: bool = False
) -> Strategy:
    """The layout's strategy; plain PyTorch where there is one process.

    Args:
        collectives: the processes.
        options: of the engines.
        layout: how many of them each axis takes.
        precision: in which number format forwards run.
        is_deferred: gradients travel once a window, after its last backward, and never while it runs.

    Raises:
        UnsupportedError: a layout that is not there yet.
    """
    if not layout.is_replicas_only:
        if layout.sizes.keys() - {"replicate", "shard"}:
            raise UnsupportedError(f"the layout {layout} is not there yet")
        if is_deferred:
            raise UnsupportedError(
                "microbatching='auto' needs whole models so far; leave it out, or use strategy='ddp'"
            )
        return MeshStrategy(collectives, layout, options.sharding or ShardingOptions(), precision)
    if collectives.world_size > 1 and is_deferred:
        return ReplicaStrategy(collectives, options.ddp)
    if collectives.world_size > 1:
        return DDPStrategy(collectives, options.ddp)
    return SingleStrategy(collectives)
