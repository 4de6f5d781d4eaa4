"""Layouts and their words (`fsdp+tp=2`): along which axes a model and its data are spread, over how many ranks each. Torch-free.

::

    ddp               a copy of the model on every rank             (replicate)
    fsdp              parameters sharded over all ranks             (shard)
    hsdp=8            shards within groups of 8, replicas of those  (replicate x shard)
    hsdp              the same, within the ranks of each machine
    tp                matrices cut over all ranks                   (tp)
    fsdp+tp=2         pairs cut matrices, parameters are sharded over the pairs
    fsdp+ep=2         pairs share the experts, everything else is sharded over all ranks
    ddp=2+fsdp=4+tp=2 all sizes given: 16 ranks
    zero3             DeepSpeed's engine; also zero1, zero2, deepspeed

Strategies that other packages register: entry points of the group `headway.strategies`. Torch-free.

::

    [project.entry-points."headway.strategies"]
    mirror = "my_package.mirror:MirrorStrategy"
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from headway.common.untrusted import shown, whole_number
from headway.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

AXES = ("pp", "replicate", "shard", "ep", "cp", "tp")
"""From the outermost to the innermost: neighbours in rank are neighbours along the last axis."""
ENGINES = ("deepspeed", "zero1", "zero2", "zero3")
"""Words that stand alone: DeepSpeed's own engine, and its stages."""
_LONGEST = 200
"""Characters of a layout's text."""

_TERMS = {"ddp": "replicate", "fsdp": "shard", "ep": "ep", "cp": "cp", "tp": "tp", "pp": "pp"}
_WORDS = {
    "pp": "pipeline stages",
    "replicate": "replicas",
    "shard": "shards",
    "ep": "groups of experts",
    "cp": "parts of a sequence",
    "tp": "parts of a matrix",
}

# What people write for the same.
_OTHER_WORDS = {
    "fsdp2": "fsdp",
    "zero": "fsdp, or zero1, zero2 or zero3 for DeepSpeed's engine",
    "hybrid": "hsdp=RANKS",
    "dp": "ddp",
    "replicate": "ddp",
    "shard": "fsdp",
    "pipeline": "pp",
    "tensor": "tp",
    "context": "cp",
    "expert": "ep",
    "moe": "ep",
    "sp": "tp, which takes sequence parallelism as an option",
    "none": "ddp",
    "no": "ddp",
    "auto": "ddp",
}


