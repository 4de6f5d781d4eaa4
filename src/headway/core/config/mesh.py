"""Layouts such as `fsdp+tp=2`: the axes along which model and data are split, and the number of ranks along each axis.

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
_MAX_LENGTH = 200
"""Maximum number of characters in a layout."""

_TERMS = {"ddp": "replicate", "fsdp": "shard", "ep": "ep", "cp": "cp", "tp": "tp", "pp": "pp"}
_DESCRIPTIONS = {
    "pp": "pipeline stages",
    "replicate": "replicas",
    "shard": "shards",
    "ep": "groups of experts",
    "cp": "parts of a sequence",
    "tp": "parts of a matrix",
}

# Names from other libraries, with the name to use instead.
_FOREIGN_NAMES = {
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
ENTRY_POINT_GROUP = "headway.strategies"
"""Group of entry points with which other packages register strategies."""


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
            coordinates = self.find_coordinates(rank)
            groups.setdefault((coordinates["pp"], coordinates["cp"], coordinates["tp"]), []).append(rank)
        return list(groups.values())

    def find_data_index(self, rank: int) -> int:
        """Return the index of the data shard that a rank reads.

        Ranks that differ only in their coordinates along pp, cp or tp read the same data.
        """
        coordinates = self.find_coordinates(rank)
        index = coordinates["replicate"] * self.shard + coordinates["shard"]
        return index * self.ep + coordinates["ep"]

    @property
    def stages(self) -> list[range]:
        """Ranks of each pipeline stage."""
        size = self.num_ranks // self.pp
        return [range(stage * size, (stage + 1) * size) for stage in range(self.pp)]

    @property
    def is_replicas_only(self) -> bool:
        """Whether every rank holds the full model and only the data is split."""
        return self.sizes.keys() <= {"replicate"}

    def find_coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate along each axis, starting at 0."""
        coordinates, remainder = {}, rank
        for axis in reversed(AXES):
            remainder, coordinates[axis] = divmod(remainder, int(getattr(self, axis)))
        return {axis: coordinates[axis] for axis in AXES}

    def list_groups(self, axis: str) -> list[range]:
        """Return the groups of ranks along an axis, ordered by their first rank.

        The ranks of a group differ only in their coordinate along this axis.
        """
        inner_axes = AXES[AXES.index(axis) + 1 :]
        step = prod(int(getattr(self, inner)) for inner in inner_axes)  # distance between neighbors along the axis
        span = step * int(getattr(self, axis))
        groups = []
        for base in range(0, self.num_ranks, span):
            for first in range(base, base + step):
                groups.append(range(first, first + span, step))
        return groups

    def describe(self) -> str:
        """Return a description such as "2 replicas x 4 shards"."""
        return " x ".join(f"{size} {_DESCRIPTIONS[axis]}" for axis, size in self.sizes.items()) or "one process"


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
            sizes["shard"] = self._choose_shards_per_machine(num_ranks, ranks_per_machine or num_ranks)
        product = prod(size for size in sizes.values() if size is not None)
        is_open = any(size is None for size in sizes.values())
        fits = num_ranks % product == 0 if is_open else num_ranks == product
        if not fits:
            raise ConfigError(
                f"strategy {self.text!r} takes {product} ranks{' at a time' if is_open else ''}, but the run has {num_ranks}; "
                + _suggest_sizes(sizes, product, num_ranks, is_open)
            )
        open_size = num_ranks // product
        return Layout(**{axis: open_size if size is None else size for axis, size in sizes.items()})

    def _choose_shards_per_machine(self, num_ranks: int, ranks_per_machine: int) -> int:
        """Return the size of the axis "shard" for "hsdp" without a size, whose shards span one machine.

        Raises:
            ConfigError: If there is only one machine, or the other axes leave no ranks of a machine for shards.
        """
        inner = prod(size for axis, size in self.sizes.items() if axis in ("ep", "cp", "tp") and size is not None)
        if num_ranks == 1:
            return 1  # the same script must also run with one process
        if num_ranks <= ranks_per_machine:
            fitting = [
                size for size in _list_divisors(num_ranks) if 1 < size < num_ranks and num_ranks % (size * inner) == 0
            ]
            advice = "use fsdp"
            if fitting:
                examples = ", ".join(f"hsdp={size}" for size in fitting[-3:])
                advice = f"give the number of ranks that share a copy ({examples}), or use fsdp"
            raise ConfigError(
                f"strategy {self.text!r} without a size shards within each machine, and this run has only one; {advice}"
            )
        if ranks_per_machine % inner or ranks_per_machine == inner:
            raise ConfigError(
                f"strategy {self.text!r} shards within each machine, but {ranks_per_machine} ranks on a machine leave no shards "
                f"for {inner} parts of a matrix or sequence; give hsdp a size"
            )
        return ranks_per_machine // inner


