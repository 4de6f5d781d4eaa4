"""Map-style dataset of packed sequences. Each has the same length and contains several samples, called documents."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset

from headway.errors import ConfigError, DataError
from headway.language_data.mixture import Mixture
from headway.language_data.packing_plan import DEFAULT_WINDOW, PackingPlan, SamplePiece, make_packing_plan
from headway.language_data.source_index import SOURCE_KEY
from headway.log import get_logger

log = get_logger(__name__)

TOKENS = "input_ids"
LABELS = "labels"
POSITIONS = "position_ids"
MASK = "attention_mask"
IGNORE_INDEX = -100
"""Label that losses ignore, as in torch's `cross_entropy`."""
LABEL_NAMES = frozenset({LABELS, "shift_labels", "targets", "target"})
"""Names of the sample entries that are padded with -100 (`IGNORE_INDEX`). Context parallelism pads the same entries."""
_PACKED_ENTRIES = frozenset({TOKENS, LABELS, POSITIONS, MASK, SOURCE_KEY})
"""Names of the entries of a sequence that packing computes itself. Other entries of samples are concatenated."""
_ROWS_PER_READ = 10_000

Lengths = Sequence[int] | numpy.ndarray[Any, Any] | torch.Tensor
"""Number of tokens in each sample."""
Array = numpy.ndarray[Any, Any]


