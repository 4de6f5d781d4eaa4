"""Translation of Accelerate's layout options, which its launch flags, config files and plugins share.

Each option is translated to a setting of Headway, ignored with a reported reason, or refused with an error.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from headway.common import env
from headway.common.untrusted import parse_whole_number, shorten_repr
from headway.core.config.launch import CP_EXCHANGES, DEEPSPEED_SETTINGS, WRAP_POLICIES
from headway.core.config.layout_request import LayoutRequest
from headway.errors import ConfigError

SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP1's sharding strategies, in the order of torch's enumeration `ShardingStrategy`, whose values start at 1."""
_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_AXIS_BY_SIZE_KEY = {"dp_replicate_size": "replicate", "dp_shard_size": "shard", "cp_size": "cp", "tp_size": "tp"}

_ALIASES = {"cpu_offload": "offload_params", "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap"}
"""Mapping from plugin field names to the names of the same options in launch flags, where the two differ."""

_IGNORED = {
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
_CHECKED_WITHOUT_EFFECT = {"state_dict_type": "state_dict_config", "backward_prefetch": "forward_prefetch"}
"""FSDP options that have no effect, but whose values are checked.

Each is mapped to the key of `_IGNORED` that holds the reason why it has no effect.
"""
_REFUSED = {
    "ignored_modules": (
        "name the frozen modules that should stay unsharded: Accelerator(kwargs_handlers=[ShardingOptions(ignored=(...))])"
    ),
    "param_init_fn": (
        "a model on the meta device is initialized by its modules' reset_parameters(); give those classes one"
    ),
}
_IGNORED_BY_DEEPSPEED = {
    "zero3_save_16bit_model": "save_model() writes full weights",
    **{
        f"deepspeed_{name}": "`headway launch` starts the processes, with one launcher per machine"
        for name in ("hostfile", "exclusion_filter", "inclusion_filter", "multinode_launcher")
    },
}
_REFUSED_BY_DEEPSPEED = {
    "zero3_init_flag": (
        "the full model is built on each process and partitioned in prepare(); leave it out. If the model does not fit, use "
        "--strategy fsdp, which supports models on the meta device"
    ),
    "deepspeed_moe_layer_cls_names": "mixtures of experts are partitioned like other layers; leave it out",
}
DEEPSPEED_KEYS = ("zero_stage", *DEEPSPEED_SETTINGS, *_IGNORED_BY_DEEPSPEED, *_REFUSED_BY_DEEPSPEED)
"""Names of all DeepSpeed options that are recognized, including those that are ignored or refused."""


# -------------------------------------------------------------------- FSDP


def read_fsdp(request: LayoutRequest, name: str, value: Any, key: str | None = None) -> None:
    """Add one FSDP option to a layout request.

    The request also records options that have no effect, and options that Headway does not support, with the reason.

    Args:
        request: Layout request to change.
        name: Name of an option without "fsdp_", or name of a field of FullyShardedDataParallelPlugin.
        value: Value of the option: text from a command line, or a value from a config file or the plugin.
        key: Name of the option in messages. None: "fsdp_" plus the name.

    Raises:
        ConfigError: If the option is unknown, or if the value is invalid in Accelerate, too.
    """
    key = key or f"fsdp_{name}"
    name = _ALIASES.get(name, name)
    if name in _IGNORED:
        request.ignore_key(key, _IGNORED[name])
    elif name in _REFUSED:
        request.refuse_key(key, _REFUSED[name])
    elif name in _FSDP_READERS:
        _FSDP_READERS[name](request, value, key)
    else:
        raise ConfigError(f"{key} is not an FSDP option; remove it")


def _read_version(request: LayoutRequest, value: Any, key: str) -> None:
    if str(value) not in ("1", "2"):
        raise ConfigError(f"{key}={value!r}; allowed: 1, 2")
    request.ignore_key(key, f"Headway uses FSDP2{', and accepts the keys of FSDP1' if str(value) == '1' else ''}")


def _read_sharding(request: LayoutRequest, value: Any, key: str) -> None:
    """Add FSDP's sharding strategy, a name or a number, to a layout request."""
    word = _find_word(value, SHARDING_STRATEGIES, key, first_number=1)
    if word == "NO_SHARD":
        layout = "ddp"
    else:
        layout = "hsdp" if word.startswith("HYBRID") else "fsdp"
    request.use_shards(key, layout)
    request.lines.append((key, f"strategy: {layout!r}"))
    if word in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"):
        request.request_setting("fsdp_reshard_after_forward", False, key)


def _read_reshard(request: LayoutRequest, value: Any, key: str) -> None:
    """Add FSDP2's `reshard_after_forward` to a layout request. FSDP1's sharding strategies are accepted, too."""
    reshards = False if str(getattr(value, "name", value)).upper() == "NO_RESHARD" else _parse_bool(value)
    if reshards is None:
        _read_sharding(request, value, key)
    else:
        request.request_setting("fsdp_reshard_after_forward", reshards, key)


def _read_offload(request: LayoutRequest, value: Any, key: str) -> None:
    """Set `fsdp_offload_params` in a layout request, from a bool or one of torch's offload policies.

    Args:
        request: Layout request to change.
        value: Bool, the text of a bool, or an offload policy.
        key: Name of the option in error messages.

    Raises:
        ConfigError: If `value` is neither a bool nor an offload policy.
    """
    class_name = type(value).__name__  # torch's classes, which are not imported here
    flag = _parse_bool(getattr(value, "offload_params", value))
    is_offloaded = {"CPUOffloadPolicy": True, "OffloadPolicy": False}.get(class_name, flag)
    if is_offloaded is None:
        raise ConfigError(f"{key}={value!r}; give True or False")
    request.request_setting("fsdp_offload_params", is_offloaded, key)


def _read_policy(request: LayoutRequest, value: Any, key: str) -> None:
    """Add an FSDP wrapping policy to a layout request. A custom function is recorded as not supported.

    Args:
        request: Layout request to change.
        value: Name of a policy, one of torch's policies, or a `functools.partial` of one.
        key: Name of the option in messages.
    """
    if not callable(value):
        word = _find_word(value, tuple(each.upper() for each in WRAP_POLICIES), key).lower()
        request.request_setting("fsdp_auto_wrap_policy", word, key)
        return
    keywords = getattr(value, "keywords", {})
    # torch's ModuleWrapPolicy keeps its classes in a private attribute. A partial has them among its keywords.
    classes = getattr(value, "_module_classes", None) or keywords.get("transformer_layer_cls")
    if classes:
        function_name = "transformer_auto_wrap_policy"
    else:
        function = getattr(value, "func", value)
        function_name = getattr(function, "__name__", "")
    policy_names = {"transformer_auto_wrap_policy": WRAP_POLICIES[0], "size_based_auto_wrap_policy": WRAP_POLICIES[1]}
    if function_name not in policy_names:
        request.refuse_key(
            key, "custom policies are not supported; name the blocks' classes in transformer_cls_names_to_wrap"
        )
        return
    request.request_setting("fsdp_auto_wrap_policy", policy_names[function_name], key)
    if classes:
        _read_classes(request, sorted(kind.__name__ for kind in classes), key)
    elif keywords.get("min_num_params"):
        _read_min_params(request, keywords["min_num_params"], key)


def _read_classes(request: LayoutRequest, value: Any, key: str) -> None:
    """Add the class names of FSDP's blocks, a list or text separated by commas, to a layout request."""
    names = [str(name) for name in value] if isinstance(value, (list, tuple, set)) else str(value).split(",")
    request.request_setting("fsdp_transformer_layer_cls_to_wrap", ",".join(name.strip() for name in names), key)


def _read_min_params(request: LayoutRequest, value: Any, key: str) -> None:
    """Add the minimum size of FSDP's blocks to a layout request. 0 is ignored."""
    if number := _parse_number(value, key, 0):
        request.request_setting("fsdp_min_num_params", number, key)
    else:
        request.ignore_key(key, "no size: blocks are detected")


def _read_truth(setting: str, request: LayoutRequest, value: Any, key: str) -> None:
    """Add a setting that is true or false to a layout request.

    Raises:
        ConfigError: If the value is neither true nor false.
    """
    flag = _parse_bool(value)
    if flag is None:
        raise ConfigError(f"{key}={value!r}; give true or false")
    request.request_setting(setting, flag, key)


def _read_state_dict(request: LayoutRequest, value: Any, key: str) -> None:
    """Ignore FSDP's type of state dicts, with the reason."""
    word = _find_word(value, _STATE_DICTS, key, first_number=1)
    suffix = "; save_model() writes full weights" if word == "FULL_STATE_DICT" else ""
    request.ignore_key(key, f"{_IGNORED['state_dict_config']}{suffix}")


def _read_prefetch(request: LayoutRequest, value: Any, key: str) -> None:
    """Ignore FSDP's backward prefetch, with the reason."""
    _find_word(value, _PREFETCHES, key, first_number=1)
    request.ignore_key(key, _IGNORED["forward_prefetch"])


def _read_precision(request: LayoutRequest, value: Any, key: str) -> None:
    """Add the dtypes of FSDP's mixed-precision policy to a layout request.

    Args:
        request: Layout request to change.
        value: Dtype or its name for parameters and gradient reduction, a dict of dtypes, or one of torch's policies.
        key: Name of the option in messages.

    Raises:
        ConfigError: If a dict has an unknown key.
    """
    allowed = ("param_dtype", "reduce_dtype", "output_dtype")
    if isinstance(value, str):
        value = dict.fromkeys(allowed[:2], value)
    elif not isinstance(value, Mapping):
        value = {name: getattr(value, name, None) for name in (*allowed, "buffer_dtype")}
    for name, dtype in value.items():
        if name not in (*allowed, "buffer_dtype"):
            raise ConfigError(f"{key} has {name!r}; allowed: {', '.join(allowed)}")
        if dtype is not None and name == "buffer_dtype":
            request.ignore_key(f"{key}.buffer_dtype", "buffers keep their own")
        elif dtype is not None:
            request.dtypes[name] = dtype
            request.lines.append((key, f"{name}: {dtype}"))


_FSDP_READERS: Mapping[str, Callable[[LayoutRequest, Any, str], None]] = {
    "version": _read_version,
    "sharding_strategy": _read_sharding,
    "reshard_after_forward": _read_reshard,
    "offload_params": _read_offload,
    "auto_wrap_policy": _read_policy,
    "transformer_layer_cls_to_wrap": _read_classes,
    "min_num_params": _read_min_params,
    "activation_checkpointing": partial(_read_truth, "activation_checkpointing"),
    "activation_checkpointing_offload": partial(_read_truth, "activation_checkpointing_offload"),
    "state_dict_type": _read_state_dict,
    "backward_prefetch": _read_prefetch,
    "mixed_precision_policy": _read_precision,
}
FSDP_KEYS = (*_FSDP_READERS, *_IGNORED, *_REFUSED)
"""Names of all FSDP options that are recognized, without "fsdp_", including those that are ignored or refused."""


# -------------------------------------------------------------------- sizes


SIZE_KEYS = (
    *(*_AXIS_BY_SIZE_KEY, "cp_backend", "cp_comm_strategy", "sp_size", "sp_backend", "sp_seq_length"),
    *("sp_seq_length_is_variable", "sp_attn_implementation"),
)
"""Keys of the config file section `parallelism_config`, without the prefix "parallelism_config_"."""


def read_size(request: LayoutRequest, name: str, value: Any, key: str | None = None) -> None:
    """Add one key of the config file section `parallelism_config` to a layout request.

    The request also records keys that have no effect, and keys that Headway does not support, with the reason.

    Args:
        request: Layout request to change.
        name: Key without "parallelism_config_".
        value: Value of the key: text from a command line, or a value from a config file or the plugin.
        key: Name of the key in messages. None (the default): "parallelism_config_" plus `name`.

    Raises:
        ConfigError: If the key is unknown, the size is not a number of processes, or a word is not an allowed one.
    """
    key = key or f"parallelism_config_{name}"
    if name == "cp_backend":
        _find_word(value, ("TORCH",), key)
        request.ignore_key(key, "there is no other backend than torch")
    elif name == "cp_comm_strategy":
        request.request_setting(name, _find_word(value, tuple(map(str.upper, CP_EXCHANGES)), key).lower(), key)
    elif name == "sp_size" and _parse_number(value, key, 1) > 1:
        request.refuse_key(
            key,
            "DeepSpeed's sequence parallelism (Ulysses) is not supported; if activations are too large, checkpoint them "
            "(--activation_checkpointing), or use tensor parallelism's own (docs/tensor_parallel.md)",
        )
    elif name.startswith("sp_"):  # also an `sp_size` of 1
        request.ignore_key(key, "DeepSpeed's sequence parallelism is not supported")
    elif name in _AXIS_BY_SIZE_KEY:
        request.set_size(_AXIS_BY_SIZE_KEY[name], _parse_number(value, key, 1), key)
    else:
        raise ConfigError(f"{key} is not a key of parallelism_config; remove it")


# -------------------------------------------------------------------- DeepSpeed


def read_deepspeed(request: LayoutRequest, name: str, value: Any, key: str | None = None) -> None:
    """Add one DeepSpeed option to a layout request.

    The request also records options that have no effect, and options that Headway does not support, with the reason.

    Args:
        request: Layout request to change.
        name: Name of the option.
        value: Value of the option: text from a command line, or a value from a config file.
        key: Name of the option in messages. None: `name`.

    Raises:
        ConfigError: If the option is unknown, or if the value is invalid in Accelerate, too.
    """
    key = key or name
    if name in _IGNORED_BY_DEEPSPEED:
        request.ignore_key(key, _IGNORED_BY_DEEPSPEED[name])
    elif name in _REFUSED_BY_DEEPSPEED and (_parse_bool(value) is False or str(value).lower() == "none"):
        request.ignore_key(key, "off")
    elif name in _REFUSED_BY_DEEPSPEED:
        request.refuse_key(key, _REFUSED_BY_DEEPSPEED[name])
    elif str(value).lower() in ("none", "auto"):
        request.ignore_key(key, "undecided")
    elif name == "zero_stage":
        stage = _parse_number(value, key, 0)
        if stage not in (1, 2, 3):
            raise ConfigError(
                f"{key}={value!r}; allowed: 1, 2, 3{'; stage 0 shards nothing; leave it out' if stage == 0 else ''}"
            )
        request.use_deepspeed(key, f"zero{stage}")
        request.lines.append((key, f"strategy: 'zero{stage}'"))
    elif name == "gradient_clipping":
        try:
            request.request_setting(name, float(value), key)
        except (TypeError, ValueError):
            raise ConfigError(f"{key}={value!r}; give a number") from None
    elif name in ("offload_optimizer_device", "offload_param_device"):
        request.request_setting(name, _find_word(value, ("CPU", "NVME"), key).lower(), key)
    elif name in DEEPSPEED_SETTINGS:
        request.request_setting(name, str(value), key)
    else:
        raise ConfigError(f"{key} is not a DeepSpeed option; remove it")


class LayoutSection(NamedTuple):
    """Section of Accelerate's config files that describes the layout.

    Attributes:
        prefix: Prefix of the section's keys. Keys without it are accepted, too.
        known_keys: Allowed keys without the prefix.
        read_key: Function that adds one key to a layout request.
    """

    prefix: str
    known_keys: tuple[str, ...]
    read_key: Callable[..., None]


LAYOUT_SECTIONS = {
    "fsdp_config": LayoutSection("fsdp_", FSDP_KEYS, read_fsdp),
    "parallelism_config": LayoutSection("parallelism_config_", SIZE_KEYS, read_size),
    "deepspeed_config": LayoutSection("", DEEPSPEED_KEYS, read_deepspeed),
}
"""All sections of Accelerate's config files that describe the layout, by name."""


def explain_layout_key(key: str) -> str | None:
    """Return a hint for an unknown key in Headway's config file if it is a layout flag of Accelerate, else None."""
    name = key.removeprefix("fsdp_")
    if key in ("use_fsdp", "fsdp_version", "fsdp_sharding_strategy"):
        return "write strategy: fsdp, or hsdp=8"
    if key in ("use_deepspeed", "zero_stage"):
        return "write strategy: zero1, zero2 or zero3"
    if key in _IGNORED_BY_DEEPSPEED or key in _REFUSED_BY_DEEPSPEED:
        return _IGNORED_BY_DEEPSPEED.get(key) or _REFUSED_BY_DEEPSPEED[key]
    if key == "use_parallelism_config" or key.removeprefix("parallelism_config_") in SIZE_KEYS:
        return "write the sizes in the strategy: fsdp=4+tp=2"
    if key == f"fsdp_{name}" and name in (*_IGNORED, *_CHECKED_WITHOUT_EFFECT):
        return f"it has no effect here: {_IGNORED[_CHECKED_WITHOUT_EFFECT.get(name, name)]}"
    return _REFUSED.get(name) if key != name else None


def _parse_bool(value: Any) -> bool | None:
    """Return a value such as True, "yes" or "false" as a boolean, or None if it is not a boolean or a word for one."""
    if isinstance(value, bool):
        return value
    try:
        return env.parse_bool(value, "") if isinstance(value, str) and value.strip() else None
    except ConfigError:
        return None


def _find_word(value: Any, allowed: tuple[str, ...], key: str, first_number: int = 0) -> str:
    """Return the allowed word that corresponds to a value.

    Args:
        value: Word in upper or lower case, a member of one of torch's enumerations, or a number.
        allowed: Allowed words in upper case.
        key: Name of the option in messages.
        first_number: Number of the first allowed word, from which the words are counted. 0 (the default): numbers are
            not accepted.

    Raises:
        ConfigError: If the value is none of the allowed words.
    """
    word = str(getattr(value, "name", value)).strip().upper()
    number = parse_whole_number(word)
    if number is not None and first_number and first_number <= number < first_number + len(allowed):
        return allowed[number - first_number]
    if word not in allowed:
        raise ConfigError(f"{key}={shorten_repr(str(value))}; allowed: {', '.join(allowed)}")
    return word


def _parse_number(value: Any, key: str, minimum: int) -> int:
    """Return a whole number.

    Args:
        value: Number or text.
        key: Name of the option in messages.
        minimum: Smallest allowed number.

    Raises:
        ConfigError: If the value is not a whole number of at least `minimum`.
    """
    number = parse_whole_number(str(value).strip())
    if number is None or number < minimum:
        raise ConfigError(f"{key}={shorten_repr(value)}; give a whole number, {minimum} or more")
    return number
