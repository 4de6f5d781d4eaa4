"""DeepSpeed's JSON: every key accounted for, and the optimizer and schedule that it defines made real.

Every key of DeepSpeed's JSON accounted for: filled, added, passed on, contradicting, unknown, or refused by name.

::

    "auto"                    filled with what the run knows, or taken out where DeepSpeed's own default applies
    a number the run knows    must be the run's: train_batch_size, the accumulation, bf16 and fp16 ...
    what is the run's alone   refused by name: data sampling, tensor parallelism, a changing batch size ...
    anything else             passed on
    a name nobody knows       an error with the nearest one

Which keys DeepSpeed knows in each section of its JSON: asked of its own models, so that no list here can grow old.

The optimizer and the schedule that DeepSpeed's JSON defines, made real for `DummyOptim` and `DummyScheduler`.
"""

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, get_args

import torch

from headway.config.engines import GradScalerKwargs
from headway.errors import ConfigError, PrepareError, UnsupportedError
from headway.strategies.deepspeed.plugin import AUTO, DummyOptim, DummyScheduler, HfDeepSpeedConfig

TOP_LEVEL = frozenset(
    """
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger
    communication_data_type compile compression_training csv_monitor curriculum_learning data_efficiency
    data_types dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc dump_state elasticity
    expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping
    gradient_predivide_factor hybrid_engine log_level managed_gradient_accumulation memory_breakdown nebula
    optimizer pipeline prescale_gradients progressive_layer_drop scheduler seq_parallel_communication_data_type
    sparse_gradients steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size
    train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
    weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
    """.split()  # noqa: SIM905
)

_UNSUPPORTED = (
    "compression_training", "expert_parallel", "hybrid_engine", "progressive_layer_drop", "sparse_gradients",
    "zero_optimization.zenflow", "zero_optimization.offload_optimizer.super_offload",
)  # fmt: skip
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
_SECTIONS = ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler")
_BATCH_KEYS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
_SCALER_KEYS = ("fp16.initial_scale_power", "fp16.loss_scale_window")
_SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