class PackedDataset(Dataset[dict[str, Any]]):
    """Map-style dataset of packed sequences, each of which contains several samples of another map-style dataset.

    A sample is a mapping with `input_ids`, or a sequence of token IDs. All sequences have the same length. Each
    sample in a sequence is called a document:

    - `position_ids` start at 0 at each document. With `PackingCollator` and a model that has passed
      `check_document_boundaries`, no token attends to another document.
    - `labels` are those of the samples, or the token IDs. The label of each document's first token is -100, so no loss
      crosses a boundary in models that predict the next token.
    - Other entries with one number per token are concatenated unchanged. Labels that are already shifted must therefore
      not be named `labels`, but `shift_labels` or `targets`.
    - The end of a sequence is padded. The padding is a separate document whose labels are -100.
    - `source` lists the source of each document if the samples have an entry `source`.

    The sequences are a pure function of lengths and seed. If the dataset has a new order in each epoch, as a `Mixture`
    does, the sequences also depend on the epoch. They do not depend on ranks, workers or the position in the data, so a
    resumed run gets the same sequences. Use the DataLoader to shuffle them.

    Args:
        dataset: Dataset with a length and random access.
        sequence_length: Number of tokens per sequence.
        lengths: Number of tokens in each sample, or a function that returns these numbers and is called again in each
            epoch. None (the default): all samples are read once to measure them. If the dataset is a `Mixture`, the
            samples of its sources are measured.
        strategy: How samples are assigned to sequences. "best_fit" (the default): longest samples first, each in the
            fullest sequence of its window that has room (Ding et al. 2024, arXiv 2404.10830). "in_order": a sequence
            ends at the first sample that does not fit. "split": samples are joined and cut every `sequence_length`
            tokens.
        long_samples: Treatment of samples longer than a sequence, unless the strategy is "split". "error" (the
            default): raise DataError. "split": cut them into several documents. "truncate": drop the tokens at the end.
        seed: Seed of the order in which samples are packed. None (the default): the order of the dataset.
        window: Number of consecutive samples that "best_fit" packs together. Default: 16,384, or an eighth of the
            shortest range with constant weights in a `Mixture` whose weights change.
        pad_token_id: ID of the token that fills the end of a sequence. Default: 0.

    Attributes:
        plan: Assignment of samples to sequences in the current epoch.
        dataset: Dataset of the samples.
        window: Number of consecutive samples that "best_fit" packs together.
        orders_samples: Whether the dataset defines an order of samples, as a `Mixture` does, which a DataLoader with
            `shuffle=True` would lose.

    Raises:
        ConfigError: If an argument is not allowed, the number of lengths is not that of the samples, or `seed` would
            shuffle a `Mixture` whose weights change.
        DataError: If the dataset has no length, all samples are empty, or a sample is too long and
            `long_samples="error"`.

    Example::

        packed = PackedDataset(samples, sequence_length=2048)
        loader = DataLoader(packed, batch_size=2, shuffle=True, collate_fn=PackingCollator())
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    def __init__(
        self,
        dataset: Any,
        sequence_length: int,
        *,
        lengths: Lengths | Callable[[], Lengths] | None = None,
        strategy: str = "best_fit",
        long_samples: str = "error",
        seed: int | None = None,
        window: int | None = None,
        pad_token_id: int = 0,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise DataError(
                f"PackedDataset got a {type(dataset).__name__}, which has no length; packing plans all sequences from the lengths of "
                "the samples, so give a map-style dataset"
            )
        self.dataset = dataset
        self.sequence_length = sequence_length
        self.strategy = strategy
        self.long_samples = long_samples
        self.seed = seed
        starts = [weight_range.start for weight_range in getattr(dataset, "weight_ranges", ())]
        if seed is not None and len(starts) > 1:
            raise ConfigError(
                f"seed={seed} shuffles the samples of a {type(dataset).__name__} whose weights change, so the changes would be lost; "
                "leave seed= out, because the Mixture shuffles its sources"
            )
        self.window = choose_window(starts, len(dataset)) if window is None else window
        self.orders_samples = bool(getattr(dataset, "orders_samples", False))
        self.pad_token_id = pad_token_id
        self._measure_epoch: Callable[[], Lengths] | None = None  # None if lengths are equal in all epochs
        if callable(lengths):
            self._measure_epoch = lengths
        elif lengths is None and self.orders_samples:
            self._measure_epoch = OrderedLengths(dataset)
        # Persistent workers keep their copy of the dataset, so only shared memory shows them a new epoch.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._planned_epoch = 0
        if self._measure_epoch is not None:
            lengths = self._measure_epoch()
        elif lengths is None:
            lengths = measure_lengths(dataset)
        assert not callable(lengths)
        self.plan = self._make_plan(lengths)
        if self.plan.num_cut_tokens:
            log.info("packing truncates samples: %d tokens are left out", self.plan.num_cut_tokens)

    def _make_plan(self, lengths: Lengths) -> PackingPlan:
        """Store the lengths of the samples, and return the plan that assigns samples to sequences.

        Raises:
            ConfigError: If there is not one length for each sample.
        """
        self._lengths = numpy.asarray(lengths)
        if len(self._lengths) != len(self.dataset):
            raise ConfigError(
                f"lengths has {len(self._lengths)} entries for {len(self.dataset)} samples; give one for each"
            )
        return make_packing_plan(
            self._lengths,
            self.sequence_length,
            strategy=self.strategy,
            long_samples=self.long_samples,
            seed=self.seed,
            window=self.window,
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the underlying dataset, if it has the method `set_epoch`.

        The sequences are planned again if `lengths` is a function. If it was not given, and the dataset reorders its
        samples in each epoch, they are planned again when the epoch changes.
        """
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)
        self._epoch.fill_(epoch)
        # A function of the user may return other lengths at each call, even for the same epoch.
        is_planned = epoch == self._planned_epoch and isinstance(self._measure_epoch, OrderedLengths)
        if self._measure_epoch is not None and not is_planned:
            self.plan = self._make_plan(self._measure_epoch())
            self._planned_epoch = epoch

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sequence as a dict of tensors of shape (sequence_length,), and its documents' sources, if any.

        Raises:
            IndexError: If the index is out of range. Negative indices count from the end.
            DataError: If a sample does not fit its planned length or is padded, or the samples of the sequence have
                different entries.
        """
        if self._measure_epoch is not None and self._planned_epoch != int(self._epoch):
            self.set_epoch(int(self._epoch))  # a persistent worker learns of the new epoch only here
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        pieces = self.plan.list_pieces(index % len(self))
        documents, sources = [], []
        for piece in pieces:
            entries, source = self._read_document(piece)
            documents.append(entries)
            sources.append(source)
        sequence: dict[str, Any] = {
            name: self._join_documents(name, [document[name] for document in documents])
            for name in _get_entry_names(documents)
        }
        sizes = [piece.stop - piece.start for piece in pieces]
        sizes.append(self.sequence_length - sum(sizes))
        positions = numpy.concatenate([numpy.arange(size) for size in sizes])
        sequence[POSITIONS] = torch.from_numpy(positions)
        if any(source is not None for source in sources):
            sequence[SOURCE_KEY] = sources
        return sequence

    def _read_document(self, piece: SamplePiece) -> tuple[dict[str, Array], Any]:
        """Return the entries of a document by name, and the `source` entry of its sample (None if it has none).

        Raises:
            DataError: If the sample has no `input_ids`, is padded, or does not have the planned number of tokens. Also
                if its tokens or labels are not whole numbers, their numbers differ, or it has its own numbering of
                positions.
        """
        sample = self.dataset[piece.sample]
        if not isinstance(sample, Mapping):
            sample = {TOKENS: sample}
        if TOKENS not in sample:
            raise DataError(f"sample {piece.sample} has no {TOKENS!r}, only {', '.join(map(str, sample))}")
        tokens = numpy.asarray(sample[TOKENS])
        if tokens.ndim != 1 or len(tokens) != self._lengths[piece.sample]:
            raise DataError(
                f"sample {piece.sample} has tokens of the shape {tokens.shape}, but its length was given as "
                f"{self._lengths[piece.sample]}; lengths must be those of the samples' {TOKENS!r}"
            )
        if tokens.dtype.kind not in "iu":
            raise DataError(f"sample {piece.sample} has tokens of the type {tokens.dtype}; give whole numbers")
        _check_unpadded(sample, piece.sample, len(tokens))
        chosen = slice(piece.start, piece.stop)
        entries = {TOKENS: tokens[chosen].astype(numpy.int64)}
        labels = numpy.asarray(sample.get(LABELS, tokens))
        if labels.shape != tokens.shape or labels.dtype.kind not in "iub":
            raise DataError(
                f"sample {piece.sample} has {len(tokens)} tokens, but labels of the shape {labels.shape} and the type "
                f"{labels.dtype}; give one whole number for each token"
            )
        entries[LABELS] = labels[chosen].astype(numpy.int64)
        entries[LABELS][0] = IGNORE_INDEX  # otherwise the last token of the previous document would predict this one
        for name in sample.keys() - _PACKED_ENTRIES:
            values = _convert_to_numbers(sample[name])
            if values is not None and len(values) == len(tokens):
                is_label = name in LABEL_NAMES and values.dtype.kind in "iu"
                entries[name] = values[chosen].astype(numpy.int64) if is_label else values[chosen]
        return entries, sample.get(SOURCE_KEY)

    def _join_documents(self, name: str, parts: Sequence[Array]) -> torch.Tensor:
        """Concatenate the values of one entry in all documents, and pad them to `sequence_length`."""
        padding = 0
        if name == TOKENS:
            padding = self.pad_token_id
        elif name in LABEL_NAMES:
            padding = IGNORE_INDEX
        joined = numpy.full((self.sequence_length,), padding, dtype=numpy.result_type(*parts))
        numpy.concatenate(parts, out=joined[: sum(map(len, parts))])
        return torch.from_numpy(joined)


class OrderedLengths:
    """Callable that returns the number of tokens in each sample, for a dataset that reorders its samples in each epoch.

    The lengths are in the current epoch's order.

    Args:
        dataset: A `Mixture`, whose sources are measured only once, or another dataset, which is measured at each call.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._source_lengths: list[Array] | None = None

    def __call__(self) -> Array:
        """Return the number of tokens in each sample in the current epoch."""
        dataset = self._dataset
        if not isinstance(dataset, Mixture):
            return measure_lengths(dataset)
        if self._source_lengths is None:
            self._source_lengths = [measure_lengths(source) for source in dataset.sources]
        source_lengths = self._source_lengths
        locations = map(dataset.find_sample, range(len(dataset)))
        lengths = (source_lengths[source][index] for source, index in locations)
        return numpy.fromiter(lengths, numpy.int64, len(dataset))


