"""What a Trainer is built of, by its arguments: the model's wants, the Accelerator, and the largest batch that fits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from headway.accelerator import Accelerator
from headway.config.run import DataLoaderConfiguration, ProjectConfiguration
from headway.data.loader import PreparedLoader
from headway.errors import ConfigError, HeadwayError
from headway.log import get_logger
from headway.memory.batch_size import find_executable_batch_size
from headway.memory.use import free_address_space
from headway.trainer.arguments import TrainingArguments
from headway.trainer.checkpoints import next_number
from headway.trainer.data import drop_columns, find_label_names, kept_columns, length_of
from headway.trainer.loss import LossFunction, LossOf, take_count

log = get_logger(__name__)

_NUM_TRIAL_UPDATES = 2
_NUM_MEASURED_ROWS = 512
_FIRST_SIZE = 8
"""IndexedRows of the first trial where nothing is forecast, and of the batch that a forecast is made from."""
_TOLERANCE = 0.05
"""By how much the number that is found may be below the largest; the last 5 % would cost half of the trials."""


# ---------------------------------------------------------------- what is given


def checked_arguments(model: Any, args: Any, optimizer: Any) -> TrainingArguments:
    """The arguments, or the defaults.

    Raises:
        ConfigError: something else, or in the model's place; a search for the largest batch with an `optimizer` of the user's.
    """
    if isinstance(model, TrainingArguments):
        raise ConfigError(
            "Trainer(model, args): the arguments came in the model's place; give Trainer(model, args, ...)"
        )
    if args is not None and not isinstance(args, TrainingArguments):
        what = f"{type(args).__module__.partition('.')[0]}'s {type(args).__name__}"
        hint = "; make it headway.TrainingArguments(...) with the same arguments" if "Argument" in what else ""
        raise ConfigError(f"the Trainer got {what} as args, which are headway.TrainingArguments{hint}")
    chosen = TrainingArguments() if args is None else args
    if optimizer is not None and chosen.per_device_train_batch_size == "largest":
        raise ConfigError(
            "per_device_train_batch_size='largest' tries updates, which would change the optimizer that you give; let the "
            "Trainer make it (optim, optimizer_cls_and_kwargs), or give a number"
        )
    return chosen


def check_given_once(**pairs: tuple[Any, str, Any]) -> None:
    """Refuse what was given twice by two names: name=(value, other name, its value)."""
    for name, (value, other, its_value) in pairs.items():
        if value is not None and its_value is not None:
            raise ConfigError(f"{name} and {other} are two names of one thing; give one")


def chosen_model(model: torch.nn.Module | None, model_init: Callable[[], torch.nn.Module] | None) -> torch.nn.Module:
    """The model that is given, or made.

    Raises:
        ConfigError: no model, or two.
    """
    if (model is None) == (model_init is None):
        raise ConfigError(
            "the Trainer needs a model: give `model`, or `model_init`, a function that makes it"
            if model is None
            else "the Trainer got `model` and `model_init`, which are two models; give one"
        )
    made = model_init() if model_init is not None else model
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(f"the Trainer got a {type(made).__name__} as its model; give a torch.nn.Module")
    return made


@dataclass(frozen=True)
class ForwardSignature:
    """What a model takes of a batch, as its forward says.

    Attributes:
        label_names: the batch's keys that are labels.
        kept: the columns that go into a batch; None: all of them.
        loss_of: computes the loss.
    """

    label_names: list[str]
    kept: set[str] | None
    loss_of: LossOf


def read_signature(model: torch.nn.Module, args: TrainingArguments, function: LossFunction | None) -> ForwardSignature:
    """Read off a model's forward what it takes.

    Args:
        model: the user's.
        args: names of labels, smoothing.
        function: the loss function; None: the model's own loss.
    """
    names = list(args.label_names or find_label_names(model))
    kept = kept_columns(model, names) if args.remove_unused_columns else None
    return ForwardSignature(names, kept, LossOf(model, function, args.label_smoothing_factor, names))


# ---------------------------------------------------------------- the Accelerator


def create_accelerator(args: TrainingArguments) -> Accelerator:
    """The Accelerator of one training, by the arguments."""
    keep = None if args.wanted_metric is None else "max" if args.greater_is_better else "min"
    folder = args.folder.absolute()
    project = ProjectConfiguration(
        # Without a place of its own the run's log lies beside its checkpoints: in the folder of its name.
        folder,
        args.logging_dir or folder.parent,
        automatic_checkpoint_naming=args.save_strategy != "no",
        total_limit=args.save_total_limit,
        iteration=next_number(folder),
        keep_best=keep,
    )
    loading = DataLoaderConfiguration(
        # A short last round is shared out as it is: nothing is seen twice, and one process gives the same as many.
        even_batches=False,
        data_seed=args.seed if args.data_seed is None else args.data_seed,
        non_blocking=None if args.dataloader_pin_memory else False,
    )
    settings: dict[str, Any] = {
        "cpu": args.use_cpu or None,
        "mixed_precision": args.mixed_precision,
        "project_config": project,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "scheduler_ticks": "updates",
        "dataloader_config": loading,
        "microbatching": "auto" if args.auto_find_batch_size else None,
        "log_with": args.trackers or None,
    }
    # Preemption, the guard against non-finite losses and the like: what the arguments do not name comes this way.
    given = dict(args.accelerator_config or {})
    if isinstance(given.get("project_config"), dict):
        given["project_config"] = replace(project, **given["project_config"])
    return Accelerator(**{**settings, **given})


def checkpoint_activations(args: TrainingArguments, accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Let the model compute activations again in backward, if the arguments say so."""
    if args.gradient_checkpointing:
        plan = args.checkpointing_plan()
        accelerator.checkpoint_activations(model, plan.every, plan.policy, plan.offload, plan.blocks)


