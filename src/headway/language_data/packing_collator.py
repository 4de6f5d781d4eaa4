"""Collate packed sequences into batches, with document boundaries in the form that a model's attention expects."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headway.errors import ConfigError, DataError
from headway.language_data.document_attention import find_documents, make_document_mask, make_varlen_arguments
from headway.language_data.packing import MASK, POSITIONS, TOKENS
from headway.language_data.source_index import SOURCE_KEY

ATTENTION_FORMS = ("position_ids", "varlen", "mask")
"""Forms in which document boundaries can be passed to a model (see `PackingCollator`)."""
NO_SOURCE = -1
"""Source index of padding tokens, which belong to no source."""


class PackingCollator:
    """Collate function that makes a batch from sequences of a `PackedDataset`, for a DataLoader's `collate_fn`.

    Args:
        attention: Form in which document boundaries are passed to the model.

            - "position_ids" (the default): only positions, from which transformers' sdpa, eager and flex attention
              derive their masks.
            - "varlen": all sequences are concatenated in one row, with the arguments of transformers' flash attention,
              such as `cu_seq_lens_q` and `max_length_q`. In a batch of several rows, flash attention would ignore the
              boundaries.
            - "mask": a boolean `attention_mask` of shape (rows, 1, tokens, tokens) for models that pass it to
              `scaled_dot_product_attention`.
        is_causal: Whether tokens attend only to earlier tokens. Used only with "mask". Default: True.
        check_model: Whether `prepare` checks models with `check_document_boundaries` if it also prepares a loader with
            this collator. Pass False for a model that finds the boundaries in another way, such as by end tokens.
            Default: True.

    Raises:
        ConfigError: If `attention` is not an allowed value.

    Example::

        loader = DataLoader(packed, batch_size=4, shuffle=True, collate_fn=PackingCollator("position_ids"))
    """

    def __init__(self, attention: str = "position_ids", is_causal: bool = True, check_model: bool = True) -> None:
        if attention not in ATTENTION_FORMS:
            raise ConfigError(f"PackingCollator(attention={attention!r}); allowed: {', '.join(ATTENTION_FORMS)}")
        self.attention = attention
        self.is_causal = is_causal
        self.check_model = check_model

    def __call__(self, sequences: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch as a dict of CPU tensors. Tensors with one value per token have shape (rows, tokens).

        The entries are `input_ids`, `labels`, `position_ids` and other entries of the sequences.

        With `attention="varlen"`, they have shape (1, rows * tokens). If the samples have an integer `source`
        (`Mixture` adds it), the batch contains the source of each token, which is -1 for padding. Sources that are not
        integers become one list per row, with one entry per document.

        Raises:
            DataError: If the sequences have no `position_ids` and `input_ids`, so are not from a `PackedDataset`. Also if
                they have different entries.
        """
        first = sequences[0]
        if not isinstance(first, Mapping) or POSITIONS not in first or TOKENS not in first:
            raise DataError(
                "PackingCollator got samples without position_ids; it collates sequences of a PackedDataset"
            )
        for other in sequences[1:]:
            if different := (first.keys() ^ other.keys()) - {SOURCE_KEY}:
                raise DataError(
                    f"sequences of one batch have different entries: {', '.join(sorted(different))} is not in all of them; give all "
                    "samples the same entries with one number per token"
                )
        batch: dict[str, Any] = {
            name: torch.stack([torch.as_tensor(sequence[name]) for sequence in sequences])
            for name in first
            if name != SOURCE_KEY
        }
        sources = make_token_sources(sequences)
        if sources is not None:
            batch[SOURCE_KEY] = sources
        if self.attention == "mask":
            batch[MASK] = make_document_mask(batch[POSITIONS], self.is_causal)
        elif self.attention == "varlen":
            arguments = make_varlen_arguments(batch[POSITIONS])
            batch = {name: values.reshape(1, -1) for name, values in batch.items()}
            batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = arguments.cu_seqlens
            batch["max_length_q"] = batch["max_length_k"] = arguments.max_length
        if sources is None and any(SOURCE_KEY in sequence for sequence in sequences):
            batch[SOURCE_KEY] = [sequence.get(SOURCE_KEY) for sequence in sequences]
        return batch


def make_token_sources(sequences: Sequence[Mapping[str, Any]]) -> torch.Tensor | None:
    """Return the source index of each token as a tensor of shape (rows, tokens). Padding has the index -1.

    Return None if any sequence has no sources, or sources that are not integers. A sequence's `source` entry lists the
    source of each document.

    Args:
        sequences: Sequences of a `PackedDataset`.
    """
    rows = []
    for sequence in sequences:
        sources = sequence.get(SOURCE_KEY)
        if not isinstance(sources, list) or not all(isinstance(source, int) for source in sources):
            return None
        documents = find_documents(torch.as_tensor(sequence[POSITIONS]))
        # Padding is the document after the last one of the sequence.
        rows.append(torch.tensor([*sources, NO_SOURCE])[documents])
    return torch.stack(rows)


def choose_attention(model: torch.nn.Module) -> str:
    """Return the `attention` argument of `PackingCollator` for a model.

    The argument is "varlen" if the model uses flash attention, else "position_ids".
    """
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return "varlen" if "flash" in str(implementation) else "position_ids"
