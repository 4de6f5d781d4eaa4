"""Check and complete DeepSpeed's JSON configuration, and report how each key was handled.

Each key is handled by these rules::

    "auto"                       filled in from the run, or removed if DeepSpeed's own default applies
    a number known to the run    must equal the run's: train_batch_size, accumulation, bf16 and fp16 ...
    a feature the run controls   refused by name: data sampling, tensor parallelism, a changing batch size ...
    any other known key          passed on
    an unknown key               error that suggests the most similar key
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from headway.core.config.torch_kwargs import GradScalerKwargs
from headway.errors import ConfigError, UnsupportedError
from headway.layouts.deepspeed.json_config import AUTO, HfDeepSpeedConfig
from headway.layouts.deepspeed.known_keys import TOP_LEVEL

_UNSUPPORTED = (
    "compression_training", "expert_parallel", "hybrid_engine", "progressive_layer_drop", "sparse_gradients",
    "zero_optimization.zenflow", "zero_optimization.offload_optimizer.super_offload",
)  # fmt: skip
"""Keys of DeepSpeed's JSON that enable features which Headway does not support."""
_LOADER_REASON = "batches come from Headway's loaders; leave it out"
_REFUSED = {
    **dict.fromkeys(_UNSUPPORTED, "it is not supported; leave it out"),
    "amp": "use mixed_precision='bf16' or 'fp16'",
    "autotuning": "it runs the script many times; choose the sizes yourself",
    "curriculum_learning": _LOADER_REASON,
    "data_efficiency": _LOADER_REASON,
    "dataloader_drop_last": "set drop_last on the DataLoader",
    "elasticity": "Headway keeps the global batch when a run continues on another number of ranks; leave it out",
    "pipeline": "it is not supported with this engine; leave it out",
    "tensor_parallel": "it is not supported with this engine; see strategy='tp'",
}
"""Reason why a key is refused, for the error message, by the key's dotted name."""
_SECTIONS_WITH_DEFAULTS = ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler")
"""Sections in which DeepSpeed has a default for each key, so that "auto" can be removed."""
_BATCH_KEYS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
"""Keys with the sizes of batches, which are always written into the JSON."""
_SCALER_KEYS = ("fp16.initial_scale_power", "fp16.loss_scale_window")
"""Keys that correspond to `init_scale` and `growth_interval` of torch's GradScaler."""
_SIZE_KEYS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Keys of `zero_optimization` whose "auto" is replaced with a size that is computed from the model's hidden size."""


@dataclass(frozen=True)
class RunValues:
    """Values of the run that complete DeepSpeed's JSON configuration, known when the engine is created.

    Attributes:
        num_ranks: Number of ranks that read different data.
        num_steps: Number of micro-batches per optimizer step.
        precision: "no", "bf16" or "fp16".
        micro_batch: Rows per rank and micro-batch. None: no loader has a known batch size.
        hidden_size: Hidden size from the model's config. None: the config has none.
        scaler: Options of the fp16 gradient scaler.
        optimizer: Values of a `DummyOptim` for `optimizer.params`.
        scheduler: Values of a `DummyScheduler` for `scheduler.params`.
    """

    num_ranks: int
    num_steps: int
    precision: str
    micro_batch: int | None = None
    hidden_size: int | None = None
    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class DeepSpeedConfigReport:
    """DeepSpeed's completed JSON configuration, with a report of how each key was handled.

    Attributes:
        config: JSON that is passed to DeepSpeed.
        handling: How each key was handled, by dotted name: "filled", "added", "passed", "agrees", or "left to
            DeepSpeed's default".
        clipping: `gradient_clipping` from the user's JSON; it is 0 in `config`. 0 here: the argument of
            `clip_grad_norm_` applies.
    """

    config: dict[str, Any]
    handling: dict[str, str] = field(default_factory=dict)
    clipping: float = 0.0

    def format_lines(self) -> list[str]:
        """Return the report as lines for the log, one line for each way in which keys were handled."""
        keys_by_kind: dict[str, list[str]] = {}
        config = HfDeepSpeedConfig(self.config)
        for key, kind in self.handling.items():
            value = config.get_value(key)
            keys_by_kind.setdefault(kind, []).append(key if value is None else f"{key}={value!r}")
        return [f"{kind}: {', '.join(keys)}" for kind, keys in keys_by_kind.items()]


