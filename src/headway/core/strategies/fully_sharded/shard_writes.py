"""Detection of in-place changes of shards by user code, so that ranks can find a change that only some of them made.

Shards hold different values, so their values do not reveal a change on one rank. torch's version counters do,
because they count in-place operations. An optimizer step increases them, too. Its increase is measured in the first
step after each call to `find_changed`, and subtracted in the next call. Writes through `.data` are not counted. A change that
every rank makes counts as correct, whatever its values.
"""

from math import ceil

import torch

from headway.core.strategies.fully_sharded import dtensors
from headway.core.weights.pieces import is_dtensor


class ShardWrites:
    """Detector of in-place changes that user code makes to one model's shards between optimizer steps.

    Args:
        model: Sharded model without gathered parameters.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        # Skip parameters of which some rank has no shard: a load would look like a change on the other ranks only.
        named = [(name, p) for name, p in model.named_parameters() if is_dtensor(p) and _is_everywhere(p)]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._increase_per_step = [0] * len(named)  # of each parameter's version counter
        self._versions_before_step: list[int] | None = None  # None if the step in progress is not measured
        self._measures_next_step = False
        self.record_versions()

    def record_versions(self) -> None:
        """Start a new comparison at the current version counters.

        This is needed after a load, which changes the counters by different amounts on each rank.
        """
        self._start_versions = self._read_versions()
        self._num_steps = 0

    def find_changed(self) -> tuple[list[str], list[int]]:
        """Return which parameters were changed in place by anything other than an optimizer step.

        Returns:
            Names of the changed parameters, and for every parameter the number by which an optimizer step increases its
                version counter.
        """
        self._measures_next_step = True
        changed = []
        rows = zip(self._names, self._read_versions(), self._start_versions, self._increase_per_step)
        for name, version, start_version, increase in rows:
            if version != start_version + self._num_steps * increase:
                changed.append(name)
        return changed, self._increase_per_step

    def begin_step(self) -> None:
        """Record the version counters before an optimizer step. Only the first step after a call to `find_changed` counts."""
        self._versions_before_step = self._read_versions() if self._measures_next_step else None
        self._measures_next_step = False

    def end_step(self, did_step: bool) -> None:
        """Record by how much an optimizer step has increased the version counters.

        Args:
            did_step: Whether the update was made. False: it was skipped.
        """
        if self._versions_before_step is None:
            self._num_steps += int(did_step)
            return
        versions = self._read_versions()
        if did_step:
            self._increase_per_step = [
                version - earlier_version for version, earlier_version in zip(versions, self._versions_before_step)
            ]
        self._start_versions = versions
        self._num_steps = 0

    def _read_versions(self) -> list[int]:
        """Return the version counter of each parameter: the sum of those of the DTensor and of its local shard."""
        return [parameter._version + dtensors.get_local_shard(parameter)._version for parameter in self._parameters]


def _is_everywhere(parameter: torch.Tensor) -> bool:
    """Whether each rank of the parameter's mesh holds a nonempty shard of it."""
    num_shards: dict[int, int] = {}
    for axis, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
        if not placement.is_replicate():
            dim = getattr(placement, "dim", 0)
            num_shards[dim] = num_shards.get(dim, 1) * parameter.device_mesh.size(axis)  # type: ignore[attr-defined]
    for dim, count in num_shards.items():
        size = parameter.shape[dim]
        shard_size = ceil(size / count)  # of all ranks but the last ones, as torch divides a dimension
        if shard_size * (count - 1) >= size:
            return False
    return True
