"""How Accelerate's settings for layouts are translated: one table for its launch flags, its config files and its plugins.

Each key is served (it decides a setting), needless (it changes nothing here, and the reason is told) or refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway import env
from headway.config import mesh
from headway.config.launch import OF_DEEPSPEED, ROTATIONS, WRAPPING
from headway.errors import ConfigError
from headway.untrusted import shown, whole_number

SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP version 1's layouts, in the order of torch's enumeration, from 1."""
_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_AXES = {"dp_replicate_size": "replicate", "dp_shard_size": "shard", "cp_size": "cp", "tp_size": "tp"}

_ALIASES = {"cpu_offload": "offload_params", "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap"}
"""The plugin's fields by the names of the flags."""

_NEEDLESS = {
    "use_orig_params": "FSDP2 always keeps the model's own parameters",
    "sync_module_states": "prepare() gives all ranks the values of rank 0",
    "cpu_ram_efficient_loading": (
        "prepare() gives all ranks the values of rank 0, and a model built under init_empty_weights() takes no memory until then"
    ),
    "limit_all_gathers": "FSDP2 itself keeps at most two blocks gathered",
    "forward_prefetch": "FSDP2 gathers the next block while this one computes",
    "state_dict_config": "checkpoints are sharded and can be loaded under any layout",
    "optim_state_dict_config": "checkpoints are sharded and can be loaded under any layout",
}
_CHECKED = {"state_dict_type": "state_dict_config", "backward_prefetch": "forward_prefetch"}
"""Further keys that change nothing, for the reason of another, but whose values are checked."""
_REFUSED = {
    "ignored_modules": (
        "name the frozen modules that should stay whole: Accelerator(kwargs_handlers=[ShardingOptions(ignored=(...))])"
    ),
    "param_init_fn": (
        "a model on the meta device is initialised by its modules' reset_parameters(); give those classes one"
    ),
}
_NEEDLESS_OF_DEEPSPEED = {
    "zero3_save_16bit_model": "save_model() writes whole weights",
    **dict.fromkeys(
        (
            "deepspeed_hostfile",
            "deepspeed_exclusion_filter",
            "deepspeed_inclusion_filter",
            "deepspeed_multinode_launcher",
        ),
        "`headway launch` starts the processes, with one launcher per machine",
    ),
}
_REFUSED_OF_DEEPSPEED = {
    "zero3_init_flag": (
        "a model is built whole on each process and partitioned in prepare(); leave it out. If the model does not fit, use "
        "--strategy fsdp, which supports models on the meta device"
    ),
    "deepspeed_moe_layer_cls_names": "mixtures of experts are partitioned like other layers; leave it out",
}
DEEPSPEED_KEYS = ("zero_stage", *OF_DEEPSPEED, *_NEEDLESS_OF_DEEPSPEED, *_REFUSED_OF_DEEPSPEED)
"""Options of DeepSpeed that this table knows."""