def complete_config(
    user_config: Mapping[str, Any], run: RunValues, find_known_keys: Callable[[str], list[str] | None]
) -> DeepSpeedConfigReport:
    """Return DeepSpeed's JSON configuration with missing values filled in, and a report of how each key was handled.

    Args:
        user_config: JSON as a dict, which is not changed.
        run: Number of ranks, precision and other values of the run.
        find_known_keys: Function from a section's dotted name to the keys that DeepSpeed knows in it. It returns None
            if the section accepts any key.

    Raises:
        ConfigError: If there are unknown keys, or values that contradict the run. The message names all of them. Also
            if a key is "auto" that neither the run nor a default of DeepSpeed can fill in.
        UnsupportedError: If the JSON enables a feature that is not supported.
    """
    config = HfDeepSpeedConfig(user_config)
    if "bfloat16" in config.config:  # older name of the section, which DeepSpeed still accepts
        config.config["bf16"] = config.config.pop("bfloat16")
    report = DeepSpeedConfigReport(config.config)
    _check_keys(config.config, find_known_keys)
    _check_features(config)
    required, defaults = _collect_required(config, run), _collect_defaults(run)
    problems = []
    for key, value in list(_iterate_leaves(config.config)):
        if value == AUTO:
            _fill_key(report, config, key, {**defaults, **required})
        elif key in required and value != required[key]:
            problems.append(f"{key}={value!r} in the JSON, but {required[key]!r} in this run")
        else:
            report.handling[key] = "agrees" if key in required else "passed"
    if problems:
        raise ConfigError(
            f"DeepSpeed's JSON contradicts the run: {'; '.join(problems)}. Give the same values, or 'auto'"
        )
    _add_missing(report, config, run, required)
    # DeepSpeed itself must not clip: `ZeroEngine` sets the maximum norm for each step.
    report.clipping = float(config.get_value("gradient_clipping"))
    config.set_value("gradient_clipping", 0.0)
    return report


def _collect_required(config: HfDeepSpeedConfig, run: RunValues) -> dict[str, Any]:
    """Return the run's values that DeepSpeed's JSON must not contradict, by dotted name.

    The batch sizes follow from the run's rows per micro-batch. Without them, they follow from the JSON's
    `train_micro_batch_size_per_gpu`, or else from its `train_batch_size`. Options of the fp16 gradient scaler are
    included only if the script sets some.
    """
    uses_torch_autocast = bool(config.get_value("torch_autocast.enabled"))
    micro_batch = run.micro_batch
    if micro_batch is None:
        micro_batch = _find_micro_batch(config, run)
    scaler_values = {}
    if run.precision == "fp16" and run.scaler != GradScalerKwargs():
        scaler_values = {key: value for key, value in _collect_defaults(run).items() if key in _SCALER_KEYS}
    return {
        **scaler_values,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": run.num_steps,
        "train_batch_size": micro_batch * run.num_steps * run.num_ranks,
        "bf16.enabled": run.precision == "bf16" and not uses_torch_autocast,
        "fp16.enabled": run.precision == "fp16",
        "managed_gradient_accumulation": True,
        "gradient_allreduce_op": "mean",
    }


