"""Headway: your own PyTorch loop, unchanged, on whatever hardware there is.

Every public name can be imported from here. Names are loaded on first use, so that the command line never pays for
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PLACES = {
    "Accelerator": "headway.accelerator",
    "AutocastKwargs": "headway.config.strategies",
    "DDPCommunicationHookType": "headway.config.strategies",
    "DataLoaderConfiguration": "headway.config.run",
    "DistributedDataParallelKwargs": "headway.config.strategies",
    "GradScalerKwargs": "headway.config.strategies",
    "GradientAccumulationPlugin": "headway.config.run",
    "InitProcessGroupKwargs": "headway.config.strategies",
    "ProfileKwargs": "headway.config.strategies",
    "ProjectConfiguration": "headway.config.run",
    "debug_launcher": "headway.launch.notebook",
    "errors": "headway.errors",
    "find_batch_size": "headway.ops.tree",
    "get_logger": "headway.log",
    "notebook_launcher": "headway.launch.notebook",
    "set_seed": "headway.runtime.seed",
    "skip_first_batches": "headway.data.skip",
    "synchronize_rng_states": "headway.runtime.seed",
    "track": "headway.progress",
}

__all__ = ["__version__", *_PLACES]

if TYPE_CHECKING:
    from headway import errors as errors
    from headway.accelerator import Accelerator as Accelerator
    from headway.config.run import DataLoaderConfiguration as DataLoaderConfiguration
    from headway.config.run import GradientAccumulationPlugin as GradientAccumulationPlugin
    from headway.config.run import ProjectConfiguration as ProjectConfiguration
    from headway.config.strategies import AutocastKwargs as AutocastKwargs
    from headway.config.strategies import DDPCommunicationHookType as DDPCommunicationHookType
    from headway.config.strategies import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from headway.config.strategies import GradScalerKwargs as GradScalerKwargs
    from headway.config.strategies import InitProcessGroupKwargs as InitProcessGroupKwargs
    from headway.config.strategies import ProfileKwargs as ProfileKwargs
    from headway.data.skip import skip_first_batches as skip_first_batches
    from headway.launch.notebook import debug_launcher as debug_launcher
    from headway.launch.notebook import notebook_launcher as notebook_launcher
    from headway.log import get_logger as get_logger
    from headway.ops.tree import find_batch_size as find_batch_size
    from headway.progress import track as track
    from headway.runtime.seed import set_seed as set_seed
    from headway.runtime.seed import synchronize_rng_states as synchronize_rng_states


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'headway' has no name {name!r}")
    module = import_module(place)
    value = module if place == f"headway.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
