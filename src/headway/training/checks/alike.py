"""Have all ranks built the same model, and the same settings? Asked before it is wrapped: engines would mix tensors up, or hang."""

from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

from headway.errors import PrepareError
from headway.log import get_logger
from headway.runtime.collectives.checked import Collectives, digest

log = get_logger(__name__)

_MOST = 64


def check_alike(model: torch.nn.Module, settings: dict[str, str], everyone: Collectives) -> None:
    """One exchange of a number; what differs is looked for only where something does.

    Args:
        model: that is to be wrapped.
        settings: of the run, by the names that the Accelerator takes them by.
        everyone: all ranks.

    Raises:
        PrepareError: it is an engine; or, on every rank, names, shapes, dtypes, or what is frozen, differ.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise PrepareError("prepare() got a DistributedDataParallel; give the bare model, Headway wraps it")
    if everyone.world_size == 1:
        return
    own = settings | _described(model)
    if len({number for (number,) in everyone.gather_numbers([digest(repr(own))])}) == 1:
        return
    first, *others = everyone.gather_objects(own)
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
    name = next(name for name in [*first, *other] if first.get(name) != other.get(name))
    found = f"{first.get(name, 'missing')} on rank 0 and {other.get(name, 'missing')} on rank {rank}"
    if name in settings:
        raise PrepareError(f"ranks have different settings: {name} is {found}; give all ranks the same")
    raise PrepareError(
        f"ranks have built different models: {name} of {type(model).__name__} is {found}. Take all sizes from what is the same on "
        "every rank: not from a rank's own part of the data, nor from a file that only one of them has read"
    )


def compare_data(dataset: Any, readers: Collectives) -> None:
    """Warn where ranks give prepare() parts of their own: a prepared loader reads only this rank's share of what it is given."""
    if (
        readers.world_size > 1
        and len({row[0] for row in readers.gather_numbers([digest(repr(_contents(dataset)))])}) > 1
    ):
        log.warning_once(
            "ranks gave prepare() different data, such as a part for each. A prepared loader gives each rank its share of what it is "
            "given, so that the rest of a part is never read: give all ranks the whole data, or leave the loader unprepared"
        )


def _contents(dataset: Any) -> list[Any]:
    """What can be told of a dataset without reading a sample, which may draw random numbers."""
    found: list[Any] = []
    while isinstance(dataset, Subset):
        found += [len(dataset), list(dataset.indices[:_MOST]), list(dataset.indices[-_MOST:])]
        dataset = dataset.dataset
    if isinstance(dataset, TensorDataset):
        found += [tensor[:1].flatten()[:_MOST].tolist() for tensor in dataset.tensors]
    return found


def _described(model: torch.nn.Module) -> dict[str, str]:
    """Each tensor in words, by name."""
    found = {
        name: f"{tuple(p.shape)} in {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in model.named_parameters()
    }
    return found | {name: f"{tuple(buffer.shape)} in {buffer.dtype}" for name, buffer in model.named_buffers()}
