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
        self._per_step = [0] * len(named)
        self._before: list[int] | None = None
        self._has_looked = False
        self.record_versions()

    def record_versions(self) -> None:
        """Start a new comparison at the current version counters.

        This is needed after a load, which changes the counters by different amounts on each rank.
        """
        self._last = self._read_versions()
        self._num_steps = 0

    def find_changed(self) -> tuple[list[str], list[int]]:
        """Return which parameters were changed in place by anything other than an optimizer step.

        Returns:
            Names of the changed parameters, and for every parameter the number by which an optimizer step increases its
                version counter.
        """
        self._has_looked = True
        rows = zip(self._names, self._read_versions(), self._last, self._per_step)
        return [name for name, now, last, each in rows if now != last + self._num_steps * each], self._per_step

    def begin_step(self) -> None:
        """Record the version counters before an optimizer step. Only the first step after a call to `find_changed` counts."""
        self._before = self._read_versions() if self._has_looked else None
        self._has_looked = False

    def end_step(self, was_made: bool) -> None:
        """Record by how much an optimizer step has increased the version counters.

        Args:
            was_made: Whether the update was made. False: it was skipped.
        """
        if self._before is None:
            self._num_steps += was_made
            return
        now = self._read_versions()
        if was_made:
            self._per_step = [after - before for after, before in zip(now, self._before)]
        self._last = now
        self._num_steps = 0

    def _read_versions(self) -> list[int]:
        return [parameter._version + dtensors.get_local_shard(parameter)._version for parameter in self._parameters]


def _is_everywhere(parameter: torch.Tensor) -> bool:
    """Whether each rank of the parameter's mesh holds a nonempty shard of it."""
    cuts: dict[int, int] = {}
    for axis, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
        if not placement.is_replicate():
            dim = getattr(placement, "dim", 0)
            cuts[dim] = cuts.get(dim, 1) * parameter.device_mesh.size(axis)  # type: ignore[attr-defined]
    return all(ceil(parameter.shape[dim] / count) * (count - 1) < parameter.shape[dim] for dim, count in cuts.items())
