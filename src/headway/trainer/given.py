"""Checks what a Trainer is given, for mistakes that would show late or with an unhelpful message."""

from pathlib import Path
from typing import Any

from headway.checkpoint.folders import committed
from headway.errors import ConfigError
from headway.trainer.arguments import TrainingArguments
from headway.trainer.records import FOLDER


def checked_arguments(model: Any, args: Any) -> TrainingArguments:
    """The arguments, or the defaults.

    Raises:
        ConfigError: something else, or in the model's place.
    """
    if isinstance(model, TrainingArguments):
        raise ConfigError(
            "Trainer(model, args): the arguments came in the model's place; give Trainer(model, args, ...)"
        )
    if args is not None and not isinstance(args, TrainingArguments):
        what = f"{type(args).__module__.partition('.')[0]}'s {type(args).__name__}"
        hint = "; make it headway.TrainingArguments(...) with the same arguments" if "Argument" in what else ""
        raise ConfigError(f"the Trainer got {what} as args, which are headway.TrainingArguments{hint}")
    return TrainingArguments() if args is None else args


def check_pairs(args: TrainingArguments, first: Any, second: Any, processing_class: Any, tokenizer: Any,
                 optimizers: tuple[Any, Any], named: Any) -> None:  # fmt: skip
    """Refuse what was given twice by two names."""
    if first is not None and second is not None:
        raise ConfigError("compute_loss_func and loss_function are two names of one thing; give one")
    if processing_class is not None and tokenizer is not None:
        raise ConfigError("tokenizer is the old name of processing_class; give one")
    if optimizers[0] is not None and named is not None:
        raise ConfigError("optimizers and optimizer_cls_and_kwargs are two optimizers; give one")
    if optimizers[0] is not None and args.per_device_train_batch_size == "largest":
        raise ConfigError(
            "per_device_train_batch_size='largest' tries updates, which would change the optimizer that you give; let the "
            "Trainer make it (optim, optimizer_cls_and_kwargs), or give a number"
        )


def missing_checkpoint(asked: str | Path, output_dir: str | Path) -> str | None:
    """Why nothing can be resumed from there, in a sentence; None where it seems to be a checkpoint.

    Args:
        asked: `resume_from_checkpoint`, a folder.
        output_dir: the run's, whose checkpoints are named.
    """
    folder = Path(asked)
    if folder.is_dir() and not committed(folder / FOLDER) and not (folder / "trainer_state.json").is_file():
        return None
    there = committed(folder / FOLDER) or committed(Path(output_dir) / FOLDER)
    known = (
        f"{there[0].parent} holds {', '.join(path.name for path in there[:5])}"
        if there
        else "this run has no checkpoint"
    )
    if not folder.exists():
        what = "does not exist"
    elif committed(folder / FOLDER):
        what = "is a run's folder, not a checkpoint"
    elif folder.is_dir():
        what = "is a checkpoint of transformers, which cannot be resumed; take its weights with from_pretrained"
    else:
        what = "is a file; a checkpoint is a folder"
    return f"resume_from_checkpoint={str(asked)!r} {what}; {known}; True resumes from the newest"
