"""Keys that DeepSpeed accepts in each section of its JSON, read from the installed version's classes."""

import importlib
from typing import Any, get_args

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
"""Top-level keys that DeepSpeed accepts in its JSON."""

_CLASS_PATHS = {
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
"""DeepSpeed's class that defines the keys of each section, as "module:class". None: the section accepts any key."""
_KEYS_WITHOUT_CLASS = {
    "data_types": ["buffer_dtype", "grad_accum_dtype", "keep_in_fp32_modules", "param_dtype"],
    "optimizer": ["legacy_fusion", "params", "type"],
    "scheduler": ["params", "type"],
    "torch_autocast": ["dtype", "enabled", "lower_precision_safe_modules"],
}
"""Keys of the sections for which DeepSpeed has no class."""


def find_known_keys(section: str) -> list[str] | None:
    """Return the keys that DeepSpeed accepts in a section of its JSON.

    Args:
        section: Dotted name of the section.

    Returns:
        The keys, or None if the section accepts any key or DeepSpeed has no list of them.
    """
    if section in _KEYS_WITHOUT_CLASS:
        return _KEYS_WITHOUT_CLASS[section]
    top_section, *nested_sections = section.split(".")
    path = _CLASS_PATHS.get(top_section)
    if path is None:
        return None
    module, _, class_name = path.partition(":")
    try:
        model: Any = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError):  # this version of DeepSpeed defines the class elsewhere
        return None
    for name in nested_sections:
        model = _find_nested_class(model, name)
        if model is None:
            return None
    keys = {key for name, field in model.model_fields.items() for key in (name, field.alias)}
    return sorted(keys - {None})


def _find_nested_class(model: Any, section: str) -> Any:
    """Return DeepSpeed's class for a nested section, or None if DeepSpeed has no class for it.

    Args:
        model: Class of the outer section, a pydantic model.
        section: Name or alias of the outer section's field that holds the nested section.
    """
    for name, field in model.model_fields.items():
        if section in (name, field.alias):
            # The annotation may be an Optional or another union that contains the class.
            kinds = (field.annotation, *get_args(field.annotation))
            return next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return None