def _find_micro_batch(config: HfDeepSpeedConfig, run: RunValues) -> int:
    """Return the rows per rank and micro-batch that the JSON sets directly or through `train_batch_size`, or 1."""
    micro_batch = config.get_value("train_micro_batch_size_per_gpu")
    if isinstance(micro_batch, int):
        return micro_batch
    rows_per_update = config.get_value("train_batch_size")
    if isinstance(rows_per_update, int):
        return max(1, rows_per_update // (run.num_steps * run.num_ranks))
    return 1


def _collect_defaults(run: RunValues) -> dict[str, Any]:
    """Return the values that replace "auto", by dotted name. DeepSpeed's JSON may set other values."""
    defaults: dict[str, Any] = {
        "gradient_clipping": 0.0,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        "zero_optimization.offload_optimizer.device": "none",
        "zero_optimization.offload_param.device": "none",
        "zero_force_ds_cpu_optimizer": True,
        "zero_allow_untested_optimizer": False,
        "fp16.loss_scale": 0,
        "fp16.initial_scale_power": round(math.log2(run.scaler.init_scale)),
        "fp16.loss_scale_window": run.scaler.growth_interval,
        "fp16.hysteresis": 2,
        "fp16.min_loss_scale": 1,
    }
    if run.hidden_size is not None:
        square = run.hidden_size**2
        sizes = (square, int(0.9 * square), 10 * run.hidden_size)  # as in Accelerate
        defaults.update({f"zero_optimization.{key}": max(1, size) for key, size in zip(_SIZE_KEYS, sizes)})
    defaults.update({f"optimizer.params.{key}": value for key, value in run.optimizer.items()})
    defaults.update({f"scheduler.params.{key}": value for key, value in run.scheduler.items()})
    return defaults


def _fill_key(report: DeepSpeedConfigReport, config: HfDeepSpeedConfig, key: str, values: Mapping[str, Any]) -> None:
    """Replace the "auto" of a key with the run's value, or remove the key so that DeepSpeed's own default applies.

    Args:
        report: Report in which the handling of the key is recorded.
        config: Configuration to change.
        key: Dotted name whose value is "auto".
        values: Values of the run, by dotted name.

    Raises:
        ConfigError: If the run has no value for the key, and DeepSpeed has no default for it.
    """
    if key in values:
        config.set_value(key, values[key])
        report.handling[key] = "filled"
    elif key == "data_types.keep_in_fp32_modules":  # here, "auto" is a value that DeepSpeed itself interprets
        report.handling[key] = "passed"
    elif "." in key and key.split(".")[0] in _SECTIONS_WITH_DEFAULTS:
        config.del_config_sub_tree(key)
        report.handling[key] = "left to DeepSpeed's default"
    else:
        raise ConfigError(f"{key}='auto' in DeepSpeed's JSON: Headway does not know what to fill in; give a value")


def _add_missing(
    report: DeepSpeedConfigReport, config: HfDeepSpeedConfig, run: RunValues, required: Mapping[str, Any]
) -> None:
    """Add the settings that DeepSpeed needs but its JSON lacks, and record them in the report.

    Args:
        report: Report in which added keys are recorded.
        config: Configuration to complete.
        run: Values of the run.
        required: Values that the JSON must not contradict, by dotted name.
    """
    stage = config.get_value("zero_optimization.stage")
    needed = {key: required[key] for key in _BATCH_KEYS}
    if required["bf16.enabled"]:
        needed["bf16.enabled"] = True
    if run.precision == "fp16":
        needed["fp16.enabled"] = True
        if not config.get_value("fp16.loss_scale"):  # 0 or missing: the loss scale is dynamic
            needed.update({key: value for key, value in _collect_defaults(run).items() if key.startswith("fp16.")})
    if run.precision != "no" and stage != 1:
        # Accumulate gradients of several micro-batches in float32, as DDP does.
        needed["data_types.grad_accum_dtype"] = "fp32"
    # Turn off DeepSpeed's report of samples per second every ten steps; Headway has its own.
    needed.update({"gradient_clipping": 0.0, "steps_per_print": float("inf"), "log_level": "warning"})
    for key, value in needed.items():
        section, name = config.find_config_node(key)
        if section is None or name not in section:
            config.set_value(key, value)
            report.handling[key] = "added"


def _check_keys(config: Mapping[str, Any], find_known_keys: Callable[[str], list[str] | None]) -> None:
    """Raise `ConfigError` if the JSON has keys that DeepSpeed does not know. Suggest the most similar known keys."""
    problems = []
    for section, names in _iterate_sections(config):
        known_keys = sorted(TOP_LEVEL) if not section else find_known_keys(section)
        if known_keys is None:
            continue
        for name in names:
            if name not in known_keys:
                key = f"{section}.{name}" if section else name
                similar = get_close_matches(name, known_keys, 1)
                problems.append(f"{key!r}" + (f" (did you mean {similar[0]!r}?)" if similar else ""))
    if problems:
        raise ConfigError(f"DeepSpeed's JSON has keys that DeepSpeed does not know: {', '.join(problems)}")


def _check_features(config: HfDeepSpeedConfig) -> None:
    """Raise an `UnsupportedError` that names all features that the JSON enables but Headway does not support."""
    refused = [f"{key}: {remedy}" for key, remedy in _REFUSED.items() if _is_enabled(config.get_value(key))]
    autocast_dtype = str(config.get_value("torch_autocast.dtype"))
    is_float16 = autocast_dtype in ("torch.float16", "float16", "fp16", "half")  # DeepSpeed's names for it
    if config.get_value("torch_autocast.enabled") and is_float16:
        refused.append("torch_autocast with float16: use mixed_precision='fp16'")
    is_first_stage = config.get_value("zero_optimization.stage") == 1
    if is_first_stage and config.get_value("zero_optimization.overlap_comm") is True:
        refused.append(
            "zero_optimization.overlap_comm=true with stage 1, which reduces at the window's end: use stage 2"
        )
    is_half = any(config.get_value(f"{name}.enabled") not in (None, False) for name in ("bf16", "fp16"))
    if is_half and is_first_stage and config.get_value("data_types.grad_accum_dtype") in ("fp32", "float32"):
        refused.append("data_types.grad_accum_dtype='fp32' in half precision with stage 1: use stage 2")
    if refused:
        raise UnsupportedError(f"DeepSpeed's JSON asks for features that are not supported: {'; '.join(refused)}")


def _is_enabled(value: Any) -> bool:
    """Whether a value in DeepSpeed's JSON enables the feature of its key.

    A non-empty section without the keys `enabled` and `autotp_size` counts as enabled. A section for tensor parallelism
    with `autotp_size` 1, a single rank, does not.
    """
    if not isinstance(value, Mapping):
        return bool(value)
    if "enabled" in value or "autotp_size" in value:
        return bool(value.get("enabled")) or value.get("autotp_size", 1) > 1
    return bool(value)


# -------------------------------------------------------------------- dotted names


def _iterate_leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) for each value of the JSON that is not a section. Empty sections count as values."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _iterate_leaves(value, f"{name}.")
        else:
            yield name, value


def _iterate_sections(config: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield (dotted name, keys) for each section of the JSON, at any depth. The top level has the name ""."""
    yield name, list(config)
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _iterate_sections(value, f"{name}.{key}" if name else key)
