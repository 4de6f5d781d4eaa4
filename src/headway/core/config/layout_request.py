"""Collector of the layout settings that plugins and config files request. This module does not import torch."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from headway.core.config import mesh
from headway.core.config.parallelism import TorchContextParallelConfig
from headway.errors import ConfigError


class RequestedValue(NamedTuple):
    """Value that a plugin or a config file requests.

    Attributes:
        value: Requested value.
        key: Argument of a plugin, or key of a config file, that requests the value. Several keys are separated by commas.
    """

    value: Any
    key: str


@dataclass
class LayoutRequest:
    """Collector of the layout settings that plugins and config files request.

    Each setting is recorded with its key: the argument of a plugin, or the key of a config file, that requested it.

    Attributes:
        settings: Requested values, by name of Headway's setting.
        lines: Pairs of (key, text that describes the effect of the key), in the order of the requests.
        ignored: Keys that have no effect, each with the reason in parentheses.
        refused: Mapping from each unsupported key to advice for the user.
        dtypes: Dtypes of FSDP's mixed precision policy, by field of ShardingOptions.
        context: Options of context parallelism; None if none were requested.
    """

    settings: dict[str, RequestedValue] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, Any] = field(default_factory=dict)
    context: TorchContextParallelConfig | None = None
    _sizes: dict[str, RequestedValue] = field(default_factory=dict)  # number of ranks, by axis
    _sharding: dict[str, str] = field(default_factory=dict)  # "fsdp", "hsdp" or "ddp", by key
    _engines: dict[str, str] = field(default_factory=dict)  # "deepspeed" or a layout with a ZeRO stage, by key

    def request_setting(self, setting: str, value: Any, key: str) -> None:
        """Record that `key` requests a value for a setting.

        Args:
            setting: Name of Headway's setting.
            value: Requested value.
            key: Argument of a plugin, or key of a config file, that requests the value. It is shown in messages.

        Raises:
            ConfigError: If another key requested a different value.
        """
        earlier = self.settings.get(setting)
        if earlier is not None and earlier.value != value:
            raise ConfigError(
                f"{earlier.key} requests {setting}={earlier.value!r}, but {key} requests {value!r}; keep one"
            )
        self.settings[setting] = RequestedValue(value, key)
        self.lines.append((key, f"{setting}: {value!r}"))

    def ignore_key(self, key: str, reason: str) -> None:
        """Record that `key` has no effect, with the reason.

        Args:
            key: Argument of a plugin, or key of a config file.
            reason: Explanation for the user.
        """
        self.ignored.append(f"{key} ({reason})")
        self.lines.append((key, f"not needed: {reason}"))

    def refuse_key(self, key: str, reason: str) -> None:
        """Record that `key` is not supported, with advice for the user.

        Args:
            key: Argument of a plugin, or key of a config file.
            reason: Explanation and advice for the user.
        """
        self.refused[key] = reason

    def use_shards(self, key: str, layout: str = "fsdp") -> None:
        """Request a sharded layout ("fsdp" or "hsdp") without sizes, or replicas ("ddp").

        Args:
            key: Argument of a plugin, or key of a config file, that requests the layout.
            layout: "fsdp", "hsdp" or "ddp". Default: "fsdp".
        """
        # "fsdp" does not replace a more specific layout that the same key has requested.
        if layout != "fsdp" or key not in self._sharding:
            self._sharding[key] = layout

    def use_deepspeed(self, key: str, stage: str = "deepspeed") -> None:
        """Request DeepSpeed's engine.

        Args:
            key: Argument of a plugin, or key of a config file, that requests the engine.
            stage: Layout that selects a ZeRO stage, such as "zero3". Default: "deepspeed", without a stage.
        """
        if stage != "deepspeed" or key not in self._engines:
            self._engines[key] = stage

    def set_size(self, axis: str, size: int, key: str) -> None:
        """Request a number of ranks along an axis.

        Args:
            axis: Name of the axis, such as "tp".
            size: Number of ranks.
            key: Argument of a plugin, or key of a config file, that requests the number.

        Raises:
            ConfigError: If two keys request different numbers larger than 1.
        """
        earlier = self._sizes.get(axis)
        if earlier is not None and earlier.value > 1 and size not in (1, earlier.value):
            raise ConfigError(f"{earlier.key}={earlier.value} contradicts {key}={size}; keep one of them")
        if earlier is None or size > 1:  # a size of 1 does not replace a larger one
            self._sizes[axis] = RequestedValue(size, key)
        self.lines.append((key, "size 1: nothing is split along it" if size == 1 else f"strategy: {axis} = {size}"))

    @property
    def has_sizes(self) -> bool:
        """Whether a size larger than 1 was requested for an axis."""
        return any(size.value > 1 for size in self._sizes.values())

    def find_strategy(self) -> RequestedValue | None:
        """Return the requested layout as text, with the keys that request it, or None if no layout was requested.

        Raises:
            ConfigError: If the requests contradict each other.
        """
        size_keys = [size.key for size in self._sizes.values() if size.value > 1]
        if self._engines and (self._sharding or size_keys):
            sharding_keys = ", ".join([*self._sharding, *size_keys])
            raise ConfigError(
                f"DeepSpeed ({', '.join(self._engines)}) and torch's own engine ({sharding_keys}) are both "
                "requested; keep one"
            )
        if self._engines:
            stages = sorted(set(self._engines.values()) - {"deepspeed"}) or ["deepspeed"]
            return RequestedValue(stages[0], ", ".join(self._engines))
        kinds = set(self._sharding.values()) - {"fsdp"}
        if len(kinds) > 1:
            raise ConfigError(f"{' and '.join(self._sharding)} ask for different layouts; keep one")
        if size_keys:
            keys = ", ".join(size_keys)
            return RequestedValue(self._format_requested_sizes(kinds, keys), keys)
        if not self._sharding:
            return None
        return RequestedValue(kinds.pop() if kinds else "fsdp", ", ".join(self._sharding))

    def _format_requested_sizes(self, kinds: set[str], keys: str) -> str:
        """Return the requested sizes as the text of a layout.

        Args:
            kinds: Layouts without sizes that were requested, other than "fsdp".
            keys: Keys that request the sizes, for error messages.

        Raises:
            ConfigError: If a sharded layout and sizes without shards are requested, or replicas and shards.
        """
        sizes = {axis: size.value for axis, size in self._sizes.items()}
        if kinds == {"ddp"} and sizes.get("shard", 1) > 1:
            raise ConfigError(
                f"{' and '.join(self._sharding)} request unsharded models, but {keys} requests shards; keep one"
            )
        asks_for_shards = bool(self._sharding) and kinds != {"ddp"}
        if asks_for_shards and not any(sizes.get(axis, 1) != 1 for axis in ("shard", "ep", "cp")):
            raise ConfigError(
                f"{next(iter(self._sharding))} asks for a sharded model, but with {keys} no processes are left to shard across; give "
                "dp_shard_size, or remove FSDP"
            )
        return mesh.format_sizes(sizes)


class LayoutPlugin(Protocol):
    """Interface of plugin classes that request a layout. Their arguments are those of another library's plugins.

    Attributes:
        argument: Name of the Accelerator's argument that accepts this plugin.
    """

    argument: ClassVar[str]

    def request_layout(self, request: LayoutRequest) -> None:
        """Record in `request` the layout settings that this plugin requests."""