def _list_divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order."""
    up_to_root = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*up_to_root, *(number // each for each in up_to_root)})


def _suggest_sizes(sizes: Mapping[str, int | None], product: int, num_ranks: int, is_open: bool) -> str:
    """Return a hint for an error message: the nearest axis sizes, or numbers of ranks, that would fit.

    Args:
        sizes: Size of each axis. None: the axis uses all ranks that the other axes do not use.
        product: Product of the sizes that are given.
        num_ranks: Number of ranks in the run.
        is_open: Whether some axis has no size and therefore uses the remaining ranks.
    """
    suggestions = []
    for axis, size in sizes.items():
        if size is None:
            continue
        other_sizes = product // size
        fitting = [each for each in _list_divisors(num_ranks) if num_ranks % (each * other_sizes) == 0]
        if not is_open:
            fitting = [each for each in fitting if each * other_sizes == num_ranks]
        next_smaller = [each for each in fitting if each < size][-1:]
        next_larger = [each for each in fitting if each > size][:1]
        suggestions += [format_sizes({**sizes, axis: each}) for each in (*next_smaller, *next_larger)]
    if not is_open and product < num_ranks and "replicate" not in sizes and num_ranks % product == 0:
        suggestions.append(format_sizes({"replicate": num_ranks // product, **sizes}))
    counts = [product]
    if is_open:
        smaller_count = num_ranks // product * product
        counts = [smaller_count, smaller_count + product]
    ranks = " or ".join(str(count) for count in counts if count)
    if not suggestions:
        return f"run {ranks} ranks"
    return f"the nearest that fit {num_ranks}: {', '.join(dict.fromkeys(suggestions))}; or run {ranks} ranks"


def format_sizes(sizes: Mapping[str, int | None]) -> str:
    """Return the sizes of axes as the text of a layout, such as "ddp=2+fsdp=4+tp=2".

    A size of None is left out, as in "fsdp+tp=2".
    """
    names = {axis: term for term, axis in _TERMS.items()}
    used_sizes = {axis: size for axis, size in sizes.items() if size != 1}
    if not used_sizes:
        return "ddp"
    terms = []
    has_open_replicas = "replicate" in used_sizes and used_sizes["replicate"] is None
    if has_open_replicas and used_sizes.get("shard") is not None:
        terms.append(f"hsdp={used_sizes.pop('shard')}")
        del used_sizes["replicate"]
    for axis in AXES:
        if axis in used_sizes:
            size = used_sizes[axis]
            terms.append(names[axis] if size is None else f"{names[axis]}={size}")
    return "+".join(terms)


def parse_layout(text: str) -> ParsedLayout:
    """Parse a layout such as "fsdp", "hsdp=8" or "fsdp+tp=2".

    ::

        ddp               a copy of the model on every rank                (replicate)
        fsdp              parameters sharded over all ranks                (shard)
        hsdp=8            shards within groups of 8, replicas of the groups (replicate x shard)
        hsdp              shards within each machine, replicas of the machines
        tp                matrices split over all ranks                    (tp)
        fsdp+tp=2         pairs of ranks split matrices, and parameters are sharded over the pairs
        fsdp+ep=2         pairs of ranks split the experts; all other parameters are sharded over all ranks
        fsdp+cp=2         pairs of ranks split each sequence; parameters are sharded over all ranks
        pp=2+ddp          pipelines of 2 stages, replicas of the pipelines
        ddp=2+fsdp=4+tp=2 all sizes given: 16 ranks
        zero3             DeepSpeed's engine with ZeRO stage 3; also zero1, zero2, deepspeed

    Raises:
        ConfigError: If a term is unknown, two terms set the same axis, a size is not a positive integer, more than one
            axis has no size ("hsdp" without a size: more than two), a DeepSpeed term is combined with others, or the
            text is too long.
    """
    sizes: dict[str, int | None] = {}
    is_by_machine = False
    if normalize_layout(text) in ENGINES:
        return ParsedLayout(text, {"shard": None}, is_deepspeed=True)
    if len(text) > _MAX_LENGTH:
        raise ConfigError(f"strategy {shorten_repr(text)} is too long for a layout, which reads like fsdp+tp=2")
    for term in normalize_layout(text).split("+"):
        name, equals_sign, number = term.partition("=")
        size = parse_whole_number(number)
        if equals_sign and not size:
            raise ConfigError(f"strategy {text!r}: {term!r} needs a number of ranks after '=', 1 or more")
        if name == "hsdp":
            term_sizes: dict[str, int | None] = {"replicate": None, "shard": size}
            is_by_machine = size is None
        elif name in _TERMS:
            term_sizes = {_TERMS[name]: size}
        elif name in ENGINES:
            raise ConfigError(f"strategy {text!r}, but {name!r} cannot be combined with other terms")
        else:
            raise ConfigError(f"strategy {text!r}: {name!r} is unknown{_suggest_term(name)}")
        if term_sizes.keys() & sizes.keys():
            raise ConfigError(f"strategy {text!r} gives a size for {name!r} twice")
        sizes |= term_sizes
    # With "hsdp" alone, the machines determine the number of shards, so one more axis may have no size.
    max_open_sizes = 2 if is_by_machine else 1
    if list(sizes.values()).count(None) > max_open_sizes:
        raise ConfigError(f"strategy {text!r} omits more than one size; give all but one, as in hsdp=8 or fsdp+tp=2")
    return ParsedLayout(text, sizes, is_by_machine)


def normalize_layout(text: str) -> str:
    """Return the text of a layout in lower case without spaces."""
    return "".join(text.lower().split())


def _suggest_term(name: str) -> str:
    """Return the end of the error message for an unknown term of a strategy: a similar term, or all allowed ones."""
    from difflib import get_close_matches

    if name in _FOREIGN_NAMES:
        return f"; write {_FOREIGN_NAMES[name]}"
    terms = (*_TERMS, "hsdp")
    close = get_close_matches(name, terms, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    allowed = f"{', '.join(terms)}, joined by '+', each with or without =RANKS, as in fsdp+tp=2"
    return f"{hint or ';'} allowed: {allowed}; or {', '.join(ENGINES)}"


def describe_groups(layout: Layout, max_groups: int = 4) -> Iterator[str]:
    """Yield one line of text per axis, with the axis's size and its first `max_groups` groups of ranks."""
    for axis, size in layout.sizes.items():
        groups = layout.list_groups(axis)
        shown = ", ".join(_format_ranks(group) for group in groups[:max_groups])
        omitted = f" and {len(groups) - max_groups} more" if len(groups) > max_groups else ""
        yield f"{axis} = {size}: ranks {shown}{omitted}"


