"""Find the longest time that a read of a dataset may wait for remote storage, for `headway.extras.stall_watch`."""

from typing import Any

from torch.utils.data import Dataset

_DATASET_LISTS = ("datasets", "sources")
"""Names of attributes in which wrappers such as `ConcatDataset` and `Mixture` hold several datasets."""


def find_stall_limit(dataset: Any) -> float:
    """Return the maximum number of seconds that a read of a dataset may wait for remote storage.

    Return 0.0 if the dataset has no such limit, which means that it does not use remote storage. For a wrapper such as
    `Subset`, `ConcatDataset` or a mixture, the result is the largest limit of the wrapped datasets.

    Args:
        dataset: Dataset, or a wrapper around datasets.
    """
    limit = getattr(dataset, "stall_limit", None)
    if isinstance(limit, int | float):
        return float(limit)
    wrapped = [getattr(dataset, "dataset", None)]
    for name in _DATASET_LISTS:
        datasets = getattr(dataset, name, None)
        if isinstance(datasets, list | tuple):
            wrapped += datasets
    limits = (find_stall_limit(each) for each in wrapped if isinstance(each, Dataset) and each is not dataset)
    return max(limits, default=0.0)
