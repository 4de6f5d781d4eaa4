"""`PreferenceCollator`: pad preference pairs to a batch whose rows are pairs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headway.errors import ConfigError, DataError
from headway.language_data.chat.preferences import SIDES
from headway.language_data.packing import IGNORE_INDEX, LABELS, MASK, TOKENS


class PreferenceCollator:
    """Collate function that makes a batch from samples of a `PreferenceTokenizer`, for a DataLoader's `collate_fn`.

    `input_ids`, `attention_mask` and `labels` have the shape [pairs, 2, tokens]: index 0 of the second dimension is the
    chosen conversation, and index 1 the rejected one. A row of the batch is therefore a whole pair, so that a batch can be
    split by rows. `batch["input_ids"].flatten(0, 1)` has the rows that a model expects. Conversations are padded at the end.

    Other entries of the samples, such as the `source` of a `Mixture`, become tensors with one value per pair.

    Args:
        pad_token_id: Token ID of padding. A model does not attend to padding, so any token ID has the same effect.
            Default: 0.
        pad_to_multiple_of: Number that the padded length is a multiple of. Default: 1.

    Raises:
        ConfigError: If an argument is not a whole number, or too small.
    """

    def __init__(self, pad_token_id: int = 0, pad_to_multiple_of: int = 1) -> None:
        for name, value, smallest in (("pad_token_id", pad_token_id, 0), ("pad_to_multiple_of", pad_to_multiple_of, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
                raise ConfigError(f"PreferenceCollator({name}={value!r}); give a whole number, {smallest} or more")
        self.pad_token_id = pad_token_id
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the batch as a dict of CPU tensors.

        Raises:
            DataError: If the samples are not from a `PreferenceTokenizer`, have different entries, or another entry is not
                numeric.
        """
        entries = samples[0].keys() if isinstance(samples[0], Mapping) else set()
        columns = {name: [f"{side}_{name}" for side in SIDES] for name in (TOKENS, LABELS)}
        own_entries = {column for pair in columns.values() for column in pair}
        if not own_entries <= entries:
            raise DataError(
                "PreferenceCollator got samples without chosen_input_ids, chosen_labels, rejected_input_ids and rejected_labels; it "
                "collates samples of a PreferenceTokenizer"
            )
        if any(sample.keys() != entries for sample in samples):
            raise DataError("the pairs of one batch have different entries; give all samples the same entries")
        # A list of 2 * pairs sequences, in which the two of a pair are neighbors.
        tokens, labels = (
            [list(sample[column]) for sample in samples for column in columns[name]] for name in (TOKENS, LABELS)
        )
        longest = max(map(len, tokens))
        length = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        batch = {
            TOKENS: _stack_pairs(tokens, length, self.pad_token_id),
            MASK: _stack_pairs([[1] * len(each) for each in tokens], length, 0),
            LABELS: _stack_pairs(labels, length, IGNORE_INDEX),
        }
        for name in entries - own_entries:
            try:
                batch[name] = torch.as_tensor([sample[name] for sample in samples])
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"entry {name!r} of the pairs is not one number per pair, so it cannot be part of a batch ({error}); remove it "
                    "from the samples"
                ) from error
        return batch


def _stack_pairs(sequences: Sequence[list[int]], length: int, filler: int) -> torch.Tensor:
    """Return a tensor of shape [pairs, 2, length] of sequences that are filled up at the end."""
    rows = [sequence + [filler] * (length - len(sequence)) for sequence in sequences]
    return torch.tensor(rows).view(-1, len(SIDES), length)
