"""The half of the Trainer that builds: its Accelerator, loaders, optimizer and schedule."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from headway import env
from headway.accelerator import Accelerator
from headway.config.run import DataLoaderConfiguration, ProjectConfiguration
from headway.errors import ConfigError, DataError
from headway.log import get_logger
from headway.memory.batch_size import find_executable_batch_size
from headway.ops.tree import to_device
from headway.runtime.device import detect
from headway.trainer.collate import Collating, Collator, drop_columns, find_label_names, kept_columns
from headway.trainer.data import check_dataset, length_of, make_loader, train_sampler
from headway.trainer.loss import LossFunction, LossOf, take_count
from headway.trainer.optimizer import create_optimizer, create_schedule, decaying_names
from headway.trainer.records import next_number
from headway.trainer.reporting import Reporting

log = get_logger(__name__)

_NUM_TRIAL_UPDATES = 2
_NUM_MEASURED_ROWS = 512


class Building(Reporting):
    """What a Trainer is made of; each `get_...` and `create_...` may be overridden.

    Attributes:
        model: the user's own object.
        data_collator: from rows to a batch.
        label_names: the batch's keys that are labels.
    """

    model: torch.nn.Module
    train_dataset: Any
    eval_dataset: Any
    _train_batch_size: int
    _optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None

    def _take_model(self, model: torch.nn.Module | None, model_init: Callable[[], torch.nn.Module] | None,
                    function: LossFunction | None) -> None:  # fmt: skip
        """Take the model, and read off its forward what it wants.

        Raises:
            ConfigError: no model, or two.
        """
        if (model is None) == (model_init is None):
            raise ConfigError(
                "the Trainer needs a model: give `model`, or `model_init`, a function that makes it" if model is None
                else "the Trainer got `model` and `model_init`, which are two models; give one"
            )  # fmt: skip
        made = model_init() if model_init is not None else model
        if not isinstance(made, torch.nn.Module):
            raise ConfigError(f"the Trainer got a {type(made).__name__} as its model; give a torch.nn.Module")
        self.model = made
        self.label_names = list(self.args.label_names or find_label_names(made))
        self._kept = kept_columns(made, self.label_names) if self.args.remove_unused_columns else None
        self._loss_of = LossOf(made, function, self.args.label_smoothing_factor, self.label_names)

    def create_accelerator(self) -> Accelerator:
        """The Accelerator of one training, by the arguments."""
        args = self.args
        keep = None if args.wanted_metric is None else "max" if args.greater_is_better else "min"
        folder = Path(args.output_dir or ".").absolute()
        project = ProjectConfiguration(
            # Without a place of its own the run's log lies beside its checkpoints: in the folder of its name.
            folder, args.logging_dir or folder.parent, automatic_checkpoint_naming=args.save_strategy != "no",
            total_limit=args.save_total_limit,
            iteration=next_number(folder), keep_best=keep,
        )  # fmt: skip
        loading = DataLoaderConfiguration(
            # A short last round is shared out as it is: nothing is seen twice, and one process gives the same as many.
            even_batches=False,
            data_seed=args.seed if args.data_seed is None else args.data_seed,
            non_blocking=args.dataloader_pin_memory
            and not args.use_cpu
            and detect().kind == "cuda"
            and not _is_forced(),
        )
        settings: dict[str, Any] = {
            "cpu": args.use_cpu or None, "mixed_precision": args.mixed_precision, "project_config": project,
            "gradient_accumulation_steps": args.gradient_accumulation_steps, "scheduler_ticks": "updates",
            "dataloader_config": loading, "microbatching": "auto" if args.auto_find_batch_size else None,
            "log_with": args.trackers or None,
        }  # fmt: skip
        # Preemption, the guard against non-finite losses and the like: what the arguments do not name comes this way.
        return Accelerator(**{**settings, **(args.accelerator_config or {})})

    # ---------------------------------------------------------------- loaders

    def _prepare_input(self, data: Any) -> Any:
        """On the device."""
        return to_device(data, self.accelerator.device)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """What each step does with its batch first; one of a prepared loader is on the device already. May be overridden."""
        return inputs

    def _loader(self, dataset: Any, batch_size: int, sampler: Any = None, drop_last: bool = False) -> DataLoader[Any]:
        count = self._loss_of.count
        labels = {*self.label_names, "labels", "label", "label_ids"}
        collate = Collating(self.data_collator, self._kept, count, labels)
        dataset = drop_columns(dataset, self._kept, labels)
        return make_loader(
            dataset, self.args, batch_size, collate, sampler, drop_last, self.accelerator.device.type == "cuda"
        )

    def _default_collator(self, given: Callable[[list[Any]], Any] | None, processing_class: Any) -> None:
        config = getattr(self.model, "config", None)
        own = Collator(processing_class, getattr(config, "pad_token_id", None))
        self.data_collator: Callable[[list[Any]], Any] = own if given is None else given

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The training data, not yet prepared.

        Raises:
            DataError: there is none.
        """
        if self.train_dataset is None:
            raise DataError("the Trainer was given no train_dataset, so there is nothing to train on")
        check_dataset(self.train_dataset)
        args, size = self.args, self._train_batch_size
        sampler = self._get_train_sampler(self.train_dataset)
        return self._loader(self.train_dataset, size, sampler, args.dataloader_drop_last)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The order of the training data; None for a stream. May be overridden."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        size = self._train_batch_size * self.args.gradient_accumulation_steps * self.accelerator.num_processes
        return train_sampler(dataset, self.args, size)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """The order of evaluation data; None: as it is. May be overridden."""
        return None

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The evaluation data, not yet prepared.

        Args:
            eval_dataset: None: the Trainer's own; a name: of one of several.

        Raises:
            DataError: there is none.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str) and isinstance(self.eval_dataset, dict):
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise DataError("the Trainer was given no eval_dataset; give one to it or to evaluate()")
        check_dataset(dataset)
        return self._loader(dataset, self.args.per_device_eval_batch_size, self._get_eval_sampler(dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """The data to predict, not yet prepared."""
        check_dataset(test_dataset)
        sampler = self._get_eval_sampler(test_dataset)
        return self._loader(test_dataset, self.args.per_device_eval_batch_size, sampler)

    # ---------------------------------------------------------------- optimizer and schedule

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set `optimizer` and `lr_scheduler` where they are None; an override may do it in its own way."""
        if self.optimizer is None:
            # An override may set the attribute itself.
            self.optimizer = self.create_optimizer() or self.optimizer
        if self.lr_scheduler is None:
            self.lr_scheduler = self.create_scheduler(num_training_steps, self.optimizer) or self.lr_scheduler

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer by the arguments; what was given to the Trainer goes first.

        Args:
            model: None: the Trainer's.
        """
        chosen = self.model if model is None else model
        decaying = self.get_decay_parameter_names(chosen)
        return create_optimizer(chosen, self.args, self._optimizer_cls_and_kwargs, decaying)

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """The names of the parameters that decay: all but biases and parameters of norms."""
        return decaying_names(model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The schedule by the arguments, counted in updates.

        Args:
            num_training_steps: updates.
            optimizer: None: the Trainer's.
        """
        return create_schedule(self.optimizer if optimizer is None else optimizer, self.args, num_training_steps)

    # ---------------------------------------------------------------- the largest batch

    def find_largest_batch_size(self) -> int:
        """The most rows of a micro-batch that fit, by updates on the longest rows of the training data.

        The weights are put back afterwards.

        Raises:
            BatchSizeError: not even one row fits.
        """
        rows = self._long_rows()
        kept = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        length = length_of(self.train_dataset) or 1
        most = max(1, -(-length // self.accelerator.num_processes))

        @find_executable_batch_size(
            starting_batch_size=min(8, most), search="largest", max_batch_size=most,
            cache_key=(self.args.to_json_string(), type(self.model).__name__, _describe(rows[0])),
        )  # fmt: skip
        def fits(batch_size: int) -> int:
            self._try_updates(rows, batch_size)
            return batch_size

        try:
            return int(fits())
        finally:
            self.model.load_state_dict(kept)

    def _long_rows(self) -> list[Any]:
        """The longest of a sample of rows, longest first."""
        if isinstance(self.train_dataset, IterableDataset):
            raise ConfigError(
                "per_device_train_batch_size='largest' tries rows of the training data, and a stream has none to try; give a number"
            )
        dataset = drop_columns(self.train_dataset, self._kept)
        step = max(1, len(dataset) // _NUM_MEASURED_ROWS)
        rows = [dataset[index] for index in range(0, len(dataset), step)]
        return sorted(rows, key=_num_values, reverse=True)

    def _try_updates(self, rows: Sequence[Any], batch_size: int) -> None:
        accelerator = self.create_accelerator()
        if self.args.gradient_checkpointing:
            plan = self.args.checkpointing_plan()
            accelerator.checkpoint_activations(self.model, plan.every, plan.policy, plan.offload, plan.blocks)
        try:
            chosen = [rows[index % len(rows)] for index in range(batch_size * _NUM_TRIAL_UPDATES)]
            loader = accelerator.prepare(self._loader(chosen * accelerator.num_processes, batch_size))
            model, optimizer = accelerator.prepare(self.model, self.create_optimizer())
            for batch in loader:
                inputs, num_items = take_count(batch)
                for piece in accelerator.microbatches(inputs):
                    with accelerator.accumulate(model):
                        with accelerator.autocast():
                            loss, _ = self._loss_of(model, piece, num_items)
                        accelerator.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
        finally:
            self._undo(accelerator)

    def _undo(self, accelerator: Accelerator) -> None:
        """Give the model its own class, forward and memory back."""
        if self.args.gradient_checkpointing:
            accelerator.keep_activations(self.model)
        accelerator.free_memory()
        for parameter in self.model.parameters():
            parameter.grad = None


def _is_forced() -> bool:
    """Was another device asked for than the one that this machine has?"""
    return env.get("HEADWAY_DEVICE") not in (None, "", "cuda")


def _num_values(row: Any) -> int:
    values = row.values() if hasattr(row, "values") else row if isinstance(row, tuple | list) else [row]
    return sum(value.numel() if isinstance(value, torch.Tensor) else _length(value) for value in values)


def _length(value: Any) -> int:
    size = getattr(value, "size", None)
    return size if isinstance(size, int) else len(value) if isinstance(value, list | tuple) else 1


def _describe(row: Any) -> str:
    values = row.items() if hasattr(row, "items") else enumerate(row) if isinstance(row, tuple | list) else [(0, row)]
    return ", ".join(f"{name}: {_num_values([value])}" for name, value in values)
