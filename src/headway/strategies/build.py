"""Which strategy a run uses: the one place that names them."""

from headway.config.strategies import EngineOptions
from headway.ops.collectives import Collectives
from headway.strategies.base import Strategy
from headway.strategies.ddp import DDPStrategy
from headway.strategies.single import SingleStrategy


def build_strategy(collectives: Collectives, options: EngineOptions) -> Strategy:
    """A replica per process where there are several, plain PyTorch where there is one."""
    if collectives.world_size > 1:
        return DDPStrategy(collectives, options.ddp)
    return SingleStrategy(collectives)
