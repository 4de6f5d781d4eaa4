"""Which strategy a run uses: the one place that names them."""

from headway.collectives.door import Collectives
from headway.config.deepspeed import DeepSpeedPlugin
from headway.config.mesh import Layout
from headway.config.strategies import EngineOptions
from headway.errors import UnsupportedError
from headway.strategies.base import Strategy
from headway.strategies.ddp import DDPStrategy
from headway.strategies.replica import ReplicaStrategy
from headway.strategies.single import SingleStrategy


def build_strategy(
    collectives: Collectives,
    options: EngineOptions,
    layout: Layout,
    is_deferred: bool = False,
    deepspeed: DeepSpeedPlugin | None = None,
) -> Strategy:
    """The layout's strategy; plain PyTorch where there is one process.

    Args:
        collectives: the processes.
        options: of the engines.
        layout: how many of them each axis takes.
        is_deferred: gradients travel once a window, after its last backward, and never while it runs.
        deepspeed: the settings of DeepSpeed, where that is the engine.

    Raises:
        UnsupportedError: a layout that is not there yet.
    """
    if deepspeed is not None:
        return _deepspeed(collectives, options, deepspeed, is_deferred)
    if not layout.is_replicas_only:
        raise UnsupportedError(f"the layout {layout} is not there yet")
    if collectives.world_size > 1 and is_deferred:
        return ReplicaStrategy(collectives, options.ddp)
    if collectives.world_size > 1:
        return DDPStrategy(collectives, options.ddp)
    return SingleStrategy(collectives)


def _deepspeed(
    collectives: Collectives, options: EngineOptions, plugin: DeepSpeedPlugin, is_deferred: bool
) -> Strategy:
    if is_deferred:
        raise UnsupportedError("microbatching='auto' is not there for DeepSpeed; leave it out, or use strategy='fsdp'")
    from headway.strategies.deepspeed import DeepSpeedStrategy

    return DeepSpeedStrategy(collectives, plugin, options)
