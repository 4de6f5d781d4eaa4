"""Which keys DeepSpeed knows in each section of its JSON: asked of its own models, so that no list here can grow old."""

import importlib
from typing import Any, get_args

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
    for field, about in model.model_fields.items():
        if name in (field, about.alias):
            kinds = (about.annotation, *get_args(about.annotation))
            return next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return None