@dataclass(frozen=True)
class Facts:
    """What a run knows when its engine is made.

    Attributes:
        num_ranks: that read data of their own.
        num_steps: micro-batches per update.
        precision: "no", "bf16" or "fp16".
        micro_batch: rows per rank and micro-batch; None: no loader says.
        hidden_size: of the model's config; None: it has none.
        scaler: of fp16, as `GradScalerKwargs` asks for it.
        optimizer: what a `DummyOptim` says for `optimizer.params`.
        scheduler: what a `DummyScheduler` says for `scheduler.params`.
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
    """The JSON as DeepSpeed gets it, and what became of each key.

    Attributes:
        config: what DeepSpeed gets.
        told: by dotted name: "filled", "added", "passed", "agrees", "left to DeepSpeed's default".
        clipping: the JSON's own gradient_clipping; 0: what `clip_grad_norm_` asks for.
    """

    config: dict[str, Any]
    told: dict[str, str] = field(default_factory=dict)
    clipping: float = 0.0

    def lines(self) -> list[str]:
        """For a log: one line for each kind."""
        kinds: dict[str, list[str]] = {}
        asked = HfDeepSpeedConfig(self.config)
        for key, kind in self.told.items():
            value = asked.get_value(key)
            kinds.setdefault(kind, []).append(key if value is None else f"{key}={value!r}")
        return [f"{kind}: {', '.join(keys)}" for kind, keys in kinds.items()]


def complete_config(
    given: Mapping[str, Any], facts: Facts, known: Callable[[str], list[str] | None]
) -> DeepSpeedConfigReport:
    """Fill DeepSpeed's JSON, and say what became of each key.

    Args:
        given: the JSON; it stays as it is.
        facts: of the run.
        known: from a section's dotted name to the keys that DeepSpeed itself knows in it; None: it takes any.

    Raises:
        ConfigError: unknown keys, or values that contradict the run; all are named.
        UnsupportedError: what is not served.
    """
    config = HfDeepSpeedConfig(given)
    if "bfloat16" in config.config:
        config.config["bf16"] = config.config.pop("bfloat16")
    account = DeepSpeedConfigReport(config.config)
    _check_known(config.config, known)
    _check_served(config)
    musts, mays = _musts(config, facts), _mays(facts)
    problems = []
    for key, value in list(_leaves(config.config)):
        if value == AUTO:
            _fill(account, config, key, {**mays, **musts})
        elif key in musts and value != musts[key]:
            problems.append(f"{key}={value!r} in the JSON, but {musts[key]!r} in this run")
        else:
            account.told[key] = "agrees" if key in musts else "passed"
    if problems:
        raise ConfigError(
            f"DeepSpeed's JSON contradicts the run: {'; '.join(problems)}. Give the same values, or 'auto'"
        )
    _add(account, config, facts, musts)
    account.clipping = float(config.get_value("gradient_clipping"))
    config.set_value("gradient_clipping", 0.0)
    return account


def _musts(config: HfDeepSpeedConfig, facts: Facts) -> dict[str, Any]:
    """What the JSON must agree with."""
    by_torch = bool(config.get_value("torch_autocast.enabled"))
    micro = facts.micro_batch if facts.micro_batch is not None else config.get_value("train_micro_batch_size_per_gpu")
    if not isinstance(micro, int):
        total = config.get_value("train_batch_size")
        micro = max(1, total // (facts.num_steps * facts.num_ranks)) if isinstance(total, int) else 1
    scale = {}
    if facts.precision == "fp16" and facts.scaler != GradScalerKwargs():
        scale = {key: value for key, value in _mays(facts).items() if key in _SCALER_KEYS}
    return {
        **scale,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": facts.num_steps,
        "train_batch_size": micro * facts.num_steps * facts.num_ranks,
        "bf16.enabled": facts.precision == "bf16" and not by_torch,
        "fp16.enabled": facts.precision == "fp16",
        "managed_gradient_accumulation": True,
        "gradient_allreduce_op": "mean",
    }


def _mays(facts: Facts) -> dict[str, Any]:
    """What an "auto" stands for, where the JSON may say something else."""
    found: dict[str, Any] = {
        "gradient_clipping": 0.0,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        "zero_optimization.offload_optimizer.device": "none",
        "zero_optimization.offload_param.device": "none",
        "zero_force_ds_cpu_optimizer": True,
        "zero_allow_untested_optimizer": False,
        "fp16.loss_scale": 0,
        "fp16.initial_scale_power": round(math.log2(facts.scaler.init_scale)),
        "fp16.loss_scale_window": facts.scaler.growth_interval,
        "fp16.hysteresis": 2,
        "fp16.min_loss_scale": 1,
    }
    if facts.hidden_size is not None:
        square = facts.hidden_size**2
        sizes = (square, int(0.9 * square), 10 * facts.hidden_size)
        found.update({f"zero_optimization.{key}": max(1, size) for key, size in zip(_SIZES, sizes)})
    found.update({f"optimizer.params.{key}": value for key, value in facts.optimizer.items()})
    found.update({f"scheduler.params.{key}": value for key, value in facts.scheduler.items()})
    return found


def _fill(account: DeepSpeedConfigReport, config: HfDeepSpeedConfig, key: str, answers: Mapping[str, Any]) -> None:
    if key in answers:
        config.set_value(key, answers[key])
        account.told[key] = "filled"
    elif key == "data_types.keep_in_fp32_modules":  # DeepSpeed's own "auto"
        account.told[key] = "passed"
    elif "." in key and key.split(".")[0] in _SECTIONS:
        config.del_config_sub_tree(key)
        account.told[key] = "left to DeepSpeed's default"
    else:
        raise ConfigError(f"{key}='auto' in DeepSpeed's JSON: Headway does not know what to fill in; give a value")


def _add(account: DeepSpeedConfigReport, config: HfDeepSpeedConfig, facts: Facts, musts: Mapping[str, Any]) -> None:
    """What DeepSpeed needs to be told and the JSON does not say."""
    stage = config.get_value("zero_optimization.stage")
    wanted = {key: musts[key] for key in _BATCH_KEYS}
    if musts["bf16.enabled"]:
        wanted["bf16.enabled"] = True
    if facts.precision == "fp16":
        wanted["fp16.enabled"] = True
        if not config.get_value("fp16.loss_scale"):  # no fixed one
            wanted.update({key: value for key, value in _mays(facts).items() if key.startswith("fp16.")})
    if facts.precision != "no" and stage != 1:
        # Gradients of several micro-batches add up in float32, as they do with DDP.
        wanted["data_types.grad_accum_dtype"] = "fp32"
    # DeepSpeed's own report of samples per second, every ten steps, is the run's to give.
    wanted.update({"gradient_clipping": 0.0, "steps_per_print": float("inf"), "log_level": "warning"})
    for key, value in wanted.items():
        node, name = config.find_config_node(key)
        if node is None or name not in node:
            config.set_value(key, value)
            account.told[key] = "added"


def _check_known(config: Mapping[str, Any], known: Callable[[str], list[str] | None]) -> None:
    problems = []
    for section, names in _sections(config):
        allowed = sorted(TOP_LEVEL) if not section else known(section)
        for name in names:
            if allowed is not None and name not in allowed:
                near = get_close_matches(name, allowed, 1)
                told = f"{section}.{name}" if section else name
                problems.append(f"{told!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if problems:
        raise ConfigError(f"DeepSpeed's JSON has keys that DeepSpeed does not know: {', '.join(problems)}")


def _check_served(config: HfDeepSpeedConfig) -> None:
    refused = [f"{key}: {remedy}" for key, remedy in _REFUSED.items() if _is_on(config.get_value(key))]
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


def _is_on(value: Any) -> bool:
    """Is something asked for? A section that has no `enabled` is, unless it is empty; tensor parallelism over one rank is not."""
    if not isinstance(value, Mapping):
        return bool(value)
    if "enabled" in value or "autotp_size" in value:
        return bool(value.get("enabled")) or value.get("autotp_size", 1) > 1
    return bool(value)


# -------------------------------------------------------------------- dotted names


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _sections(config: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, list[str]]]:
    yield name, list(config)
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _sections(value, f"{name}.{key}" if name else key)


_MODELS = {
    "activation_checkpointing": None,
    "bf16": "deepspeed.runtime.precision_config:DeepSpeedBF16Config",
    "comms_logger": "deepspeed.comm.config:CommsConfig",
    "csv_monitor": "deepspeed.monitor.config:CSVConfig",
    "compile": "deepspeed.compile.config:CompileConfig",
    "flops_profiler": "deepspeed.profiling.config:DeepSpeedFlopsProfilerConfig",
    "fp16": "deepspeed.runtime.precision_config:DeepSpeedFP16Config",
    "tensorboard": "deepspeed.monitor.config:TensorBoardConfig",
    "wandb": "deepspeed.monitor.config:WandbConfig",
    "zero_optimization": "deepspeed.runtime.zero.config:DeepSpeedZeroConfig",
}
_PLAIN = {
    "data_types": ["buffer_dtype", "grad_accum_dtype", "keep_in_fp32_modules", "param_dtype"],
    "optimizer": ["legacy_fusion", "params", "type"],
    "scheduler": ["params", "type"],
    "torch_autocast": ["dtype", "enabled", "lower_precision_safe_modules"],
}


def known_keys(section: str) -> list[str] | None:
    """What DeepSpeed knows in a section, by its dotted name; None: it takes any, or keeps no list."""
    if section in _PLAIN:
        return _PLAIN[section]
    first, *rest = section.split(".")
    path = _MODELS.get(first)
    if path is None:
        return None
    module, _, name = path.partition(":")
    try:
        model: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):  # another version of DeepSpeed keeps it elsewhere
        return None
    for part in rest:
        model = _section(model, part)
        if model is None:
            return None
    return sorted({key for field, about in model.model_fields.items() for key in (field, about.alias) if key})


def _section(model: Any, name: str) -> Any:
    """The model of a section within a section; None where it is no model."""
    for known, about in model.model_fields.items():
        if name in (known, about.alias):
            kinds = (about.annotation, *get_args(about.annotation))
            return next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return None


_OPTIMIZERS = ("Adagrad", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "SGD")
_DEEPSPEEDS = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}


class StandIns:
    """What stands for what, of one run.

    Args:
        config: DeepSpeed's JSON.

    Attributes:
        optimizer, scheduler: what the JSON's "auto" stood for, by name.
    """

    def __init__(self, config: HfDeepSpeedConfig) -> None:
        self._config = config
        self._made: dict[int, tuple[Any, Any]] = {}
        self.optimizer: dict[str, Any] = {}
        self.scheduler: dict[str, Any] = {}

    def real(self, dummy: DummyOptim | DummyScheduler, share: int) -> Any:
        """The real object: the same one each time.

        Args:
            dummy: the stand-in.
            share: of how many processes' updates each one makes its own.

        Raises:
            ConfigError: the JSON does not define it.
        """
        known = self._made.get(id(dummy))
        if known is None:
            real = self._optimizer(dummy) if isinstance(dummy, DummyOptim) else self._scheduler(dummy, share)
            known = self._made[id(dummy)] = dummy, real
        return known[1]

    def _optimizer(self, dummy: DummyOptim) -> torch.optim.Optimizer:
        kind = self._config.get_value("optimizer.type")
        if kind is None:
            raise ConfigError(
                "DummyOptim is a placeholder for the optimizer in DeepSpeed's JSON, which has none; give a real optimizer"
            )
        known = {name.lower(): name for name in _OPTIMIZERS}
        name = known.get(str(kind).lower())
        if name is None:
            raise UnsupportedError(
                f"optimizer.type={kind!r} in DeepSpeed's JSON; allowed: {', '.join(_OPTIMIZERS)}. Or create the optimizer yourself"
            )
        self.optimizer = {"lr": dummy.lr, "weight_decay": dummy.weight_decay, **dummy.kwargs}
        params = _filled(self._config.get_value("optimizer.params") or {}, self.optimizer)
        # DeepSpeed's Adam decays weights as AdamW does, unless it is told otherwise.
        if name == "Adam" and params.get("adam_w_mode", True):
            name = "AdamW"
        kept = {key: value for key, value in params.items() if key not in _DEEPSPEEDS}
        if isinstance(kept.get("betas"), list):
            kept["betas"] = tuple(kept["betas"])
        try:
            made: torch.optim.Optimizer = getattr(torch.optim, name)(dummy.params, **kept)
        except TypeError as error:
            raise ConfigError(f"optimizer.params in DeepSpeed's JSON do not fit {name}: {error}") from None
        return made

    def _scheduler(self, dummy: DummyScheduler, share: int) -> Any:
        from deepspeed.runtime import lr_schedules

        optimizer = self._bound(dummy)
        if dummy.lr_scheduler_callable is not None:
            return dummy.lr_scheduler_callable(optimizer)
        kind = self._config.get_value("scheduler.type")
        if kind is None:
            raise ConfigError(
                "DummyScheduler is a placeholder for the schedule in DeepSpeed's JSON, which has none; give a real one, or a callable"
            )
        if kind not in lr_schedules.VALID_LR_SCHEDULES:
            raise ConfigError(f"scheduler.type={kind!r}; DeepSpeed has {', '.join(lr_schedules.VALID_LR_SCHEDULES)}")
        self.scheduler = {
            "warmup_min_lr": 0,
            "warmup_max_lr": optimizer.param_groups[0]["lr"],
            "warmup_num_steps": max(1, dummy.warmup_num_steps),
            **dummy.kwargs,
        }
        if dummy.total_num_steps is not None:
            self.scheduler["total_num_steps"] = math.ceil(dummy.total_num_steps / share)
        params = _filled(self._config.get_value("scheduler.params") or {}, self.scheduler)
        return getattr(lr_schedules, kind)(optimizer, **params)

    def _bound(self, dummy: DummyScheduler) -> torch.optim.Optimizer:
        bound = dummy.optimizer
        if isinstance(bound, DummyOptim):
            if id(bound) not in self._made:
                raise PrepareError("DummyScheduler's optimizer is not prepared; prepare both in one call")
            return self._made[id(bound)][1]  # type: ignore[no-any-return]
        made: torch.optim.Optimizer = getattr(bound, "optimizer", bound)
        return made


def _filled(params: dict[str, Any], answers: dict[str, Any]) -> dict[str, Any]:
    """With each "auto" filled, or left out where nobody knows: the class's own default applies."""
    filled = {key: answers.get(key, AUTO) if value == AUTO else value for key, value in params.items()}
    return {key: value for key, value in filled.items() if value != AUTO}
