"""Layouts such as `fsdp+tp=2`: the axes along which model and data are split, and the number of ranks along each axis.

::

    ddp               a copy of the model on every rank                (replicate)
    fsdp              parameters sharded over all ranks                (shard)
    hsdp=8            shards within groups of 8, replicas of the groups (replicate x shard)
    hsdp              shards within each machine, replicas of the machines
    tp                matrices split over all ranks                    (tp)
    fsdp+tp=2         pairs of ranks split matrices, and parameters are sharded over the pairs
    fsdp+ep=2         pairs of ranks split the experts; all other parameters are sharded over all ranks
    ddp=2+fsdp=4+tp=2 all sizes given: 16 ranks
    zero3             DeepSpeed's engine with ZeRO stage 3; also zero1, zero2, deepspeed

Other packages can register strategies as entry points of the group `headway.strategies`::

    [project.entry-points."headway.strategies"]
    mirror = "my_package.mirror:MirrorStrategy"

This module does not import torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from headway.common.untrusted import parse_whole_number, shorten_repr
from headway.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

AXES = ("pp", "replicate", "shard", "cp", "ep", "tp")
"""Axes from outermost to innermost. Consecutive ranks are neighbors along the last axis."""
ENGINES = ("deepspeed", "zero1", "zero2", "zero3")
"""Names of layouts that cannot be combined with others: DeepSpeed's engine and its ZeRO stages."""
_LONGEST = 200
"""Maximum number of characters in a layout."""

_TERMS = {"ddp": "replicate", "fsdp": "shard", "ep": "ep", "cp": "cp", "tp": "tp", "pp": "pp"}
_WORDS = {
    "pp": "pipeline stages",
    "replicate": "replicas",
    "shard": "shards",
    "ep": "groups of experts",
    "cp": "parts of a sequence",
    "tp": "parts of a matrix",
}

