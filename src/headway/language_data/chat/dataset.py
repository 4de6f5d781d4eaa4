"""`ChatDataset`: map-style dataset of tokenized conversations or preference pairs, with labels on the responses only."""

from typing import Any

import numpy
from torch.utils.data import Dataset, IterableDataset

from headway.errors import ConfigError, DataError
from headway.language_data.chat.preferences import PreferenceTokenizer
from headway.language_data.chat.row_tokenizer import RowTokenizer
from headway.language_data.chat.tokenizer import ChatTokenizer
from headway.language_data.mixture import Mixture
from headway.log import get_logger

log = get_logger(__name__)


class ChatDataset(Dataset[dict[str, list[int]]]):
    """Map-style dataset that tokenizes conversations when they are read, with labels on the responses only.

    A sample is {"input_ids": token IDs, "labels": labels}. It depends only on the row, so the dataset works with
    `PackedDataset`, `Mixture`, `TokenBatchSampler` and the Trainer, and a resumed run reads the same samples. To mix
    conversations, pass several `ChatDataset`s to a `Mixture`. With a `PreferenceTokenizer`, each row and each sample is a
    preference pair, which cannot be packed.

    Each epoch tokenizes the conversations again. For large data, store the tokens in a table once instead:
    `table.map(ChatTokenizer(tokenizer), remove_columns=table.column_names)`.

    Args:
        conversations: Rows in a format that the tokenizer reads: a list, a `datasets.Dataset`, a `ShardedDataset` or
            another map-style dataset.
        tokenizer: `ChatTokenizer`, `PreferenceTokenizer`, or a tokenizer of transformers, which gets the default options of
            a `ChatTokenizer`.

    Attributes:
        dataset: The conversations.
        tokenizer: The `ChatTokenizer` or `PreferenceTokenizer`.
        num_dropped: Number of conversations that are left out because they are too long and `too_long="drop"`.
        orders_samples: Whether the dataset of conversations defines their order, which a DataLoader with `shuffle=True`
            would lose.

    Raises:
        ConfigError: If the conversations are a `Mixture`, or `too_long="drop"` and their order changes with the epoch.
        DataError: If the conversations have no length or no random access. With `too_long="drop"`, also if a conversation
            cannot be used, or all are too long.
    """

    def __init__(self, conversations: Any, tokenizer: Any) -> None:
        has_rows = hasattr(conversations, "__len__") and hasattr(conversations, "__getitem__")
        if isinstance(conversations, IterableDataset) or not has_rows:
            raise DataError(
                f"ChatDataset got a {type(conversations).__name__}, which has no length or no random access; apply a ChatTokenizer "
                "to a stream instead: stream.map(ChatTokenizer(tokenizer))"
            )
        if isinstance(conversations, Mixture):
            raise ConfigError(
                "ChatDataset got a Mixture of conversations; pass a ChatDataset for each source to a Mixture"
            )
        self.dataset = conversations
        self.tokenizer: RowTokenizer = tokenizer if isinstance(tokenizer, RowTokenizer) else ChatTokenizer(tokenizer)
        self.orders_samples = bool(getattr(conversations, "orders_samples", False))
        self._lengths: numpy.ndarray[Any, Any] | None = None
        self._kept: numpy.ndarray[Any, Any] | None = None  # indices of the conversations; None: all
        self.num_dropped = 0
        if self.tokenizer.too_long == "drop":
            if self.orders_samples:
                raise ConfigError(
                    f"too_long='drop' with a {type(conversations).__name__} whose order changes with the epoch; pass "
                    "too_long='truncate', or shuffle in the DataLoader instead"
                )
            self._drop_too_long()

    def _drop_too_long(self) -> None:
        """Select the conversations that are not too long. They are measured here, so that the length of the dataset is known.

        Raises:
            DataError: If all conversations are too long.
        """
        lengths = self._measure_rows()
        self._kept = numpy.flatnonzero(lengths)
        self._lengths = lengths[self._kept]
        self.num_dropped = len(lengths) - len(self._kept)
        limit = self.tokenizer.max_length
        if not len(self._kept):
            raise DataError(f"all {len(lengths)} conversations have more than max_length={limit} tokens")
        if self.num_dropped:
            log.info(
                "%d of %d conversations are longer than %d tokens and left out", self.num_dropped, len(lengths), limit
            )

    def _measure_rows(self) -> numpy.ndarray[Any, Any]:
        """Return the number of tokens of each conversation; 0 for those that are dropped."""
        samples = (self.tokenizer.encode_unless_dropped(self.dataset[at], at) for at in range(len(self.dataset)))
        return numpy.fromiter(
            (self.tokenizer.count_tokens(sample) if sample else 0 for sample in samples), numpy.int64, len(self.dataset)
        )

    @property
    def lengths(self) -> numpy.ndarray[Any, Any]:
        """Number of tokens of each sample, for `TokenBatchSampler(data.lengths, ...)`.

        A preference pair counts as twice its longer conversation, because both are padded to one length.
        The first access tokenizes all conversations, and so finds those that cannot be used.

        Raises:
            DataError: If a conversation cannot be used.
        """
        if self._lengths is None:
            log.info("ChatDataset tokenizes all %d conversations once to measure them", len(self.dataset))
            self._lengths = self._measure_rows()
        return self._lengths

    def measure_lengths(self) -> numpy.ndarray[Any, Any]:
        """Return `lengths`. `PackedDataset` calls this method instead of reading all samples.

        Raises:
            ConfigError: If the samples are preference pairs, which `PackedDataset` cannot pack.
        """
        if isinstance(self.tokenizer, PreferenceTokenizer):
            raise ConfigError(
                "PackedDataset got a ChatDataset of preference pairs, which cannot be packed; pass the ChatDataset to a DataLoader "
                "with collate_fn=PreferenceCollator()"
            )
        return self.lengths

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the dataset of conversations, if it has a method `set_epoch`."""
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)
        if self.orders_samples:
            self._lengths = None

    def __len__(self) -> int:
        return len(self.dataset) if self._kept is None else len(self._kept)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """Return a conversation's token IDs and labels. Negative indices count from the end.

        Raises:
            IndexError: If the index is out of range.
            DataError: If the conversation cannot be used.
        """
        row = self._find_row(index)
        return self.tokenizer(self.dataset[row], row)

    def show(self, index: int) -> str:
        """Return the text of a conversation with the trained parts between `[train]` and `[/train]`.

        Raises:
            IndexError: If the index is out of range.
            DataError: If the conversation cannot be used.
        """
        return self.tokenizer.mark_trained(self[index])

    def _find_row(self, index: int) -> int:
        """Return the index of a sample's row in the dataset of conversations. Negative indices count from the end.

        Raises:
            IndexError: If the index is out of range.
        """
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"conversation {index} of {size}")
        position = int(index) % size
        return position if self._kept is None else int(self._kept[position])
