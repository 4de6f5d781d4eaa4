"""Checks that all ranks give `prepare()` the same model, settings and data.

If the ranks built different models, DDP and similar wrappers would mix up tensors, or hang.
"""

from collections.abc import Container
from typing import Any, NoReturn

import torch

from headway.common.text import join_names
from headway.core.data.compare.samples import compare_samples
from headway.core.runtime.collectives.checked import Collectives, digest_text
from headway.errors import DataError, PrepareError
from headway.log import get_logger

log = get_logger(__name__)


def check_models(
    model: torch.nn.Module, settings: dict[str, str], everyone: Collectives, loaded_names: Container[str] = ()
) -> bool:
    """Raise an error if ranks built different models or settings. Return whether rank 0's model has values.

    The model has no values if some of its parameters are on the meta device. One exchange of three numbers is enough
    if all ranks are equal. Details are exchanged only if they differ. On a single process, only the class of the model
    is checked.

    Args:
        model: Model about to be wrapped.
        settings: Settings of the run, by the names of the Accelerator's arguments.
        everyone: Collectives over all ranks.
        loaded_names: Names of tensors whose values are loaded from files afterward.

    Raises:
        PrepareError: If the model is already wrapped in DDP. Also, on every rank, if the ranks differ in the settings
            or in the model's tensor names, shapes, dtypes or frozen parameters, or if rank 0's parameters have values but
            its buffers do not.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise PrepareError("prepare() got a DistributedDataParallel; give the bare model, Headway wraps it")
    has_values = not any(parameter.is_meta for parameter in model.parameters())
    if everyone.world_size == 1:
        return has_values
    description = settings | _describe_tensors(model)
    missing_buffers = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in loaded_names]
    # Each of these tuples has one entry per rank.
    digests, have_values, num_missing = zip(
        *everyone.gather_numbers([digest_text(repr(description)), float(has_values), float(len(missing_buffers))])
    )
    if len(set(digests)) > 1:
        _raise_difference(description, settings, type(model).__name__, everyone)
    if have_values[0] and num_missing[0]:
        names = everyone.broadcast_object(missing_buffers)
        raise PrepareError(
            f"the parameters of {type(model).__name__} have values, but these of its buffers are on the meta device: "
            f"{join_names(names)}. load_state_dict(..., assign=True) leaves buffers there that are not in the state dict. "
            "Compute them before prepare, or build the model under init_empty_weights(), which keeps buffers on the CPU"
        )
    return bool(have_values[0])


def _raise_difference(
    description: dict[str, str], settings: Container[str], class_name: str, everyone: Collectives
) -> NoReturn:
    """Raise an error that contains the first difference between rank 0 and another rank. Every rank must call it.

    Args:
        description: Settings and tensors of this rank, each as text, by name.
        settings: Names of the settings among them.
        class_name: Name of the model's class, for the message.
        everyone: Collectives over all ranks.

    Raises:
        PrepareError: Always.
    """
    on_rank_0, *on_other_ranks = everyone.gather_objects(description)
    rank, on_rank = next((rank, each) for rank, each in enumerate(on_other_ranks, 1) if each != on_rank_0)
    name = next(name for name in [*on_rank_0, *on_rank] if on_rank_0.get(name) != on_rank.get(name))
    difference = f"{on_rank_0.get(name, 'missing')} on rank 0 and {on_rank.get(name, 'missing')} on rank {rank}"
    if name in settings:
        raise PrepareError(f"ranks have different settings: {name} is {difference}; give all ranks the same")
    raise PrepareError(
        f"ranks have built different models: {name} of {class_name} is {difference}. Compute all sizes from values that "
        "are equal on every rank, not from one rank's part of the data or from a file that only one rank has read"
    )


def compare_data(dataset: Any, everyone: Collectives, is_strict: bool) -> None:
    """Compare the datasets of all ranks, and raise an error if ranks have split or shuffled their data themselves.

    A prepared loader reads only this rank's shard of its dataset. If the dataset is already a shard, most of it would
    never be read.

    Args:
        dataset: Map-style dataset of this rank.
        everyone: Collectives over all ranks. Every rank must call this function.
        is_strict: Whether different data are an error. If False, they cause one warning.

    Raises:
        DataError: On all ranks, if their data differ and `is_strict` is set.
    """
    difference = compare_samples(dataset, everyone)
    if not difference:
        return
    text = (
        f"ranks gave prepare() different data, such as a part for each: {difference}. A prepared loader gives each rank a share of "
        "its data, so the rest of each part would never be read. Give all ranks the whole data in the same order (no split by "
        "rank, and the same seed for what shuffles or splits them), or leave the loader unprepared"
    )
    if is_strict:
        raise DataError(text)
    log.warning_once("%s", text)


def _describe_tensors(model: torch.nn.Module) -> dict[str, str]:
    """Return a description of each parameter and buffer of a model (shape, dtype, whether frozen), by name."""
    parameters = {
        name: f"{tuple(p.shape)} in {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in model.named_parameters()
    }
    buffers = {name: f"{tuple(buffer.shape)} in {buffer.dtype}" for name, buffer in model.named_buffers()}
    return parameters | buffers
