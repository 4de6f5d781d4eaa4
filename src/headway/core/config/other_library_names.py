"""Names of arguments and values in other training libraries, with Headway's replacements, which error messages show."""

from collections.abc import Collection

ARGUMENTS = {
    "devices": "the launcher sets the number of processes: `headway launch -n 2 train.py`",
    "num_nodes": "the launcher sets the number of machines: `headway launch --num_machines 2 train.py`",
    "num_processes": "the launcher sets the number of processes: `headway launch -n 2 train.py`",
    "accelerator": "the device is found automatically; use cpu=True for the CPU",
    "device": "the device is found automatically; use cpu=True for the CPU",
    "precision": "use mixed_precision='bf16' or 'fp16'",
    "loggers": "use log_with=",
    "logger": "use log_with=",
    "accumulate_grad_batches": "use gradient_accumulation_steps=",
    "gradient_clip_val": "call accelerator.clip_grad_norm_(model.parameters(), value) before optimizer.step()",
    "max_epochs": "write `for epoch in accelerator.epochs(n):`; for a Trainer, set num_train_epochs in TrainingArguments",
    "max_steps": "an Accelerator runs your own loop; a Trainer has max_steps in TrainingArguments",
    "default_root_dir": "use project_dir=",
    "enable_checkpointing": "call accelerator.save_state() and accelerator.resume('latest')",
    "sync_batchnorm": "call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before prepare()",
    "monitor": "pass the metric itself: stopping.update(loss), save_state(metric=loss)",
    "zero_stage": "use strategy='zero2' or 'fsdp'",
}
"""Advice on what to use in Headway. The keys are constructor arguments of other training libraries."""

PRECISIONS = {
    **dict.fromkeys(("fp32", "float32", "f32", "32", "32-true", "full", "none", "off", "false"), "no"),
    **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true"), "bf16"),
    **dict.fromkeys(("float16", "half", "16", "16-mixed", "16-true", "f16"), "fp16"),
    **dict.fromkeys(("float8", "8bit"), "fp8"),
}
"""Values of Headway's `mixed_precision`. The keys are names of precisions in other libraries."""


BLOCK_FORMATS = dict.fromkeys(
    ("mxfp8", "mxfp4", "nvfp4"),
    ". Headway has no MXFP8 or NVFP4: torchao trains with them only in prototypes for Blackwell GPUs. Use mixed_precision='fp8'",
)
"""Why number formats with scales per block are not supported, and what to use. The keys are names of such formats."""


def explain_precision(word: object, allowed: Collection[str]) -> str:
    """Return a hint for an unknown value of `mixed_precision`, such as "; fp32 is called no", or "" if there is none.

    The names of formats that Headway does not support have hints, too.

    Args:
        word: Value that was given.
        allowed: Values that may be suggested.
    """
    name = str(word).strip().lower()
    own = PRECISIONS.get(name)
    return f"; {word} is called {own}" if own in allowed else BLOCK_FORMATS.get(name, "")
