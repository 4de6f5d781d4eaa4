"""Search for the largest batch size that fits into memory, before training starts."""

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
from headway.trainer.builder import (
    _FIRST_SIZE,
    _NUM_MEASURED_ROWS,
    _NUM_TRIAL_UPDATES,
    _TOLERANCE,
    checkpoint_activations,
    release_model,
)
from headway.trainer.columns import drop_columns
from headway.trainer.data import get_length
from headway.trainer.loss import split_label_count
from headway.trainer.optimizer import set_optimizer_mode
from headway.trainer.signature import ForwardSignature

log = get_logger(__name__)


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
        kept = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        most = max(1, -(-(get_length(dataset) or 1) // num_shards))

        @find_executable_batch_size(
            starting_batch_size=self._choose_first_size(rows, most),
            search="largest",
            max_batch_size=most,
            tolerance=_TOLERANCE,
        )
        def try_size(batch_size: int) -> int:
            self._try_updates(rows, batch_size)
            return batch_size

        try:
            return int(try_size())
        finally:
            self.model.load_state_dict(kept)

    def _choose_first_size(self, rows: Sequence[Any], most: int) -> int:
        """Return the batch size of the first trial, equal on all ranks.

        It is the smallest forecast of all ranks, where a rank without a forecast counts as 8. It is from 1 to `most`.

        Args:
            rows: Long rows of the training data, from `_list_long_rows`.
            most: Largest batch size to try.
        """
        accelerator = self.create_accelerator()
        accelerator.stop_watching()
        try:
            if accelerator.device.type == "cpu" and read_free_address_space() is None:
                found = None  # the memory has no limit from which a batch size could be forecast
            else:
                checkpoint_activations(self.args, accelerator, self.model)
                found = self._forecast_size(accelerator, rows[: min(_FIRST_SIZE, most)])
            answers = accelerator.strategy.everyone.gather_numbers([float(_FIRST_SIZE if found is None else found)])
            return min(max(1, int(min(row[0] for row in answers))), most)
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

    def _list_long_rows(self, dataset: Any) -> list[Any]:
        """Return rows taken at regular intervals from the training data, longest first.

        Raises:
            ConfigError: If the dataset is an iterable dataset.
        """
        if isinstance(dataset, IterableDataset):
            raise ConfigError(
                "per_device_train_batch_size='largest' tries rows of the training data, and a stream has none to try; give a number"
            )
        found = drop_columns(dataset, self.signature.kept)
        step = max(1, len(found) // _NUM_MEASURED_ROWS)
        rows = [found[index] for index in range(0, len(found), step)]
        return sorted(rows, key=_count_values, reverse=True)

    def _try_updates(self, rows: Sequence[Any], batch_size: int) -> None:
        accelerator = self.create_accelerator()
        accelerator.stop_watching()  # a trial has nothing to save
        try:
            checkpoint_activations(self.args, accelerator, self.model)
            chosen = [rows[index % len(rows)] for index in range(batch_size * _NUM_TRIAL_UPDATES)]
            given = self.create_loader(chosen * accelerator.strategy.data_shard.count, batch_size)
            loader = accelerator.prepare_data_loader(given)
            self._run_updates(accelerator, loader)
        finally:
            release_model(self.args, accelerator, self.model)

    def _run_updates(self, accelerator: Accelerator, loader: PreparedLoader) -> None:
        model, optimizer = accelerator.prepare(self.model, self.create_optimizer())
        set_optimizer_mode(optimizer, is_training=True)
        for batch in loader:
            inputs, num_items = split_label_count(batch)
            for piece in accelerator.microbatches(inputs):
                with accelerator.accumulate(model):
                    with accelerator.autocast():
                        loss, _ = self.signature.loss_of(model, piece, num_items)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()


def _count_values(row: Any) -> int:
    values = row.values() if hasattr(row, "values") else row if isinstance(row, tuple | list) else [row]
    return sum(value.numel() if isinstance(value, torch.Tensor) else _count_items(value) for value in values)


def _count_items(value: Any) -> int:
    size = getattr(value, "size", None)
    return size if isinstance(size, int) else len(value) if isinstance(value, list | tuple) else 1
