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
_LOADER = "batches come from Headway's loaders; leave it out"
_REFUSED = {
    **dict.fromkeys(_UNSUPPORTED, "it is not supported; leave it out"),
    "amp": "use mixed_precision='bf16' or 'fp16'",
    "autotuning": "it runs the script many times; choose the sizes yourself",
    "curriculum_learning": _LOADER,
    "data_efficiency": _LOADER,
    "dataloader_drop_last": "set drop_last on the DataLoader",
    "elasticity": "Headway keeps the global batch when a run continues on another number of ranks; leave it out",
    "pipeline": "it is not supported with this engine; leave it out",
    "tensor_parallel": "it is not supported with this engine; see strategy='tp'",
}
"""Reason why a key is refused, for the error message, by the key's dotted name."""
_SECTIONS = ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler")
"""Sections in which DeepSpeed has a default for each key, so that "auto" can be removed."""
_BATCH_KEYS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
_SCALER_KEYS = ("fp16.initial_scale_power", "fp16.loss_scale_window")
_SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
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
        kinds: dict[str, list[str]] = {}
        asked = HfDeepSpeedConfig(self.config)
        for key, kind in self.handling.items():
            value = asked.get_value(key)
            kinds.setdefault(kind, []).append(key if value is None else f"{key}={value!r}")
        return [f"{kind}: {', '.join(keys)}" for kind, keys in kinds.items()]


def complete_config(
    given: Mapping[str, Any], run: RunValues, known: Callable[[str], list[str] | None]
) -> DeepSpeedConfigReport:
    """Return DeepSpeed's JSON configuration with missing values filled in, and a report of how each key was handled.

    Args:
        given: JSON as a dict, which is not changed.
        run: Number of ranks, precision and other values of the run.
        known: Function from a section's dotted name to the keys that DeepSpeed knows in it. It returns None if the
            section accepts any key.

    Raises:
        ConfigError: If there are unknown keys, or values that contradict the run. The message names all of them.
        UnsupportedError: If the JSON enables a feature that is not supported.
    """
    config = HfDeepSpeedConfig(given)
    if "bfloat16" in config.config:
        config.config["bf16"] = config.config.pop("bfloat16")
    account = DeepSpeedConfigReport(config.config)
    _check_known(config.config, known)
    _check_served(config)
    musts, mays = _collect_required(config, run), _collect_defaults(run)
    problems = []
    for key, value in list(_iterate_leaves(config.config)):
        if value == AUTO:
            _fill_key(account, config, key, {**mays, **musts})
        elif key in musts and value != musts[key]:
            problems.append(f"{key}={value!r} in the JSON, but {musts[key]!r} in this run")
        else:
            account.handling[key] = "agrees" if key in musts else "passed"
    if problems:
        raise ConfigError(
            f"DeepSpeed's JSON contradicts the run: {'; '.join(problems)}. Give the same values, or 'auto'"
        )
    _add_missing(account, config, run, musts)
    account.clipping = float(config.get_value("gradient_clipping"))
    config.set_value("gradient_clipping", 0.0)
    return account