def release_model(args: TrainingArguments, accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Give the model its own class, forward and memory back."""
    if args.gradient_checkpointing:
        accelerator.keep_activations(model)
    accelerator.free_memory()
    for parameter in model.parameters():
        parameter.grad = None


# ---------------------------------------------------------------- the largest batch


@dataclass(frozen=True)
class LargestBatch:
    """Searches for the most rows of a micro-batch that fit, by updates on the longest rows of the training data.

    Where the step can be forecast, the search begins with what the forecast says.

    Attributes:
        args: of the training.
        model: what is trained; its weights are put back.
        signature: what it takes of a batch.
        create_accelerator: makes the Accelerator of a trial.
        create_optimizer: makes its optimizer.
        create_loader: from rows and their number in a batch to a loader.
    """

    args: TrainingArguments
    model: torch.nn.Module
    signature: ForwardSignature
    create_accelerator: Callable[[], Accelerator]
    create_optimizer: Callable[[], torch.optim.Optimizer]
    create_loader: Callable[[Sequence[Any], int], DataLoader[Any]]

    def find(self, dataset: Any, num_shards: int) -> int:
        """The number of rows; every rank calls it.

        Args:
            dataset: the training data.
            num_shards: how many parts it is shared out in.

        Raises:
            BatchSizeError: not even one row fits.
            ConfigError: a stream.
        """
        rows = self._long_rows(dataset)
        kept = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        most = max(1, -(-(length_of(dataset) or 1) // num_shards))

        @find_executable_batch_size(
            starting_batch_size=self._first_size(rows, most),
            search="largest",
            max_batch_size=most,
            tolerance=_TOLERANCE,
        )
        def fits(batch_size: int) -> int:
            self._try_updates(rows, batch_size)
            return batch_size

        try:
            return int(fits())
        finally:
            self.model.load_state_dict(kept)

    def _first_size(self, rows: Sequence[Any], most: int) -> int:
        """What a forecast says, the same on all ranks."""
        accelerator = self.create_accelerator()
        accelerator.stop_watching()
        try:
            if accelerator.device.type == "cpu" and free_address_space() is None:
                found = None  # nothing limits it, so that there is nothing to look for
            else:
                checkpoint_activations(self.args, accelerator, self.model)
                found = self._forecast(accelerator, rows[: min(_FIRST_SIZE, most)])
            said = accelerator.strategy.everyone.gather_numbers([float(_FIRST_SIZE if found is None else found)])
            return min(max(1, int(min(row[0] for row in said))), most)
        finally:
            release_model(self.args, accelerator, self.model)

    def _forecast(self, accelerator: Accelerator, rows: Sequence[Any]) -> int | None:
        """The largest batch by a forecast; None, with a line in the log, where there is none."""
        try:
            inputs, num_items = take_count(next(iter(self.create_loader(rows, len(rows)))))
            found = accelerator.forecast(
                self.model,
                inputs,
                optimizer=self.create_optimizer(),
                forward=lambda model, batch: self.signature.loss_of(model, batch, num_items)[0],
            )
        except (HeadwayError, MemoryError) as error:
            log.info("the largest batch cannot be forecast, so the search begins with %d: %s", _FIRST_SIZE, error)
            return None
        log.info("forecast: batches of %s fit, found in %.1f s; trials follow", found.largest_batch, found.seconds)
        return found.largest_batch

    def _long_rows(self, dataset: Any) -> list[Any]:
        """The longest of a sample of rows, longest first."""
        if isinstance(dataset, IterableDataset):
            raise ConfigError(
                "per_device_train_batch_size='largest' tries rows of the training data, and a stream has none to try; give a number"
            )
        found = drop_columns(dataset, self.signature.kept)
        step = max(1, len(found) // _NUM_MEASURED_ROWS)
        rows = [found[index] for index in range(0, len(found), step)]
        return sorted(rows, key=_num_values, reverse=True)

    def _try_updates(self, rows: Sequence[Any], batch_size: int) -> None:
        accelerator = self.create_accelerator()
        accelerator.stop_watching()  # a trial has nothing to save
        try:
            checkpoint_activations(self.args, accelerator, self.model)
            chosen = [rows[index % len(rows)] for index in range(batch_size * _NUM_TRIAL_UPDATES)]
            given = self.create_loader(chosen * accelerator.strategy.data_shard.count, batch_size)
            loader = accelerator.prepare_data_loader(given)
            self._update(accelerator, loader)
        finally:
            release_model(self.args, accelerator, self.model)

    def _update(self, accelerator: Accelerator, loader: PreparedLoader) -> None:
        model, optimizer = accelerator.prepare(self.model, self.create_optimizer())
        for batch in loader:
            inputs, num_items = take_count(batch)
            for piece in accelerator.microbatches(inputs):
                with accelerator.accumulate(model):
                    with accelerator.autocast():
                        loss, _ = self.signature.loss_of(model, piece, num_items)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()


def _num_values(row: Any) -> int:
    values = row.values() if hasattr(row, "values") else row if isinstance(row, tuple | list) else [row]
    return sum(value.numel() if isinstance(value, torch.Tensor) else _length(value) for value in values)


def _length(value: Any) -> int:
    size = getattr(value, "size", None)
    return size if isinstance(size, int) else len(value) if isinstance(value, list | tuple) else 1
