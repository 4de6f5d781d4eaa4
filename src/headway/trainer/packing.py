"""Packing in the Trainer: packed datasets, their collate function, and a check of the model."""

from typing import Any

import torch

from headway.accelerator import Accelerator
from headway.core.runtime.dry_run import is_dry_run
from headway.errors import ConfigError
from headway.language_data.boundary_check import check_document_boundaries
from headway.language_data.packing import PackedDataset
from headway.language_data.packing_collator import PackingCollator, choose_attention
from headway.language_data.source_index import SOURCE_KEY
from headway.trainer.arguments import TrainingArguments
from headway.trainer.collation import Collate
from headway.trainer.columns import drop_columns
from headway.trainer.data import Data, check_dataset, find_lengths


class Packer:
    """Packer of a Trainer's datasets: it packs their samples into sequences, and collates them.

    Without `packing=True` in the arguments, nothing is packed. A `PackedDataset` of the user is still collated and
    checked.

    Args:
        args: Training arguments.
        data_collator: The user's collate function, or None.
        processing_class: The user's tokenizer, or None.

    Raises:
        ConfigError: If packing is requested together with a collate function that is not a `PackingCollator`.
    """

    def __init__(self, args: TrainingArguments, data_collator: Collate | None, processing_class: Any) -> None:
        if args.packing and data_collator is not None and not isinstance(data_collator, PackingCollator):
            raise ConfigError(
                f"packing=True and data_collator={type(data_collator).__name__}: packed sequences have labels and positions of their "
                "own, which another collator would change; leave data_collator out, or give a headway.PackingCollator"
            )
        self._args = args
        self._collator = data_collator
        self._processing_class = processing_class
        self._checked_model: torch.nn.Module | None = None  # model that `check_model` has checked last
        # Pairs of (dataset, packed dataset) by `id` of the dataset, which is kept so that no other object gets its ID
        self._packed: dict[int, tuple[Any, PackedDataset]] = {}

    def pack(self, dataset: Any, model: torch.nn.Module, kept_columns: set[str] | None, *, is_training: bool) -> Any:
        """Return the packed dataset if packing is requested and the dataset is not packed yet, else the dataset itself.

        Each dataset is packed only once. Later calls return the result of the first one.

        Args:
            dataset: Dataset of the Trainer, or None.
            model: Model, whose config names the token that fills sequences.
            kept_columns: Columns that a batch contains. None: all.
            is_training: Whether to pack in a random order if the arguments request it.

        Raises:
            DataError: If the dataset has no length, only its labels would be kept, or a sample is too long although
                `packing_long_samples` is "error".
        """
        args = self._args
        if dataset is None or not args.packing or isinstance(dataset, PackedDataset):
            return dataset
        if id(dataset) not in self._packed:
            check_dataset(dataset)
            is_ordered = getattr(dataset, "orders_samples", False)
            is_shuffled = is_training and args.train_sampling_strategy == "random" and not is_ordered
            seed = args.seed if args.data_seed is None else args.data_seed
            packed = PackedDataset(
                drop_columns(dataset, None if kept_columns is None else {*kept_columns, SOURCE_KEY}),
                args.packing_length or 0,
                lengths=self._measure_lengths(dataset),
                strategy=args.packing_strategy,
                long_samples=args.packing_long_samples,
                seed=seed if is_shuffled else None,
                pad_token_id=self._find_pad_token(model),
            )
            self._packed[id(dataset)] = dataset, packed
        _, packed = self._packed[id(dataset)]
        return packed

    def _measure_lengths(self, dataset: Any) -> Any:
        """Return the lengths in the dataset's column of lengths, or None if it has no such column."""
        columns = getattr(dataset, "column_names", None)
        has_lengths = isinstance(columns, list) and self._args.length_column_name in columns
        if not hasattr(dataset, "__len__") or not has_lengths:
            return None  # PackedDataset measures the samples, or explains what is wrong with the dataset
        return find_lengths(dataset, self._args.length_column_name)

    def _find_pad_token(self, model: torch.nn.Module) -> int:
        """Return the padding token of the processing class, or else of the model's config, or else 0."""
        for owner in (self._processing_class, getattr(model, "config", None)):
            token = getattr(owner, "pad_token_id", None)
            if isinstance(token, int) and token >= 0:
                return token
        return 0

    def choose_collator(self, dataset: Data, model: torch.nn.Module) -> Collate | None:
        """Return the collate function of a packed dataset, or None if the dataset is not packed.

        It is the user's collate function, if there is one, else a `PackingCollator` that fits the model.
        """
        if not isinstance(dataset, PackedDataset):
            return None
        return PackingCollator(choose_attention(model)) if self._collator is None else self._collator

    def check_loader(self, dataset: Data) -> None:
        """Raise ConfigError if the arguments request packing but the dataset of the training loader is not packed."""
        if self._args.packing and not isinstance(dataset, PackedDataset):
            raise ConfigError(
                f"packing=True, but get_train_dataloader() returned a loader of a {type(dataset).__name__}; an override must load a "
                "headway.PackedDataset itself, or be removed"
            )

    def check_model(self, accelerator: Accelerator, model: torch.nn.Module, dataset: Data) -> None:
        """Raise an error if packed documents influence each other in the model. Every rank must call it.

        Do nothing if the dataset is not packed, the collate function has `check_model=False`, or this model was checked
        last. The check also does not run during a memory forecast, in which tensors have no values.

        Args:
            accelerator: Accelerator that has prepared the model.
            model: Prepared model.
            dataset: Dataset of a loader.

        Raises:
            PrepareError: If the model ignores the boundaries of documents, or does not accept packed batches.
        """
        collate = self.choose_collator(dataset, model)
        if collate is None or is_dry_run() or self._checked_model is model or not getattr(collate, "check_model", True):
            return
        check_document_boundaries(model, collate, is_half=accelerator.mixed_precision != "no" or None)
        self._checked_model = model
