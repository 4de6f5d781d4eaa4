"""`reconstruct_average`: the average of any width, computed after the training from snapshots (post-hoc EMA).

Each tensor of the result is combined from the snapshots when it is written. The memory therefore does not depend on the
number of snapshots, or on the size of the model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.common.object_path import expand_home, to_path
from headway.core.weights.export import save_weights
from headway.errors import ConfigError
from headway.extras.average_snapshots import StoredAverage, find_power_averages, list_snapshots
from headway.extras.power_average import Profile, check_width, solve_coefficients


@dataclass(frozen=True)
class Reconstruction:
    """Result of `headway.reconstruct_average`.

    Attributes:
        files: Written files.
        error: Bound for the error of each weight, relative to the standard deviation of this weight over the averaged
            updates. Rounding is not included.
        num_averages: Number of averages that were combined.
    """

    files: list[Path]
    error: float
    num_averages: int


class _CombinedTensor:
    """Tensor of a reconstructed average. It is combined from the snapshots on request.

    Attributes:
        shape: Shape of the tensor.
        dtype: Dtype in which it is written.
    """

    def __init__(self, name: str, averages: Sequence[tuple[StoredAverage, float]], dtype: torch.dtype | None) -> None:
        newest = averages[-1][0].specs[name]
        self._name = name
        self._stored_dtype = newest.dtype
        # Counters, such as those of batch norm, have no average. The newest value is used.
        is_averaged = newest.dtype.is_floating_point or newest.dtype.is_complex
        self._averages = averages if is_averaged else [(averages[-1][0], 1)]
        self.shape = torch.Size(newest.shape)
        self.dtype = dtype if dtype is not None and newest.dtype.is_floating_point else newest.dtype

    def assemble(self) -> torch.Tensor:
        """Return the full tensor, combined from the snapshots. Elements without a finite sum are those of the newest snapshot."""
        dtype = self._stored_dtype
        if dtype.is_floating_point:
            dtype = torch.promote_types(dtype, torch.float32)
        total = self._combine(self._averages, dtype)
        is_finite = total.isfinite()
        if not is_finite.all():
            # Coefficients can be negative, so the sum of equal infinities, as in a causal mask, can be NaN.
            newest, _ = self._averages[-1]
            total = torch.where(is_finite, total, self._combine([(newest, 1)], dtype))
        return total.to(self.dtype)

    def _combine(self, averages: Sequence[tuple[StoredAverage, float]], dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of the averages in snapshots, each multiplied by its coefficient, as a tensor of `dtype`."""
        total = torch.zeros(self.shape, dtype=dtype)
        for average, coefficient in averages:
            average.add_to(total, self._name, coefficient)
        return total


def reconstruct_average(
    snapshots: str | Path | Iterable[str | Path],
    folder: str | Path,
    sigma_rel: float,
    *,
    num_averaged: int | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "10GB",
) -> Reconstruction:
    """Combine snapshots of power-function averages into an average with another width, and write it as safetensors.

    An average gives each averaging step's state a weight. Its width is the standard deviation of the step number under
    these weights, as a fraction of the number of steps. During training, keep averages with `decay=PowerDecay(...)`,
    usually with widths 0.05 and 0.1, and save snapshots of them at regular intervals. Call this function in one
    process, without an Accelerator. It holds only a few tensors in host memory at a time. The method is post-hoc EMA
    (Karras et al. 2023, arXiv 2312.02696).

    Args:
        snapshots: Folders that `ExponentialMovingAverage.save_snapshot` wrote, or checkpoints, all from one run. A
            single path is a folder that contains them. From a checkpoint, all averages with a `PowerDecay` are used.
        folder: Folder for the result, created if missing. Earlier weights in it are replaced.
        sigma_rel: Relative width of the result, more than 0 and at most 0.2886.
        num_averaged: Number of averaging steps that the result covers. Later snapshots are not used. None (the
            default): all steps up to the latest snapshot.
        dtype: Floating-point dtype of the result. None (the default): the dtype of the averages in the latest snapshot.
        max_shard_size: Largest size of a file, in bytes or as text. Default: "10GB".

    Returns:
        The written files, and a bound for the error.

    Raises:
        ConfigError: If an argument is not allowed, or the snapshots do not belong together.
        CheckpointError: If a file is damaged.

    Example::

        headway.reconstruct_average("snapshots", "averaged", sigma_rel=0.15)
    """
    check_width(sigma_rel)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype={dtype!r}; give a floating-point dtype, such as torch.bfloat16, or None")
    if isinstance(snapshots, str | Path):
        snapshot_folders = list_snapshots(snapshots)
    else:
        snapshot_folders = [to_path(each) for each in snapshots]
    folder = expand_home(folder)
    if Path(folder).resolve() in {each.resolve() for each in snapshot_folders}:
        raise ConfigError(f"{folder} is one of the snapshots; give another folder for the result")
    stored = [average for each in snapshot_folders for average in find_power_averages(each)]
    averages_by_profile, target = _choose_averages(stored, sigma_rel, num_averaged)
    coefficients, error = solve_coefficients(list(averages_by_profile), target)
    averages = list(averages_by_profile.values())
    weighted_averages = list(zip(averages, coefficients))
    tensors = [(name, _CombinedTensor(name, weighted_averages, dtype)) for name in averages[-1].specs]
    return Reconstruction(save_weights(tensors, folder, max_shard_size), error, len(averages))