@dataclass
class Foreign:
    """Collects what keys of Accelerate's say of the layout.

    Attributes:
        settings: what they decide: setting -> (value, the key that says it).
        lines: for each key that was read, (key, what it became).
        refused: keys that cannot be served, and what to do.
        dtypes: of FSDP's policy of precision, by the fields of ShardingOptions.
    """

    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, Any] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)
    _sharding: dict[str, str] = field(default_factory=dict)
    _sized_by: list[str] = field(default_factory=list)
    _stages: dict[str, str] = field(default_factory=dict)

    # ---------------------------------------------------------------- keys

    def use_fsdp(self, key: str) -> None:
        """The model is to be sharded, whatever else is said."""
        self._sharding.setdefault(key, "fsdp")

    def fsdp(self, name: str, value: Any, key: str | None = None) -> None:
        """Read one option of FSDP.

        Args:
            name: without "fsdp_", or a field of FullyShardedDataParallelPlugin.
            value: text of a command line, a value of a file, or what the plugin was given.
            key: how it is called where it was written.

        Raises:
            ConfigError: a value that Accelerate does not have either.
        """
        key = key or f"fsdp_{name}"
        name = _ALIASES.get(name, name)
        if name in _NEEDLESS:
            self._needless(key, _NEEDLESS[name])
        elif name in _REFUSED:
            self.refuse(key, _REFUSED[name])
        elif name in _READERS:
            _READERS[name](self, value, key)
        else:
            raise ConfigError(f"{key} is not an FSDP option; remove it")

    def size(self, name: str, value: Any, key: str | None = None) -> None:
        """Read one key of a ParallelismConfig, without its prefix.

        Raises:
            ConfigError: a size that is not a number of processes.
        """
        key = key or f"parallelism_config_{name}"
        if name == "cp_backend":
            _word(value, ("TORCH",), key)
            self._needless(key, "there is no other backend than torch")
        elif name == "cp_comm_strategy":
            self._take(name, _word(value, tuple(map(str.upper, ROTATIONS)), key).lower(), key)
        elif name.startswith("sp_") and (name != "sp_size" or _number(value, key, 1) == 1):
            self._needless(key, "DeepSpeed's sequence parallelism is not supported")
        elif name == "sp_size":
            self.refuse(
                key,
                "DeepSpeed's sequence parallelism (Ulysses) is not supported; if activations are too large, checkpoint them "
                "(--fsdp_activation_checkpointing true), or use tensor parallelism's own (docs/tensor_parallel.md)",
            )
        elif name in _AXES:
            size = _number(value, key, 1)
            self._sizes[_AXES[name]] = size
            self._sized_by += [key] if size > 1 else []
            self.lines.append(
                (key, "size 1: nothing is split along it" if size == 1 else f"strategy: {_AXES[name]} = {size}")
            )
        else:
            raise ConfigError(f"{key} is not a key of parallelism_config; remove it")

    def use_deepspeed(self, key: str) -> None:
        """DeepSpeed is to be the engine, whatever else is said."""
        self._stages.setdefault(key, "deepspeed")

    def deepspeed(self, name: str, value: Any, key: str | None = None) -> None:
        """Read one option of DeepSpeed.

        Raises:
            ConfigError: a value that Accelerate does not have either.
        """
        key = key or name
        if name in _NEEDLESS_OF_DEEPSPEED:
            self._needless(key, _NEEDLESS_OF_DEEPSPEED[name])
        elif name in _REFUSED_OF_DEEPSPEED:
            refused = _truth(value) is not False and str(value).lower() != "none"
            self.refuse(key, _REFUSED_OF_DEEPSPEED[name]) if refused else self._needless(key, "off")
        elif str(value).lower() in ("none", "auto"):
            self._needless(key, "undecided")
        elif name == "zero_stage":
            self._stage(value, key)
        elif name == "gradient_clipping":
            self._clipping(value, key)
        elif name in ("offload_optimizer_device", "offload_param_device"):
            self._take(name, _word(value, ("CPU", "NVME"), key).lower(), key)
        elif name in OF_DEEPSPEED:
            self._take(name, str(value), key)
        else:
            raise ConfigError(f"{key} is not a DeepSpeed option; remove it")

    def _stage(self, value: Any, key: str) -> None:
        stage = _number(value, key, 0)
        if stage not in (1, 2, 3):
            raise ConfigError(
                f"{key}={value!r}; allowed: 1, 2, 3{'; stage 0 shards nothing; leave it out' if stage == 0 else ''}"
            )
        self._stages[key] = f"zero{stage}"
        self.lines.append((key, f"strategy: 'zero{stage}'"))

    def _clipping(self, value: Any, key: str) -> None:
        try:
            self._take("gradient_clipping", float(value), key)
        except (TypeError, ValueError):
            raise ConfigError(f"{key}={value!r}; give a number") from None

    # ---------------------------------------------------------------- the layout

    @property
    def asks_for_shards(self) -> bool:
        """Do options of FSDP ask for a sharded layout, of whatever sizes?"""
        return bool(self._sharding) and "ddp" not in self._sharding.values()

    @property
    def has_sizes(self) -> bool:
        """Are there sizes of several processes?"""
        return any(size > 1 for size in self._sizes.values())

    def strategy(self) -> tuple[str, str] | None:
        """The layout and the keys that ask for it; None where nothing asks for one.

        Raises:
            ConfigError: the keys contradict each other.
        """
        if self._stages and (self._sharding or self.has_sizes):
            others = ", ".join([*self._sharding, *self._sized_by])
            raise ConfigError(
                f"DeepSpeed ({', '.join(self._stages)}) and torch's own engine ({others}) are both requested; keep one"
            )
        if self._stages:
            stages = sorted(set(self._stages.values()) - {"deepspeed"}) or ["deepspeed"]
            return stages[0], ", ".join(self._stages)
        kinds = set(self._sharding.values()) - {"fsdp"}
        if len(kinds) > 1:
            raise ConfigError(f"{' and '.join(self._sharding)} ask for different layouts; keep one")
        if self.has_sizes:
            by = ", ".join(self._sized_by)
            if kinds == {"ddp"} and self._sizes.get("shard", 1) > 1:
                raise ConfigError(f"{' and '.join(self._sharding)} ask for whole models, but {by} for shards; keep one")
            if self.asks_for_shards and self._sizes.get("shard", 1) == 1 and self._sizes.get("cp", 1) == 1:
                raise ConfigError(
                    f"{next(iter(self._sharding))} asks for a sharded model, but with {by} no processes are left to shard "
                    "across; give dp_shard_size, or remove FSDP"
                )
            return mesh.written(dict(self._sizes)), by
        if not self._sharding:
            return None
        return (kinds.pop() if kinds else "fsdp"), ", ".join(self._sharding)

    # ---------------------------------------------------------------- what became of a key

    def _take(self, setting: str, value: Any, key: str) -> None:
        before, other = self.settings.get(setting, (value, key))
        if before != value:
            raise ConfigError(f"{other} says {setting}={before!r}, but {key} says {value!r}; keep one")
        self.settings[setting] = (value, key)
        self.lines.append((key, f"{setting}: {value!r}"))

    def _needless(self, key: str, reason: str) -> None:
        self.lines.append((key, f"not needed: {reason}"))

    def refuse(self, key: str, reason: str) -> None:
        """Say that `key` cannot be served."""
        self.refused[key] = reason

    def _version(self, value: Any, key: str) -> None:
        if str(value) not in ("1", "2"):
            raise ConfigError(f"{key}={value!r}; allowed: 1, 2")
        self._needless(key, f"Headway uses FSDP2{', and accepts the keys of FSDP1' if str(value) == '1' else ''}")

    def _sharding_strategy(self, value: Any, key: str) -> None:
        word = _word(value, SHARDING, key, first=1)
        if word == "NO_SHARD":
            self._sharding[key] = "ddp"
            self.lines.append((key, "strategy: 'ddp'"))
            return
        self._sharding[key] = "hsdp" if word.startswith("HYBRID") else "fsdp"
        self.lines.append((key, f"strategy: {self._sharding[key]!r}"))
        if word in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"):
            self._take("fsdp_reshard_after_forward", False, key)

    def _reshard(self, value: Any, key: str) -> None:
        truth = _truth(value)
        if truth is not None:
            self._take("fsdp_reshard_after_forward", truth, key)
        elif str(getattr(value, "name", value)).upper() == "NO_RESHARD":
            self._take("fsdp_reshard_after_forward", False, key)
        else:
            self._sharding_strategy(value, key)

    def _offload(self, value: Any, key: str) -> None:
        kind = type(value).__name__  # torch's own classes, which are not imported here
        truth = {"CPUOffloadPolicy": True, "OffloadPolicy": False}.get(
            kind, _truth(getattr(value, "offload_params", value))
        )
        if truth is None:
            raise ConfigError(f"{key}={value!r}; give True or False")
        self._take("fsdp_offload_params", truth, key)

    def _policy(self, value: Any, key: str) -> None:
        if not callable(value):
            word = _word(value, tuple(each.upper() for each in WRAPPING), key).lower()
            self._take("fsdp_auto_wrap_policy", word, key)
            return
        classes = getattr(value, "_module_classes", None) or getattr(value, "keywords", {}).get("transformer_layer_cls")
        number = getattr(value, "keywords", {}).get("min_num_params")
        name = getattr(getattr(value, "func", value), "__name__", "")
        if classes:
            self._take("fsdp_auto_wrap_policy", WRAPPING[0], key)
            self._classes(sorted(kind.__name__ for kind in classes), key)
        elif name == "transformer_auto_wrap_policy":
            self._take("fsdp_auto_wrap_policy", WRAPPING[0], key)
        elif name == "size_based_auto_wrap_policy":
            self._take("fsdp_auto_wrap_policy", WRAPPING[1], key)
            if number:
                self._parameters(number, key)
        else:
            self.refuse(
                key, "custom policies are not supported; name the blocks' classes in transformer_cls_names_to_wrap"
            )

    def _classes(self, value: Any, key: str) -> None:
        names = [str(name) for name in value] if isinstance(value, (list, tuple, set)) else str(value).split(",")
        self._take("fsdp_transformer_layer_cls_to_wrap", ",".join(name.strip() for name in names), key)

    def _parameters(self, value: Any, key: str) -> None:
        number = _number(value, key, 0)
        if number:
            self._take("fsdp_min_num_params", number, key)
        else:
            self._needless(key, "no size: blocks are detected")

    def _truths(self, setting: str) -> Callable[[Any, str], None]:
        def read(value: Any, key: str) -> None:
            truth = _truth(value)
            if truth is None:
                raise ConfigError(f"{key}={value!r}; give true or false")
            self._take(setting, truth, key)

        return read

    def _state_dict(self, value: Any, key: str) -> None:
        word = _word(value, _STATE_DICTS, key, first=1)
        whole = "; save_model() writes whole weights" if word == "FULL_STATE_DICT" else ""
        self._needless(key, f"{_NEEDLESS['state_dict_config']}{whole}")

    def _prefetch(self, value: Any, key: str) -> None:
        _word(value, _PREFETCHES, key, first=1)
        self._needless(key, _NEEDLESS["forward_prefetch"])

    def _precision(self, value: Any, key: str) -> None:
        if isinstance(value, str):
            value = dict.fromkeys(("param_dtype", "reduce_dtype"), value)
        known = ("param_dtype", "reduce_dtype", "output_dtype")
        said = (
            value
            if isinstance(value, Mapping)
            else {name: getattr(value, name, None) for name in (*known, "buffer_dtype")}
        )
        for name, dtype in said.items():
            if name in known and dtype is not None:
                self.dtypes[name] = dtype
                self.lines.append((key, f"{name}: {dtype}"))
            elif name == "buffer_dtype" and dtype is not None:
                self._needless(f"{key}.buffer_dtype", "buffers keep their own")
            elif name not in (*known, "buffer_dtype"):
                raise ConfigError(f"{key} has {name!r}; allowed: {', '.join(known)}")


