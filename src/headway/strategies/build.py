"""Which strategy a run uses: the one place that names them."""

from headway.collectives.door import Collectives
from headway.config.strategies import EngineOptions
from headway.strategies.base import Strategy
from headway.strategies.ddp import DDPStrategy
from headway.strategies.replica import ReplicaStrategy
from headway.strategies.single import SingleStrategy


def build_strategy(collectives: Collectives, options: EngineOptions, is_deferred: bool = False) -> Strategy:
    """A replica per process where there are several, plain PyTorch where there is one.

    Args:
        collectives: the processes.
        options: of the engines.
        is_deferred: gradients travel once a window, after its last backward, and never while it runs.
    """
    if collectives.world_size > 1 and is_deferred:
        return ReplicaStrategy(collectives, options.ddp)
    if collectives.world_size > 1:
        return DDPStrategy(collectives, options.ddp)
    return SingleStrategy(collectives)