def _collect_required(config: HfDeepSpeedConfig, run: RunValues) -> dict[str, Any]:
    """Return the run's values that DeepSpeed's JSON must not contradict, by dotted name."""
    by_torch = bool(config.get_value("torch_autocast.enabled"))
    micro = run.micro_batch if run.micro_batch is not None else config.get_value("train_micro_batch_size_per_gpu")
    if not isinstance(micro, int):
        total = config.get_value("train_batch_size")
        micro = max(1, total // (run.num_steps * run.num_ranks)) if isinstance(total, int) else 1
    scale = {}
    if run.precision == "fp16" and run.scaler != GradScalerKwargs():
        scale = {key: value for key, value in _collect_defaults(run).items() if key in _SCALER_KEYS}
    return {
        **scale,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": run.num_steps,
        "train_batch_size": micro * run.num_steps * run.num_ranks,
        "bf16.enabled": run.precision == "bf16" and not by_torch,
        "fp16.enabled": run.precision == "fp16",
        "managed_gradient_accumulation": True,
        "gradient_allreduce_op": "mean",
    }


def _collect_defaults(run: RunValues) -> dict[str, Any]:
    """Return the values that replace "auto", by dotted name. DeepSpeed's JSON may set other values."""
    found: dict[str, Any] = {
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
        sizes = (square, int(0.9 * square), 10 * run.hidden_size)
        found.update({f"zero_optimization.{key}": max(1, size) for key, size in zip(_SIZES, sizes)})
    found.update({f"optimizer.params.{key}": value for key, value in run.optimizer.items()})
    found.update({f"scheduler.params.{key}": value for key, value in run.scheduler.items()})
    return found


def _fill_key(account: DeepSpeedConfigReport, config: HfDeepSpeedConfig, key: str, answers: Mapping[str, Any]) -> None:
    if key in answers:
        config.set_value(key, answers[key])
        account.handling[key] = "filled"
    elif key == "data_types.keep_in_fp32_modules":  # DeepSpeed's own "auto"
        account.handling[key] = "passed"
    elif "." in key and key.split(".")[0] in _SECTIONS:
        config.del_config_sub_tree(key)
        account.handling[key] = "left to DeepSpeed's default"
    else:
        raise ConfigError(f"{key}='auto' in DeepSpeed's JSON: Headway does not know what to fill in; give a value")


def _add_missing(
    account: DeepSpeedConfigReport, config: HfDeepSpeedConfig, run: RunValues, musts: Mapping[str, Any]
) -> None:
    """Add the settings that DeepSpeed needs but its JSON lacks, and record them in the report."""
    stage = config.get_value("zero_optimization.stage")
    wanted = {key: musts[key] for key in _BATCH_KEYS}
    if musts["bf16.enabled"]:
        wanted["bf16.enabled"] = True
    if run.precision == "fp16":
        wanted["fp16.enabled"] = True
        if not config.get_value("fp16.loss_scale"):  # no fixed scale
            wanted.update({key: value for key, value in _collect_defaults(run).items() if key.startswith("fp16.")})
    if run.precision != "no" and stage != 1:
        # Accumulate gradients of several micro-batches in float32, as DDP does.
        wanted["data_types.grad_accum_dtype"] = "fp32"
    # Turn off DeepSpeed's report of samples per second every ten steps; Headway has its own.
    wanted.update({"gradient_clipping": 0.0, "steps_per_print": float("inf"), "log_level": "warning"})
    for key, value in wanted.items():
        node, name = config.find_config_node(key)
        if node is None or name not in node:
            config.set_value(key, value)
            account.handling[key] = "added"


def _check_known(config: Mapping[str, Any], known: Callable[[str], list[str] | None]) -> None:
    problems = []
    for section, names in _iterate_sections(config):
        allowed = sorted(TOP_LEVEL) if not section else known(section)
        for name in names:
            if allowed is not None and name not in allowed:
                near = get_close_matches(name, allowed, 1)
                told = f"{section}.{name}" if section else name
                problems.append(f"{told!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if problems:
        raise ConfigError(f"DeepSpeed's JSON has keys that DeepSpeed does not know: {', '.join(problems)}")


def _check_served(config: HfDeepSpeedConfig) -> None:
    refused = [f"{key}: {remedy}" for key, remedy in _REFUSED.items() if _is_enabled(config.get_value(key))]
    cast_to = str(config.get_value("torch_autocast.dtype")).replace("bfloat16", "")
    if config.get_value("torch_autocast.enabled") and "16" in cast_to:
        refused.append("torch_autocast with float16: use mixed_precision='fp16'")
    is_first_stage = config.get_value("zero_optimization.stage") == 1
    if is_first_stage and config.get_value("zero_optimization.overlap_comm") is True:
        refused.append(
            "zero_optimization.overlap_comm=true with stage 1, which reduces at the window's end: use stage 2"
        )
    is_half = any(config.get_value(f"{name}.enabled") not in (None, False) for name in ("bf16", "fp16"))
    accumulates = config.get_value("data_types.grad_accum_dtype")
    if is_half and is_first_stage and accumulates in ("fp32", "float32"):
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
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _iterate_leaves(value, f"{name}.")
        else:
            yield name, value


def _iterate_sections(config: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, list[str]]]:
    yield name, list(config)
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _iterate_sections(value, f"{name}.{key}" if name else key)
