"""Search for the largest batch size that fits into memory, before training starts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from headway.accelerator import Accelerator
from headway.core.data.loader import PreparedLoader
from headway.core.memory.batch_size import find_executable_batch_size
from headway.core.memory.use import read_free_address_space
from headway.errors import ConfigError, HeadwayError
from headway.log import get_logger
from headway.trainer.arguments import TrainingArguments
from headway.trainer.builder import apply_memory_savings, release_model
from headway.trainer.columns import drop_columns
from headway.trainer.data import get_length
from headway.trainer.loss import split_label_count
from headway.trainer.schedule_free import set_optimizer_mode
from headway.trainer.signature import ForwardSignature

log = get_logger(__name__)

_NUM_TRIAL_UPDATES = 2
"""Number of updates per trial. The first one creates optimizer state, so only the second one needs all memory."""
_NUM_MEASURED_ROWS = 512
"""Approximate number of rows of the training data whose sizes are compared, to find the longest ones."""
_FIRST_SIZE = 8
"""Number of rows in the first batch that the search tries if memory cannot be forecast.

It is also the largest number of rows in the batch from which memory is forecast.
"""
_TOLERANCE = 0.05
"""Fraction by which the batch size found by the search may be smaller than the largest batch size that fits.

Searching for the last 5 % would take half of all trials.
"""


@dataclass(frozen=True)
class LargestBatch:
    """Search for the largest micro-batch that fits into memory.

    The search runs training steps on the longest rows of the training data. If memory can be forecast, it starts
    with the batch size of the forecast.

    Attributes:
        args: Training arguments.
        model: Model to train. Its weights are restored afterward.
        signature: Inputs and loss function of the model.
        create_accelerator: Function that creates the Accelerator of a trial.
        create_optimizer: Function that creates the optimizer of a trial.
        create_loader: Function that creates a loader from rows and a batch size.
    """

    args: TrainingArguments
    model: torch.nn.Module
    signature: ForwardSignature
    create_accelerator: Callable[[], Accelerator]
    create_optimizer: Callable[[], torch.optim.Optimizer]
    create_loader: Callable[[Sequence[Any], int], DataLoader[Any]]

    def find_size(self, dataset: Any, num_shards: int) -> int:
        """Return the largest number of rows per micro-batch that fits into memory. Every rank must call it.

        The result may be up to 5 % too low. The model's weights and buffers are restored.

        Args:
            dataset: Training data.
            num_shards: Number of parts into which the ranks divide the data. One part is the upper limit of the search.

        Raises:
            BatchSizeError: If not even one row fits.
            ConfigError: If the dataset is an iterable dataset.
        """
        rows = self._list_long_rows(dataset)
        state = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        max_size = max(1, math.ceil((get_length(dataset) or 1) / num_shards))

        @find_executable_batch_size(
            starting_batch_size=self._choose_first_size(rows, max_size),
            search="largest",
            max_batch_size=max_size,
            tolerance=_TOLERANCE,
        )
        def try_size(batch_size: int) -> int:
            self._try_updates(rows, batch_size)
            return batch_size

        try:
            return int(try_size())
        finally:
            self.model.load_state_dict(state)

    def _choose_first_size(self, rows: Sequence[Any], max_size: int) -> int:
        """Return the batch size of the first trial, equal on all ranks.

        It is the smallest forecast of all ranks, where a rank without a forecast counts as 8. It is from 1 to `max_size`.

        Args:
            rows: Long rows of the training data, from `_list_long_rows`.
            max_size: Largest batch size to try.
        """
        accelerator = self.create_accelerator()
        accelerator.stop_watching()
        try:
            if accelerator.device.type == "cpu" and read_free_address_space() is None:
                forecast_size = None  # the memory has no limit from which a batch size could be forecast
            else:
                apply_memory_savings(self.args, accelerator, self.model)
                forecast_size = self._forecast_size(accelerator, rows[: min(_FIRST_SIZE, max_size)])
            own_size = _FIRST_SIZE if forecast_size is None else forecast_size
            sizes = [row[0] for row in accelerator.strategy.everyone.gather_numbers([float(own_size)])]
            return min(max(1, int(min(sizes))), max_size)
        finally:
            release_model(self.args, accelerator, self.model)

    def _forecast_size(self, accelerator: Accelerator, rows: Sequence[Any]) -> int | None:
        """Return the largest batch size that a memory forecast allows.

        If no forecast is possible, log the reason and return None.

        Args:
            accelerator: Accelerator that computes the forecast.
            rows: Rows that are collated into the batch of the forecast.
        """
        try:
            inputs, num_items = split_label_count(next(iter(self.create_loader(rows, len(rows)))))
            forecast = accelerator.forecast(
                self.model,
                inputs,
                optimizer=self.create_optimizer(),
                forward=lambda model, batch: self.signature.batch_loss(model, batch, num_items)[0],
            )
        except (HeadwayError, MemoryError) as error:
            log.info("the largest batch cannot be forecast, so the search begins with %d: %s", _FIRST_SIZE, error)
            return None
        log.info(
            "forecast: batches of %s fit, found in %.1f s; trials follow", forecast.largest_batch, forecast.seconds
        )
        return forecast.largest_batch

    def _list_long_rows(self, dataset: Any) -> list[Any]:
        """Return rows taken at regular intervals from the training data, longest first.

        Raises:
            ConfigError: If the dataset is an iterable dataset.
        """
        if isinstance(dataset, IterableDataset):
            raise ConfigError(
                "per_device_train_batch_size='largest' tries rows of the training data, and a stream has none to try; give a number"
            )
        used = drop_columns(dataset, self.signature.kept_columns)
        interval = max(1, len(used) // _NUM_MEASURED_ROWS)
        rows = [used[index] for index in range(0, len(used), interval)]
        return sorted(rows, key=_count_values, reverse=True)

    def _try_updates(self, rows: Sequence[Any], batch_size: int) -> None:
        """Make a few updates with batches of the longest rows. Out-of-memory errors are raised to the caller."""
        accelerator = self.create_accelerator()
        accelerator.stop_watching()  # a trial has nothing to save
        try:
            apply_memory_savings(self.args, accelerator, self.model)
            trial_rows = [rows[index % len(rows)] for index in range(batch_size * _NUM_TRIAL_UPDATES)]
            loader = self.create_loader(trial_rows * accelerator.strategy.data_shard.count, batch_size)
            self._run_updates(accelerator, accelerator.prepare_data_loader(loader))
        finally:
            release_model(self.args, accelerator, self.model)

    def _run_updates(self, accelerator: Accelerator, loader: PreparedLoader) -> None:
        """Train a fresh optimizer on all batches of a loader, as the training does."""
        model, optimizer = accelerator.prepare(self.model, self.create_optimizer())
        set_optimizer_mode(optimizer, is_training=True)
        for batch in loader:
            inputs, num_items = split_label_count(batch)
            for piece in accelerator.microbatches(inputs):
                with accelerator.accumulate(model):
                    with accelerator.autocast():
                        loss, _ = self.signature.batch_loss(model, piece, num_items)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()


def _count_values(row: Any) -> int:
    """Return the number of values in a row, by which rows are compared: a dict, tuple or list of values, or one value."""
    if hasattr(row, "values"):
        values = list(row.values())
    elif isinstance(row, tuple | list):
        values = list(row)
    else:
        values = [row]
    return sum(map(_count_elements, values))


def _count_elements(value: Any) -> int:
    """Return the number of elements of a tensor, an array or a list; 1 for any other value."""
    if isinstance(value, torch.Tensor):
        return value.numel()
    size = getattr(value, "size", None)  # of a NumPy array
    if isinstance(size, int):
        return size
    return len(value) if isinstance(value, list | tuple) else 1
