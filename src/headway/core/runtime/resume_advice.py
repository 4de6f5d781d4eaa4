"""Advice on how to continue a run that was stopped, for example by Ctrl-C."""

from pathlib import Path

NO_CHECKPOINT = (
    "headway: no checkpoint was saved. To continue a run after an interruption, call accelerator.save_state() in the "
    'loop and accelerator.resume("latest") after prepare()'
)


def format_resume_advice(folder: str | Path, *, is_automatic: bool, method: str) -> str:
    """Return advice on how to continue a run from its last checkpoint.

    Args:
        folder: Folder of the last checkpoint.
        is_automatic: Whether the run names its checkpoints itself, so that `resume("latest")` finds them.
        method: Method of the Accelerator that continues from a checkpoint: "resume" or "load_state".
    """
    word = "latest" if is_automatic and method == "resume" else folder
    trainer = " (Trainer: train(resume_from_checkpoint=True))" if method == "resume" else ""
    return f'headway: the last checkpoint is {folder}; accelerator.{method}("{word}") after prepare() continues from it{trainer}'