def _choose_averages(
    stored: Sequence[StoredAverage], sigma_rel: float, num_averaged: int | None
) -> tuple[dict[Profile, StoredAverage], Profile]:
    """Return the averages to combine, as a dict by profile, and the target profile.

    The dict is in ascending order of averaging steps.

    Args:
        stored: Averages in all snapshots.
        sigma_rel: Relative width of the target profile.
        num_averaged: Number of averaging steps of the target profile; later averages are not used. None: that of the
            latest average.

    Raises:
        ConfigError: If no average can be used, `num_averaged` is not from 1 to that of the latest average, or the averages
            do not belong together.
    """
    nonempty = [each for each in stored if each.description.num_averaged]
    if not nonempty:
        raise ConfigError("the snapshots contain no averaging step; give snapshots from after update_after")
    nonempty.sort(key=lambda each: each.description.num_averaged)
    first, latest = nonempty[0].description.num_averaged, nonempty[-1].description.num_averaged
    if num_averaged is None:
        num_averaged = latest
    elif type(num_averaged) is not int or not 1 <= num_averaged <= latest:
        raise ConfigError(f"num_averaged={num_averaged!r}; the snapshots allow 1 to {latest}, or None for the latest")
    if num_averaged < first:
        raise ConfigError(f"num_averaged={num_averaged}; the first snapshot is that of averaging step {first}")
    usable = [each for each in nonempty if each.description.num_averaged <= num_averaged]
    _check_match(usable)
    averages_by_profile = {Profile(each.description.sigma_rel, each.description.num_averaged): each for each in usable}
    return averages_by_profile, Profile(sigma_rel, num_averaged)


def _check_match(averages: Sequence[StoredAverage]) -> None:
    """Raise an error unless averages can come from one run and have the same averaging steps and tensors.

    Raises:
        ConfigError: If two averages differ.
    """
    first = averages[0]
    first_description = first.description
    for each in averages[1:]:
        description = each.description
        for key in ("update_after", "every"):
            first_value, other_value = getattr(first_description, key), getattr(description, key)
            if first_value != other_value:
                raise ConfigError(
                    f"the average {first_description.name!r} in {first.source} has {key}={first_value}, and "
                    f"{description.name!r} in {each.source} {other_value}; combine averages of the same updates"
                )
        differing = sorted(
            name
            for name in first.specs.keys() | each.specs.keys()
            if name not in first.specs or name not in each.specs or first.specs[name].shape != each.specs[name].shape
        )
        if differing:
            raise ConfigError(
                f"the averages in {first.source} and {each.source} differ in the tensors {', '.join(differing[:3])}; combine "
                "snapshots of one run"
            )
        if first_description.num_updates != description.num_updates and first.source == each.source:
            raise ConfigError(
                f"the averages {first_description.name!r} and {description.name!r} in {each.source} began at different "
                "updates; combine averages that were created together"
            )
