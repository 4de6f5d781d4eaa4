"""What plugins, flags and files of other libraries ask of the layout, once it has been put into Headway's settings.

Options of context parallelism: how sequences are split across the ranks of the `cp` axis. Torch-free.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from headway.config import mesh
from headway.errors import ConfigError

ROTATIONS = ("allgather", "alltoall")
"""How keys and values travel."""
CP_STYLES = ("ring", "ulysses", "auto")
"""What each rank computes attention of: queries of its part, or some heads of all tokens."""


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism, in a ParallelismConfig or in `kwargs_handlers`.

    Attributes:
        cp_comm_strategy: "allgather" (default) or "alltoall": how keys and values travel in torch's ring attention.
        labels: arguments of the model, of the shape (rows, tokens), from which it computes a loss over tokens itself.
        blocks: classes, class names or names of the modules through which sequences go; none: what is repeated in the model.
        ignore_index: the label that the loss ignores; None (default): what the model passes to torch's cross entropy, or -100.
        cp_style: "ring" (default): each rank keeps the queries of its part, and keys and values are passed around. "ulysses": each
            rank computes some of the heads for whole sequences (Jacobs et al., 2023, arXiv 2309.14509); the number of heads must be
            a multiple of the number of ranks. "auto": the one that sends less.
    """

    cp_comm_strategy: str | None = None
    labels: tuple[str, ...] = ("labels", "shift_labels", "targets", "target")
    blocks: tuple[Any, ...] = ()
    ignore_index: int | None = None
    cp_style: str = "ring"

    def __post_init__(self) -> None:
        for name in ("labels", "blocks"):
            value = getattr(self, name)
            setattr(self, name, (value,) if isinstance(value, str | type) else tuple(value))
        self.cp_comm_strategy = self.cp_comm_strategy or "allgather"
        if self.cp_comm_strategy not in ROTATIONS:
            raise ConfigError(f"cp_comm_strategy={self.cp_comm_strategy!r}; allowed: {', '.join(ROTATIONS)}")
        if self.cp_style not in CP_STYLES:
            raise ConfigError(f"cp_style={self.cp_style!r}; allowed: {', '.join(CP_STYLES)}")


@dataclass
class LayoutRequest:
    """Collects what is asked for, each time with the key that asks for it.

    Attributes:
        settings: setting -> (value, key).
        lines: for each key, (key, what it became).
        refused: keys that cannot be served, and what to do.
        dtypes: of FSDP's policy of precision, by the fields of ShardingOptions.
        context: options of context parallelism.
    """

    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, Any] = field(default_factory=dict)
    context: TorchContextParallelConfig | None = None
    _sizes: dict[str, tuple[int, str]] = field(default_factory=dict)
    _sharding: dict[str, str] = field(default_factory=dict)
    _engines: dict[str, str] = field(default_factory=dict)

    def take(self, setting: str, value: Any, key: str) -> None:
        """Let `key` decide a setting.

        Raises:
            ConfigError: another key says something else.
        """
        before, other = self.settings.get(setting, (value, key))
        if before != value:
            raise ConfigError(f"{other} says {setting}={before!r}, but {key} says {value!r}; keep one")
        self.settings[setting] = (value, key)
        self.lines.append((key, f"{setting}: {value!r}"))

    def ignore(self, key: str, reason: str) -> None:
        """Note that `key` changes nothing, and why."""
        self.lines.append((key, f"not needed: {reason}"))

    def refuse(self, key: str, reason: str) -> None:
        """Note that `key` cannot be served, and what to do."""
        self.refused[key] = reason

    def use_shards(self, key: str, layout: str = "fsdp") -> None:
        """Ask for shards of whatever sizes ("fsdp"), for "hsdp", or for none ("ddp")."""
        if layout != "fsdp" or key not in self._sharding:
            self._sharding[key] = layout

    def use_deepspeed(self, key: str, stage: str = "deepspeed") -> None:
        """Ask for DeepSpeed's engine."""
        if stage != "deepspeed" or key not in self._engines:
            self._engines[key] = stage

    def set_size(self, axis: str, size: int, key: str) -> None:
        """Ask for so many processes along an axis.

        Raises:
            ConfigError: another key asks for another number.
        """
        before, other = self._sizes.get(axis, (1, key))
        if before > 1 and size not in (1, before):
            raise ConfigError(f"{other}={before} contradicts {key}={size}; keep one of them")
        self._sizes[axis] = (size, key) if size > 1 else (before, other)
        self.lines.append((key, "size 1: nothing is split along it" if size == 1 else f"strategy: {axis} = {size}"))

    @property
    def ignored(self) -> list[str]:
        """Keys that change nothing, each with its reason."""
        return [
            f"{key} ({text.removeprefix('not needed: ')})" for key, text in self.lines if text.startswith("not needed")
        ]

    @property
    def has_sizes(self) -> bool:
        """Are there sizes of several processes?"""
        return any(size > 1 for size, _ in self._sizes.values())

    def strategy(self) -> tuple[str, str] | None:
        """The layout and the keys that ask for it; None where nothing asks for one.

        Raises:
            ConfigError: the keys contradict each other.
        """
        sized_by = [key for size, key in self._sizes.values() if size > 1]
        if self._engines and (self._sharding or sized_by):
            raise ConfigError(
                f"DeepSpeed ({', '.join(self._engines)}) and torch's own engine ({', '.join([*self._sharding, *sized_by])}) are both "
                "requested; keep one"
            )
        if self._engines:
            stages = sorted(set(self._engines.values()) - {"deepspeed"}) or ["deepspeed"]
            return stages[0], ", ".join(self._engines)
        kinds = set(self._sharding.values()) - {"fsdp"}
        if len(kinds) > 1:
            raise ConfigError(f"{' and '.join(self._sharding)} ask for different layouts; keep one")
        if sized_by:
            return self._written_sizes(kinds, ", ".join(sized_by)), ", ".join(sized_by)
        if not self._sharding:
            return None
        return (kinds.pop() if kinds else "fsdp"), ", ".join(self._sharding)

    def _written_sizes(self, kinds: set[str], by: str) -> str:
        sizes = {axis: size for axis, (size, _) in self._sizes.items()}
        if kinds == {"ddp"} and sizes.get("shard", 1) > 1:
            raise ConfigError(f"{' and '.join(self._sharding)} ask for whole models, but {by} for shards; keep one")
        asks_for_shards = bool(self._sharding) and kinds != {"ddp"}
        if asks_for_shards and not any(sizes.get(axis, 1) != 1 for axis in ("shard", "ep", "cp")):
            raise ConfigError(
                f"{next(iter(self._sharding))} asks for a sharded model, but with {by} no processes are left to shard across; give "
                "dp_shard_size, or remove FSDP"
            )
        return mesh.written(sizes)


class LayoutPlugin(Protocol):
    """An object of another library's kind that the Accelerator takes by the name `argument`."""

    argument: ClassVar[str]

    def request_layout(self, request: LayoutRequest) -> None:
        """Add what it asks for."""
