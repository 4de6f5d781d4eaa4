"""The torch loader beneath a prepared one: the user's settings, with another source of indices."""

import multiprocessing
from typing import Any

import torch
from torch.utils.data import DataLoader

from headway.data.feeds.worker import WorkerStart
from headway.runtime.signals import listened_for, tell

_SETTINGS = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "worker_init_fn",
    "persistent_workers",
    "in_order",
)
_STATEFUL_SETTINGS = ("snapshot_every_n_steps",)
_WORKER_SETTINGS = ("multiprocessing_context", "prefetch_factor")


def rebuild(loader: DataLoader[Any], kind: type[DataLoader[Any]] = DataLoader, **changes: Any) -> DataLoader[Any]:
    """A loader with all of `loader`'s settings but its source of indices, and with `changes`.

    It draws its workers' base seed from a generator of its own, so that iterating leaves torch's global stream alone;
    seed `generator` before each pass. Where this process listens for signals, the workers leave them to it.

    Args:
        loader: the user's.
        kind: the class to make.
        changes: arguments of that class: the source of indices, and what else differs.
    """
    # Settings differ between torch's versions; what this one has, it accepts.
    names = _SETTINGS + (_WORKER_SETTINGS if loader.num_workers > 0 else ())
    names += _STATEFUL_SETTINGS if hasattr(kind, "state_dict") else ()
    settings = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    if loader.num_workers > 0 and (signals := listened_for()):
        context = loader.multiprocessing_context or multiprocessing
        heard = context.Event()
        tell(heard.set)
        settings["worker_init_fn"] = WorkerStart(settings["worker_init_fn"], signals, heard)
    return kind(**{"dataset": loader.dataset, "generator": torch.Generator(), **settings, **changes})