def measure_lengths(dataset: Any) -> Array:
    """Return the number of tokens in each sample, as an int64 array.

    Each sample is read once, except in Hugging Face datasets, whose Arrow tables give the lengths directly, and in datasets
    with a method `measure_lengths`, such as `ChatDataset`.

    Raises:
        DataError: If a sample has no `input_ids`.
    """
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and TOKENS in columns and hasattr(dataset, "with_format"):
        return _measure_arrow_table(dataset.select_columns([TOKENS]).with_format("arrow"))
    if callable(getattr(dataset, "measure_lengths", None)):
        return numpy.asarray(dataset.measure_lengths(), numpy.int64)
    log.info("packing reads all %d samples once to measure them; pass lengths= to avoid it", len(dataset))
    return numpy.fromiter((_count_tokens(dataset[index], index) for index in range(len(dataset))), numpy.int64)


def _measure_arrow_table(table: Any) -> Array:
    """Return the number of tokens in each row of an arrow table, without decoding the tokens."""
    import pyarrow.compute

    parts = [
        pyarrow.compute.list_value_length(rows[TOKENS]).to_numpy(zero_copy_only=False)
        for rows in table.iter(batch_size=_ROWS_PER_READ)
    ]
    return numpy.concatenate(parts or [numpy.zeros(0)]).astype(numpy.int64)


