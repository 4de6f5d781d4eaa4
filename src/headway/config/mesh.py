"""Layouts: along which axes a model and its data are spread over the ranks, and how many ranks each axis takes. Torch-free.

::

    fsdp              parameters sharded over all ranks            (shard)
    hsdp=8            shards within groups of 8, replicas of those (replicate x shard)
    tp                matrices cut over all ranks                  (tp)
    fsdp+tp=2         pairs cut matrices, parameters are sharded over the pairs
    ddp=2+fsdp=4+tp=2 all sizes given: 16 ranks
    zero3             DeepSpeed's engine; also zero1, zero2, deepspeed
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from headway.config.deepspeed import is_named as is_deepspeed
from headway.errors import ConfigError

AXES = ("pp", "replicate", "shard", "cp", "tp")
"""From the outermost to the innermost: neighbours in rank are neighbours along the last axis."""
DATA_AXES = ("replicate", "shard")
"""Ranks that differ along these read data of their own; those that differ along the others read the same."""
_TERMS = {"ddp": "replicate", "fsdp": "shard", "cp": "cp", "tp": "tp", "pp": "pp"}


@dataclass(frozen=True)
class Layout:
    """How many ranks each axis takes; 1: the axis is not there.

    Attributes:
        pp: stages of a pipeline.
        replicate: copies of the whole model.
        shard: ranks among which each parameter is cut along dim 0 (FSDP).
        cp: ranks among which each sequence is cut.
        tp: ranks among which each layer's matrices are cut.
    """

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """By axis, the outermost first; only those of several ranks."""
        return {axis: size for axis in AXES if (size := int(getattr(self, axis))) > 1}

    @property
    def num_ranks(self) -> int:
        """All ranks together."""
        return prod(self.sizes.values())

    @property
    def num_data_shards(self) -> int:
        """Groups of ranks that read data of their own."""
        return self.replicate * self.shard

    @property
    def is_replicas_only(self) -> bool:
        """Does every rank hold the whole model, and nothing else is spread?"""
        return not self.sizes.keys() - {"replicate"}


@dataclass(frozen=True)
class Asked:
    """A layout as it is asked for, before the number of ranks is known.

    Attributes:
        text: as it was written, for messages.
        sizes: by axis; None: what is left over.
    """

    text: str
    sizes: Mapping[str, int | None]

    def resolve(self, num_ranks: int) -> Layout:
        """The layout on so many ranks.

        Raises:
            ConfigError: the sizes do not multiply to the number of ranks.
        """
        known = prod(size for size in self.sizes.values() if size is not None)
        open_axes = [axis for axis, size in self.sizes.items() if size is None]
        if num_ranks % known or (not open_axes and known != num_ranks):
            raise ConfigError(
                f"strategy {self.text!r} takes {known} ranks{' at a time' if open_axes else ''}, but the run has {num_ranks}; "
                "choose sizes whose product is the number of ranks, or leave one size out: it takes what is left over"
            )
        left = num_ranks // known
        return Layout(**{axis: left if size is None else size for axis, size in self.sizes.items()})


def parse(text: str) -> Asked:
    """Read a layout such as "fsdp", "hsdp=8" or "fsdp+tp=2".

    Raises:
        ConfigError: an unknown or repeated term, a size that is not a number of ranks, two terms without a size.
    """
    if is_deepspeed(text):
        return Asked(text, {"shard": None})
    sizes: dict[str, int | None] = {}
    for term in text.lower().replace(" ", "").split("+"):
        name, has_size, number = term.partition("=")
        if has_size and not (number.isascii() and number.isdigit() and int(number) > 0):
            raise ConfigError(f"strategy {text!r}: {term!r} needs a number of ranks after '=', 1 or more")
        size = int(number) if has_size else None
        if name == "hsdp":
            found: dict[str, int | None] = {"replicate": None, "shard": size}
        elif name in _TERMS:
            found = {_TERMS[name]: size}
        else:
            raise ConfigError(
                f"strategy {text!r}: {name!r} is unknown; allowed: {', '.join((*_TERMS, 'hsdp'))}, joined by '+', each with "
                "=RANKS or without, as in fsdp+tp=2"
            )
        if found.keys() & sizes.keys():
            raise ConfigError(f"strategy {text!r} gives the axis of {name!r} twice")
        sizes |= found
    if list(sizes.values()).count(None) > 1:
        raise ConfigError(
            f"strategy {text!r} leaves more than one size open; give all but one, as in hsdp=8 or fsdp+tp=2"
        )
    return Asked(text, sizes)