def _format_ranks(group: range) -> str:
    """Return the ranks of a group as text, such as "(0 1 2 3)" or "(0 2 .. 14)"."""
    if len(group) <= 4:
        return "(" + " ".join(str(rank) for rank in group) + ")"
    return f"({group[0]} {group[1]} .. {group[-1]})"


def find_entry_point(text: str) -> "EntryPoint | None":
    """Return the entry point that another package registered for a strategy such as "mirror" or "mirror=2".

    A package registers a strategy in its `pyproject.toml`::

        [project.entry-points."headway.strategies"]
        mirror = "my_package.mirror:MirrorStrategy"

    Return None if `text` is a layout. Layouts take precedence over registered names. The package is not imported.

    Raises:
        ConfigError: If `text` is neither a layout nor a registered name, or two packages registered it.
    """
    try:
        parse_layout(text)
    except ConfigError as error:
        from importlib.metadata import entry_points  # slow: takes as long as the rest of a launch

        name = text.partition("=")[0].strip()
        registered = entry_points(group=ENTRY_POINT_GROUP)
        matches = {point.value: point for point in registered if point.name == name}
        if len(matches) > 1:
            values = ", ".join(sorted(matches))
            raise ConfigError(
                f"strategy {text!r} is registered {len(matches)} times ({values}); keep one of these packages"
            ) from None
        if not matches:
            all_names = ", ".join(sorted({point.name for point in registered}))
            message = f"{error}. Installed packages register: {all_names}" if all_names else str(error)
            raise ConfigError(message) from None
        return next(iter(matches.values()))
    return None


def normalize_strategy(text: str) -> str:
    """Return the canonical spelling of a strategy.

    A layout is converted to lower case without spaces. From a name that another package registered, only spaces at the
    ends are removed.

    Raises:
        ConfigError: If `text` is neither a layout nor a registered name, or two packages registered the name.
    """
    return normalize_layout(text) if find_entry_point(text) is None else text.strip()