# Names from other libraries, with the name to use instead.
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
    """Sizes of a device mesh: the number of ranks along each axis. An axis that is not used has size 1.

    Attributes:
        pp: Number of pipeline stages.
        replicate: Number of replicas.
        shard: Number of ranks over which each parameter is sharded along dim 0 (FSDP).
        cp: Number of ranks over which each sequence is split. Parameters are sharded over `cp` together with `shard`.
        ep: Number of ranks over which experts are distributed. Other parameters are sharded over `ep` together with
            `shard`.
        tp: Number of ranks over which each layer's matrices are split.
    """

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the axes that have more than one rank, by name, outermost axis first."""
        return {axis: size for axis in AXES if (size := int(getattr(self, axis))) > 1}

    @property
    def num_ranks(self) -> int:
        """Total number of ranks."""
        return prod(self.sizes.values())

    @property
    def num_data_shards(self) -> int:
        """Number of shards into which the data is split. Several ranks can read one shard."""
        return self.replicate * self.shard * self.ep

    @property
    def num_shards(self) -> int:
        """Number of ranks over which each parameter is sharded along dim 0, including those along ep and cp."""
        return self.shard * self.ep * self.cp

    @property
    def data_groups(self) -> list[list[int]]:
        """Groups of ranks that hold the same part of the model but read different data.

        The ranks of a group are in the order of the data shards that they read.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.num_ranks):
            at = self.find_coordinates(rank)
            groups.setdefault((at["pp"], at["cp"], at["tp"]), []).append(rank)
        return list(groups.values())

    def find_data_index(self, rank: int) -> int:
        """Return the index of the data shard that a rank reads.

        Ranks that differ only in their coordinates along pp, cp or tp read the same data.
        """
        at = self.find_coordinates(rank)
        return (at["replicate"] * self.shard + at["shard"]) * self.ep + at["ep"]

    @property
    def stages(self) -> list[range]:
        """Ranks of each pipeline stage."""
        size = self.num_ranks // self.pp
        return [range(stage * size, (stage + 1) * size) for stage in range(self.pp)]

    @property
    def is_replicas_only(self) -> bool:
        """Whether every rank holds the full model and only the data is split."""
        return not self.sizes.keys() - {"replicate"}

    def find_coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate along each axis, starting at 0."""
        found, remainder = {}, rank
        for axis in reversed(AXES):
            remainder, found[axis] = divmod(remainder, int(getattr(self, axis)))
        return {axis: found[axis] for axis in AXES}

    def list_groups(self, axis: str) -> list[range]:
        """Return the groups of ranks along an axis.

        The ranks of a group differ only in their coordinate along this axis.
        """
        step = prod(int(getattr(self, inner)) for inner in AXES[AXES.index(axis) + 1 :])
        size = int(getattr(self, axis))
        span = step * size
        return [
            range(base + at, base + at + span, step) for base in range(0, self.num_ranks, span) for at in range(step)
        ]

    def describe(self) -> str:
        """Return a description such as "2 replicas x 4 shards"."""
        return " x ".join(f"{size} {_WORDS[axis]}" for axis, size in self.sizes.items()) or "one process"


@dataclass(frozen=True)
class ParsedLayout:
    """Layout that a user requested as text, before the number of ranks is known.

    Attributes:
        text: Layout as written, for messages.
        sizes: Size of each axis. None: all ranks that the other axes do not use.
        is_by_machine: Whether shards span the ranks of one machine ("hsdp" without a size).
        is_deepspeed: Whether DeepSpeed's engine is requested.
    """

    text: str
    sizes: Mapping[str, int | None]
    is_by_machine: bool = False
    is_deepspeed: bool = False

    def resolve(self, num_ranks: int, ranks_per_machine: int | None = None) -> Layout:
        """Return the layout on `num_ranks` ranks.

        Args:
            num_ranks: Number of ranks over all machines.
            ranks_per_machine: Number of ranks on each machine. None: all ranks are on one machine.

        Raises:
            ConfigError: If the sizes do not fit the number of ranks, or "hsdp" without a size does not fit the
                machines. The message names sizes that fit.
        """
        sizes = dict(self.sizes)
        if self.is_by_machine:
            sizes["shard"] = self._within_a_machine(num_ranks, ranks_per_machine or num_ranks)
        known = prod(size for size in sizes.values() if size is not None)
        open_axes = [axis for axis, size in sizes.items() if size is None]
        if num_ranks % known or (not open_axes and known != num_ranks):
            raise ConfigError(
                f"strategy {self.text!r} takes {known} ranks{' at a time' if open_axes else ''}, but the run has {num_ranks}; "
                + _suggest_sizes(sizes, known, num_ranks, bool(open_axes))
            )
        left = num_ranks // known
        return Layout(**{axis: left if size is None else size for axis, size in sizes.items()})

    def _within_a_machine(self, num_ranks: int, ranks_per_machine: int) -> int:
        inner = prod(size for axis, size in self.sizes.items() if axis in ("ep", "cp", "tp") and size is not None)
        if num_ranks == 1:
            return 1  # the same script must also run with one process
        if num_ranks <= ranks_per_machine:
            fit = [
                size for size in _list_divisors(num_ranks) if 1 < size < num_ranks and num_ranks % (size * inner) == 0
            ]
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


def _list_divisors(number: int) -> list[int]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def _suggest_sizes(sizes: Mapping[str, int | None], known: int, num_ranks: int, is_open: bool) -> str:
    """Return a hint for an error message: the nearest axis sizes, or numbers of ranks, that would fit.

    Args:
        sizes: Size of each axis. None: the axis uses all ranks that the other axes do not use.
        known: Product of the sizes that are given.
        num_ranks: Number of ranks in the run.
        is_open: Whether some axis has no size and therefore uses the remaining ranks.
    """
    fits = []
    for axis, size in sizes.items():
        if size is None:
            continue
        others = known // size
        good = [each for each in _list_divisors(num_ranks) if num_ranks % (each * others) == 0]
        good = good if is_open else [each for each in good if each * others == num_ranks]
        below = [each for each in good if each < size][-1:]
        above = [each for each in good if each > size][:1]
        fits += [format_sizes({**sizes, axis: each}) for each in (*below, *above)]
    if not is_open and known < num_ranks and "replicate" not in sizes and num_ranks % known == 0:
        fits.append(format_sizes({"replicate": num_ranks // known, **sizes}))
    counts = [num_ranks // known * known, (num_ranks // known + 1) * known] if is_open else [known]
    ranks = " or ".join(str(count) for count in counts if count)
    near = f"the nearest that fit {num_ranks}: {', '.join(dict.fromkeys(fits))}; or " if fits else ""
    return f"{near}run {ranks} ranks"


def format_sizes(sizes: Mapping[str, int | None]) -> str:
    """Return the sizes of axes as the text of a layout, such as "ddp=2+fsdp=4+tp=2".

    A size of None is left out, as in "fsdp+tp=2".
    """
    names = {axis: term for term, axis in _TERMS.items()}
    sizes = {axis: size for axis, size in sizes.items() if size != 1} or {"replicate": None}
    terms = []
    if sizes.get("replicate", 0) is None and sizes.get("shard") is not None:
        terms = [f"hsdp={sizes.pop('shard')}"]
        del sizes["replicate"]
    terms += [names[axis] + (f"={sizes[axis]}" if sizes[axis] is not None else "") for axis in AXES if axis in sizes]
    return "+".join(terms)


def parse_layout(text: str) -> ParsedLayout:
    """Parse a layout such as "fsdp", "hsdp=8" or "fsdp+tp=2".

    Raises:
        ConfigError: If a term is unknown or repeated, a size is not a positive integer, two terms have no size, or the
            text is too long.
    """
    sizes: dict[str, int | None] = {}
    is_by_machine = False
    if normalize_layout(text) in ENGINES:
        return ParsedLayout(text, {"shard": None}, is_deepspeed=True)
    if len(text) > _LONGEST:
        raise ConfigError(f"strategy {shorten_repr(text)} is too long for a layout, which reads like fsdp+tp=2")
    for term in normalize_layout(text).split("+"):
        name, has_size, number = term.partition("=")
        size = parse_whole_number(number)
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
                else f": {name!r} is unknown{_suggest_term(name)}"
            )
            raise ConfigError(f"strategy {text!r}{alone}")
        if found.keys() & sizes.keys():
            raise ConfigError(f"strategy {text!r} gives a size for {name!r} twice")
        sizes |= found
    if list(sizes.values()).count(None) - is_by_machine > 1:
        raise ConfigError(f"strategy {text!r} omits more than one size; give all but one, as in hsdp=8 or fsdp+tp=2")
    return ParsedLayout(text, sizes, is_by_machine)


def normalize_layout(text: str) -> str:
    """Return the text of a layout in lower case without spaces."""
    return "".join(text.lower().split())


def _suggest_term(name: str) -> str:
    from difflib import get_close_matches

    if name in _OTHER_WORDS:
        return f"; write {_OTHER_WORDS[name]}"
    served = (*_TERMS, "hsdp")
    close = get_close_matches(name, served, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    words = f"{', '.join(served)}, joined by '+', each with or without =RANKS, as in fsdp+tp=2"
    return f"{hint or ';'} allowed: {words}; or {', '.join(ENGINES)}"


def describe_groups(layout: Layout, most: int = 4) -> Iterator[str]:
    """Yield one line of text per axis, with the axis's size and its first `most` groups of ranks."""
    for axis, size in layout.sizes.items():
        groups = layout.list_groups(axis)
        shown = ", ".join(_format_ranks(group) for group in groups[:most])
        omitted = f" and {len(groups) - most} more" if len(groups) > most else ""
        yield f"{axis} = {size}: ranks {shown}{omitted}"


def _format_ranks(group: range) -> str:
    if len(group) <= 4:
        return "(" + " ".join(str(rank) for rank in group) + ")"
    return f"({group[0]} {group[1]} .. {group[-1]})"


GROUP = "headway.strategies"


def find_entry_point(text: str) -> "EntryPoint | None":
    """Return the entry point that another package registered for a strategy such as "mirror" or "mirror=2".

    Return None if `text` is a layout. Layouts take precedence over registered names. The package is not imported.

    Raises:
        ConfigError: If `text` is neither a layout nor a registered name, or two packages registered it.
    """
    try:
        parse_layout(text)
    except ConfigError as error:
        from importlib.metadata import entry_points  # slow: takes as long as the rest of a launch

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
            message = f"{error}. Installed packages register: {others}" if others else str(error)
            raise ConfigError(message) from None
        return next(iter(found.values()))
    return None


def normalize_strategy(text: str) -> str:
    """Return the canonical spelling of a strategy.

    A layout is converted to lower case without spaces. From a name that another package registered, only spaces at the
    ends are removed.

    Raises:
        ConfigError: If `text` is neither a layout nor a registered name, or two packages registered the name.
    """
    return normalize_layout(text) if find_entry_point(text) is None else text.strip()