def _count_tokens(sample: Any, index: int) -> int:
    if isinstance(sample, Mapping) and TOKENS not in sample:
        raise DataError(f"sample {index} has no {TOKENS!r}, only {', '.join(map(str, sample))}")
    return len(sample[TOKENS] if isinstance(sample, Mapping) else sample)


def _get_entry_names(documents: Sequence[Mapping[str, Array]]) -> Iterable[str]:
    """Return the names of the documents' entries.

    Raises:
        DataError: If the documents have different entries.
    """
    names = documents[0].keys()
    for other in documents[1:]:
        if different := names ^ other.keys():
            raise DataError(
                f"samples of one sequence have different entries: {', '.join(sorted(different))} is not in all of them; give all "
                "samples the same entries with one number per token"
            )
    return names


def _check_unpadded(sample: Mapping[str, Any], index: int, num_tokens: int) -> None:
    """Raise `DataError` if a sample is padded, or has position IDs other than 0, 1, 2 ..., which packing would lose.

    Args:
        sample: Sample to check.
        index: Index of the sample, for messages.
        num_tokens: Number of tokens in the sample.
    """
    if sample.get(MASK) is not None and not numpy.all(numpy.asarray(sample[MASK]) == 1):
        raise DataError(
            f"sample {index} is padded: its {MASK!r} has zeros; give samples without padding, because packing needs none"
        )
    if sample.get(POSITIONS) is not None and not numpy.array_equal(sample[POSITIONS], numpy.arange(num_tokens)):
        raise DataError(
            f"sample {index} has {POSITIONS!r} other than 0, 1, 2 ...; packing numbers the tokens of each document itself"
        )


def _convert_to_numbers(value: Any) -> Array | None:
    """Convert a one-dimensional list, tuple, array or tensor of numbers to an array.

    Return None for anything else, and for an empty sequence.
    """
    if not isinstance(value, list | tuple | numpy.ndarray | torch.Tensor) or not len(value):
        return None
    if isinstance(value, list | tuple) and not isinstance(value[0], int | float):
        return None
    numbers = numpy.asarray(value)
    return numbers if numbers.ndim == 1 and numbers.dtype.kind in "biuf" else None


def choose_window(starts: Sequence[int], num_samples: int) -> int:
    """Return the number of consecutive samples that are packed together: at most `DEFAULT_WINDOW`.

    It is an eighth of the shortest range of constant weights if that is less. Then packing moves samples only a little
    across a change of a mixture's weights.

    Args:
        starts: Index of the first sample of each range in which the weights of a mixture are constant. Empty for other
            datasets.
        num_samples: Number of samples in the dataset.
    """
    if len(starts) < 2:
        return DEFAULT_WINDOW
    bounds = [*(start for start in starts if start < num_samples), num_samples]
    shortest_range = min(numpy.diff(bounds).tolist())
    return int(min(DEFAULT_WINDOW, max(1, shortest_range // 8)))