_READERS: Mapping[str, Callable[[Foreign, Any, str], None]] = {
    "version": Foreign._version,
    "sharding_strategy": Foreign._sharding_strategy,
    "reshard_after_forward": Foreign._reshard,
    "offload_params": Foreign._offload,
    "auto_wrap_policy": Foreign._policy,
    "transformer_layer_cls_to_wrap": Foreign._classes,
    "min_num_params": Foreign._parameters,
    "activation_checkpointing": lambda self, *said: self._truths("fsdp_activation_checkpointing")(*said),
    "activation_checkpointing_offload": lambda self, *said: self._truths("fsdp_activation_checkpointing_offload")(
        *said
    ),
    "state_dict_type": Foreign._state_dict,
    "backward_prefetch": Foreign._prefetch,
    "mixed_precision_policy": Foreign._precision,
}
FSDP_KEYS = (*_READERS, *_NEEDLESS, *_REFUSED)
"""Options of FSDP that this table knows, without "fsdp_"."""
SIZE_KEYS = (*_AXES, "cp_backend", "cp_comm_strategy", "sp_size", "sp_backend", "sp_seq_length")
SIZE_KEYS += ("sp_seq_length_is_variable", "sp_attn_implementation")
"""Keys of a parallelism_config, without their prefix."""