@dataclass(frozen=True)
class Layout:
    """How many ranks each axis takes; 1: the axis is not there.

    Attributes:
        pp: stages of a pipeline.
        replicate: copies of the whole model.
        shard: ranks among which each parameter is cut along dim 0 (FSDP).
        ep: ranks among which experts are distributed, and every other parameter is cut with `shard`.
        cp: ranks among which each sequence is cut, and each parameter with `shard`.
        tp: ranks among which each layer's matrices are cut.
    """

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    ep: int = 1
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
        return self.replicate * self.shard * self.ep

    @property
    def num_shards(self) -> int:
        """Ranks among which each parameter is cut along dim 0: those along ep and cp share parameters, too."""
        return self.shard * self.ep * self.cp

    @property
    def data_groups(self) -> list[list[int]]:
        """Ranks that read data of their own and otherwise hold the same, in the order of their data."""
        outer, inner = self.pp, self.cp * self.tp
        shards = self.num_data_shards
        return [
            [(stage * shards + index) * inner + place for index in range(shards)]
            for stage in range(outer)
            for place in range(inner)
        ]

    def data_index(self, rank: int) -> int:
        """Which part of the data a rank reads; ranks that differ along pp, cp or tp alone read the same."""
        at = self.coordinates(rank)
        return (at["replicate"] * self.shard + at["shard"]) * self.ep + at["ep"]

    @property
    def stages(self) -> list[range]:
        """Ranks that hold the same stages of a pipeline."""
        size = self.num_ranks // self.pp
        return [range(stage * size, (stage + 1) * size) for stage in range(self.pp)]

    @property
    def is_replicas_only(self) -> bool:
        """Does every rank hold the whole model, and nothing else is spread?"""
        return not self.sizes.keys() - {"replicate"}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands along each axis, from 0; 0 along those that are not there."""
        found, rest = {}, rank
        for axis in reversed(AXES):
            rest, found[axis] = divmod(rest, int(getattr(self, axis)))
        return {axis: found[axis] for axis in AXES}

    def groups(self, axis: str) -> list[range]:
        """Which ranks form groups along an axis: those that differ along it alone."""
        step = prod(int(getattr(self, inner)) for inner in AXES[AXES.index(axis) + 1 :])
        size = int(getattr(self, axis))
        span = step * size
        return [
            range(base + at, base + at + span, step) for base in range(0, self.num_ranks, span) for at in range(step)
        ]

    def describe(self) -> str:
        """In words: "2 replicas x 4 shards"."""
        return " x ".join(f"{size} {_WORDS[axis]}" for axis, size in self.sizes.items()) or "one process"


@dataclass(frozen=True)
class Asked:
    """A layout as it is asked for, before the number of ranks is known.

    Attributes:
        text: as it was written, for messages.
        sizes: by axis; None: what is left over.
        is_by_machine: shards span the ranks of one machine (a bare "hsdp").
        is_deepspeed: by DeepSpeed's engine.
    """

    text: str
    sizes: Mapping[str, int | None]
    is_by_machine: bool = False
    is_deepspeed: bool = False

    def resolve(self, num_ranks: int, ranks_per_machine: int | None = None) -> Layout:
        """The layout on so many ranks.

        Args:
            num_ranks: over all machines.
            ranks_per_machine: how many each machine has; None: all are on one.

        Raises:
            ConfigError: the sizes do not multiply to the number of ranks; the message names the nearest that do.
        """
        sizes = dict(self.sizes)
        if self.is_by_machine:
            sizes["shard"] = self._within_a_machine(num_ranks, ranks_per_machine or num_ranks)
        known = prod(size for size in sizes.values() if size is not None)
        open_axes = [axis for axis, size in sizes.items() if size is None]
        if num_ranks % known or (not open_axes and known != num_ranks):
            raise ConfigError(
                f"strategy {self.text!r} takes {known} ranks{' at a time' if open_axes else ''}, but the run has {num_ranks}; "
                + _nearest(sizes, known, num_ranks, bool(open_axes))
            )
        left = num_ranks // known
        return Layout(**{axis: left if size is None else size for axis, size in sizes.items()})

    def _within_a_machine(self, num_ranks: int, ranks_per_machine: int) -> int:
        inner = prod(size for axis, size in self.sizes.items() if axis in ("ep", "cp", "tp") and size is not None)
        if num_ranks == 1:
            return 1  # the same script on one process
        if num_ranks <= ranks_per_machine:
            fit = [size for size in _divisors(num_ranks) if 1 < size < num_ranks and num_ranks % (size * inner) == 0]
            listed = ", ".join(f"hsdp={size}" for size in fit[-3:])
            raise ConfigError(
                f"strategy {self.text!r} without a size shards within each machine, and this run has only one; "
                + (f"give the number of ranks that share a copy ({listed}), or use fsdp" if fit else "use fsdp")
            )
        if ranks_per_machine % inner or ranks_per_machine == inner:
            raise ConfigError(
                f"strategy {self.text!r} shards within each machine, but {ranks_per_machine} ranks on a machine leave no shards "
                f"for {inner} parts of a matrix or sequence; give hsdp a size"
            )
        return ranks_per_machine // inner


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def _nearest(sizes: Mapping[str, int | None], known: int, num_ranks: int, is_open: bool) -> str:
    """What would fit: another size next to one that was given, or another number of ranks."""
    fits = []
    for axis, size in sizes.items():
        if size is None:
            continue
        others = known // size
        good = [each for each in _divisors(num_ranks) if num_ranks % (each * others) == 0]
        good = good if is_open else [each for each in good if each * others == num_ranks]
        below = [each for each in good if each < size][-1:]
        above = [each for each in good if each > size][:1]
        fits += [written({**sizes, axis: each}) for each in (*below, *above)]
    if not is_open and known < num_ranks and "replicate" not in sizes and num_ranks % known == 0:
        fits.append(written({"replicate": num_ranks // known, **sizes}))
    counts = [num_ranks // known * known, (num_ranks // known + 1) * known] if is_open else [known]
    ranks = " or ".join(str(count) for count in counts if count)
    near = f"the nearest that fit {num_ranks}: {', '.join(dict.fromkeys(fits))}; or " if fits else ""
    return f"{near}run {ranks} ranks"


def written(sizes: Mapping[str, int | None]) -> str:
    """Sizes by axis as one writes them: "ddp=2+fsdp=4+tp=2"; None: without a size."""
    names = {axis: term for term, axis in _TERMS.items()}
    sizes = {axis: size for axis, size in sizes.items() if size != 1} or {"replicate": None}
    terms = []
    if sizes.get("replicate", 0) is None and sizes.get("shard") is not None:
        terms = [f"hsdp={sizes.pop('shard')}"]
        del sizes["replicate"]
    terms += [names[axis] + (f"={sizes[axis]}" if sizes[axis] is not None else "") for axis in AXES if axis in sizes]
    return "+".join(terms)


def parse(text: str) -> Asked:
    """Read a layout such as "fsdp", "hsdp=8" or "fsdp+tp=2".

    Raises:
        ConfigError: an unknown or repeated term, a size that is not a number of ranks, two terms without a size.
    """
    sizes: dict[str, int | None] = {}
    is_by_machine = False
    if normal(text) in ENGINES:
        return Asked(text, {"shard": None}, is_deepspeed=True)
    if len(text) > _LONGEST:
        raise ConfigError(f"strategy {shown(text)} is too long for a layout, which reads like fsdp+tp=2")
    for term in normal(text).split("+"):
        name, has_size, number = term.partition("=")
        size = whole_number(number)
        if has_size and not size:
            raise ConfigError(f"strategy {text!r}: {term!r} needs a number of ranks after '=', 1 or more")
        if name == "hsdp":
            found: dict[str, int | None] = {"replicate": None, "shard": size}
            is_by_machine = size is None
        elif name in _TERMS:
            found = {_TERMS[name]: size}
        else:
            alone = (
                f", but {name!r} cannot be combined with other terms"
                if name in ENGINES
                else f": {name!r} is unknown{_meant(name)}"
            )
            raise ConfigError(f"strategy {text!r}{alone}")
        if found.keys() & sizes.keys():
            raise ConfigError(f"strategy {text!r} gives a size for {name!r} twice")
        sizes |= found
    if list(sizes.values()).count(None) - is_by_machine > 1:
        raise ConfigError(f"strategy {text!r} omits more than one size; give all but one, as in hsdp=8 or fsdp+tp=2")
    return Asked(text, sizes, is_by_machine)


def check_served(layout: Layout) -> None:
    """Refuse combinations of axes that no strategy serves.

    Raises:
        UnsupportedError: it is one.
    """
    others = [f"{_WORDS[axis]} ({axis}={size})" for axis in ("pp", "cp") if (size := getattr(layout, axis)) > 1]
    if layout.ep > 1 and others:
        raise UnsupportedError(
            f"{' and '.join(others)} cannot be combined with groups of experts (ep={layout.ep}) yet; use ep with fsdp, hsdp, ddp or "
            "tp, as in fsdp+ep=2"
        )
    if layout.ep > 1 and layout.tp > 1 and layout.shard > 1:
        raise UnsupportedError(
            f"fsdp={layout.shard} cannot be combined with both ep={layout.ep} and tp={layout.tp} yet; leave one of the three "
            f"out, as in ep={layout.ep * layout.shard}+tp={layout.tp} or fsdp+ep={layout.ep}"
        )


def normal(text: str) -> str:
    """The one spelling of a layout: small letters, no spaces."""
    return "".join(text.lower().split())


def _meant(name: str) -> str:
    from difflib import get_close_matches

    if name in _OTHER_WORDS:
        return f"; write {_OTHER_WORDS[name]}"
    served = (*_TERMS, "hsdp")
    close = get_close_matches(name, served, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    words = f"{', '.join(served)}, joined by '+', each with or without =RANKS, as in fsdp+tp=2"
    return f"{hint or ';'} allowed: {words}; or {', '.join(ENGINES)}"


def groups_in_words(layout: Layout, most: int = 4) -> Iterator[str]:
    """A line for each axis: its size, and which ranks form its groups, the first few of them."""
    for axis, size in layout.sizes.items():
        groups = layout.groups(axis)
        shown = ", ".join(_ranks(group) for group in groups[:most])
        rest = f" and {len(groups) - most} more" if len(groups) > most else ""
        yield f"{axis} = {size}: ranks {shown}{rest}"


def _ranks(group: range) -> str:
    if len(group) <= 4:
        return "(" + " ".join(str(rank) for rank in group) + ")"
    return f"({group[0]} {group[1]} .. {group[-1]})"


GROUP = "headway.strategies"


def find(text: str) -> "EntryPoint | None":
    """What a package registered under the name in this text, as in "mirror" or "mirror=2"; None where the text is a layout.

    Layouts win over packages; nothing is imported.

    Raises:
        ConfigError: neither a layout nor registered, or registered by two packages.
    """
    try:
        parse(text)
    except ConfigError as error:
        from importlib.metadata import entry_points  # as long an import as all of a launch

        name = text.partition("=")[0].strip()
        registered = entry_points(group=GROUP)
        found = {point.value: point for point in registered if point.name == name}
        if len(found) > 1:
            every = ", ".join(sorted(found))
            raise ConfigError(
                f"strategy {text!r} is registered {len(found)} times ({every}); keep one of these packages"
            ) from None
        if not found:
            others = ", ".join(sorted({point.name for point in registered}))
            told = f"{error}. Installed packages register: {others}" if others else str(error)
            raise ConfigError(told) from None
        return next(iter(found.values()))
    return None


def spelled(text: str) -> str:
    """The one spelling: a layout in small letters without spaces, a registered name as it is.

    Raises:
        ConfigError: neither a layout nor registered.
    """
    return normal(text) if find(text) is None else text.strip()