def in_a_file(key: str) -> str | None:
    """What to say of a launch flag of Accelerate's that stands in a config file of Headway's; None of any other key."""
    name = key.removeprefix("fsdp_")
    if key in ("use_fsdp", "fsdp_version", "fsdp_sharding_strategy"):
        return "write strategy: fsdp, or hsdp=8"
    if key in ("use_deepspeed", "zero_stage"):
        return "write strategy: zero1, zero2 or zero3"
    if key in _NEEDLESS_OF_DEEPSPEED or key in _REFUSED_OF_DEEPSPEED:
        return _NEEDLESS_OF_DEEPSPEED.get(key) or _REFUSED_OF_DEEPSPEED[key]
    if key == "use_parallelism_config" or key.removeprefix("parallelism_config_") in SIZE_KEYS:
        return "write the sizes in the strategy: fsdp=4+tp=2"
    if key == f"fsdp_{name}" and name in (*_NEEDLESS, *_CHECKED):
        return f"it has no effect here: {_NEEDLESS[_CHECKED.get(name, name)]}"
    return _REFUSED.get(name) if key != name else None


def _truth(value: Any) -> bool | None:
    """A truth value in whatever spelling; None where it is none."""
    if isinstance(value, bool):
        return value
    try:
        return env.parse_bool(value, "") if isinstance(value, str) and value.strip() else None
    except ConfigError:
        return None


def _word(value: Any, allowed: tuple[str, ...], key: str, first: int = 0) -> str:
    """One of the words: itself in any case, torch's enumeration member, or a number where they are counted from `first`."""
    word = str(getattr(value, "name", value)).strip().upper()
    number = whole_number(word)
    if number is not None and first and first <= number < first + len(allowed):
        return allowed[number - first]
    if word not in allowed:
        raise ConfigError(f"{key}={shown(str(value))}; allowed: {', '.join(allowed)}")
    return word


def _number(value: Any, key: str, least: int) -> int:
    number = whole_number(str(value).strip())
    if number is None or number < least:
        raise ConfigError(f"{key}={shown(value)}; give a whole number, {least} or more")
    return number
