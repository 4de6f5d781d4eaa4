"""Losses of a mixture's sources in the Trainer: mean loss of each source dataset since the last log entry.

The losses are the cross entropies of the model's logits. The model's own loss is one number, so it cannot be divided
by source.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F

from headway.accelerator import Accelerator
from headway.core.runtime.collectives.tree import Tree
from headway.language_data.mixture import Mixture
from headway.language_data.packing import PackedDataset
from headway.language_data.packing_collator import NO_SOURCE, make_token_sources
from headway.language_data.source_index import SOURCE_KEY
from headway.language_data.source_losses import sum_by_source
from headway.log import get_logger
from headway.trainer.collation import IGNORED, SOURCES
from headway.trainer.data import Batch

log = get_logger(__name__)

_NOT_LOGGED = (
    "the loss of each source of the mixture is not logged: it is the cross entropy of `logits` and `labels`, and this training %s. "
    "Mixture(adds_source=False) asks for none"
)


def find_mixture(dataset: object) -> Mixture | None:
    """Return the training data's mixture: the dataset itself, or the dataset that a `PackedDataset` packs.

    Return None if there is no `Mixture`, or if the mixture does not add `source` to its samples.

    Args:
        dataset: Training data.
    """
    while isinstance(dataset, PackedDataset):
        dataset = dataset.dataset
    return dataset if isinstance(dataset, Mixture) and dataset.adds_source is not False else None


def collate_sources(rows: Sequence[Any]) -> torch.Tensor | None:
    """Return the index of the source dataset of each row, as a tensor of shape [rows].

    For packed rows, return the index for each token, with shape [rows, tokens]. Padding tokens have the index -1.
    Return None if a row has no source, or sources are not integers.

    Args:
        rows: Rows of a mixture, or sequences into which such rows are packed.
    """
    sources = [row.get(SOURCE_KEY) if isinstance(row, Mapping) else None for row in rows]
    if all(isinstance(source, int) for source in sources):
        return torch.tensor(sources)
    return make_token_sources(rows) if all(isinstance(source, list) for source in sources) else None


def split_sources(batch: Batch) -> tuple[Batch, torch.Tensor | None]:
    """Remove the sources from a batch. Return the remaining batch, and the sources or None if the batch has none.

    The given batch is not modified, because the sources are needed again if the batch is repeated after an
    out-of-memory error.
    """
    if isinstance(batch, Mapping) and SOURCES in batch:
        remaining = copy(batch)
        return remaining, remaining.pop(SOURCES)  # type: ignore[attr-defined]
    return batch, None


class SourceBook:
    """Recorder of the losses of a mixture's sources. `pop_means` returns their means for the log.

    Args:
        accelerator: Accelerator whose ranks train.
        names: Names of the sources.
        is_shifted: Whether the model predicts each label from the tokens before it.
        smoothing: Label smoothing, the fraction of the target that is spread over all classes. Default: 0.0.
    """

    def __init__(
        self, accelerator: Accelerator, names: Sequence[str], is_shifted: bool, smoothing: float = 0.0
    ) -> None:
        self.names = tuple(names)
        self._accelerator = accelerator
        self._is_shifted = is_shifted
        self._smoothing = smoothing
        # Tensors of shape [2, number of sources] contain the sums and the counts of the losses.
        self._sources: torch.Tensor | None = None  # of the current part of the batch; None after `add_outputs`
        self._piece_sums: torch.Tensor | None = None  # of the current part
        self._pieces: list[tuple[torch.Tensor | None, int]] = []  # sums and number of rows of the batch's parts
        self._sums = torch.zeros(2, len(self.names), dtype=torch.float64)  # since the last log entry

    def begin_piece(self, sources: torch.Tensor | None) -> None:
        """Start recording a batch, or a part of it if the batch was split because memory ran out.

        Args:
            sources: Sources of the part's rows or tokens, from `collate_sources`. None: no losses are recorded.
        """
        self._sources = sources
        self._piece_sums = None

    def add_outputs(self, labels: Tree, outputs: Tree, batch: Batch) -> None:
        """Compute the losses by source from the model's outputs for the part of the batch that `begin_piece` started.

        Do nothing if the part has no sources. If the outputs have no `logits`, or the labels are not one class per row
        or token, only warn once.

        Args:
            labels: Labels of the part.
            outputs: Outputs of the model.
            batch: Batch of the labels. If it contains `shift_labels`, they are used in place of `labels`.
        """
        sources, self._sources = self._sources, None
        if sources is None:
            return
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
        is_shifted = self._is_shifted
        if isinstance(batch, Mapping) and isinstance(batch.get("shift_labels"), torch.Tensor):
            labels, is_shifted = batch["shift_labels"], False
        if not isinstance(logits, torch.Tensor) or not isinstance(labels, torch.Tensor):
            log.warning_once(_NOT_LOGGED, "has no logits or no labels")
            return
        logits = logits.detach()
        if is_shifted and labels.ndim > 1:
            logits, labels = logits[:, :-1], labels[:, 1:]
            sources = sources[:, 1:] if sources.ndim > 1 else sources
        fits = logits.shape[:-1] == labels.shape and sources.shape in (labels.shape, labels.shape[:1])
        if labels.is_floating_point() or not fits:
            log.warning_once(_NOT_LOGGED, "has other labels than one class per row or token")
            return
        self._piece_sums = self._sum_rows(logits, labels, sources)

    def _sum_rows(self, logits: torch.Tensor, labels: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """Return the sum and the count of the losses of each source, as a tensor of shape [2, number of sources].

        Args:
            logits: Logits of shape [rows, ..., classes].
            labels: Class of each row or token, or the ignored label (-100).
            sources: Index of the source of each row or token.
        """
        # Row by row, because a copy of all logits in float32 could exceed the peak of the step.
        losses = [
            F.cross_entropy(
                row_logits.reshape(-1, row_logits.shape[-1]).float(),
                row_labels.reshape(-1),
                ignore_index=IGNORED,
                reduction="none",
                label_smoothing=self._smoothing,
            ).view(row_labels.shape)
            for row_logits, row_labels in zip(logits, labels)
        ]
        return sum_by_source(torch.stack(losses), sources, labels != IGNORED, len(self.names))

    def end_piece(self, num_rows: int) -> None:
        """Record the losses of the part of the batch that `begin_piece` started.

        If the part has sources but `add_outputs` was not called, warn once that the losses are not logged.

        Args:
            num_rows: Number of rows in the part.
        """
        if self._sources is not None:
            log.warning_once(_NOT_LOGGED, "computes its loss otherwise (compute_loss or training_step is overridden)")
        self._pieces.append((self._piece_sums, num_rows))
        self._sources = self._piece_sums = None

    def end_batch(self, num_rows: int) -> None:
        """Record that the batch is complete.

        If memory ran out, some rows were run again, so they were recorded twice. Only the last recorded parts are kept,
        as many as are needed for `num_rows` rows.

        Args:
            num_rows: Number of rows in the batch.
        """
        num_counted = 0
        for piece_sums, piece_rows in reversed(self._pieces):
            if piece_sums is not None:
                self._sums = self._sums.to(piece_sums.device) + piece_sums
            num_counted += piece_rows
            if num_counted >= num_rows:
                break
        self._pieces.clear()

    def _reduce_losses(self) -> list[list[float]]:
        """Return two lists with one value per source, over all ranks: the sums and the counts of the losses."""
        sums = self._sums.flatten().tolist()
        if self._accelerator.num_processes > 1:
            sums = self._accelerator.collectives.reduce_numbers(sums)
        return [sums[: len(self.names)], sums[len(self.names) :]]

    def pop_means(self) -> dict[str, float]:
        """Return each source's mean loss since the last call, under names such as "loss/web", and reset the sums.

        Every rank must call it. Sources without losses are left out.
        """
        sums, counts = self._reduce_losses()
        self._sums = torch.zeros_like(self._sums)
        return {f"loss/{name}": total / count for name, total, count in zip(self.names, sums, counts) if count}

    def state_dict(self) -> dict[str, Any]:
        """Return the sum and the count of each source's losses since the last call of `pop_means`, over all ranks.

        Every rank must call it.
        """
        return {"names": list(self.names), "sums": self._reduce_losses()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums and counts of the losses that had not been logged when the state was saved.

        They are discarded if the names of the sources have changed.
        """
        sums = torch.tensor(state["sums"], dtype=torch.float64)
        # The saved sums are over all ranks, so only one rank continues from them.
        continues_here = list(self.names) == state["names"] and self._accelerator.is_main_process
        self._sums = sums if continues_here else torch.zeros_like(self._sums)


def mask_padding(batch: Batch, num_valid: int | None) -> Batch:
    """Return a batch in which padding rows, which were added to complete the batch, have the source -1.

    The given batch is not modified. It is returned itself if it has no sources or no padding rows.

    Args:
        batch: Batch with the sources of its rows or tokens, or without.
        num_valid: Number of rows before the padding. None: all.
    """
    if num_valid is None or not isinstance(batch, Mapping) or SOURCES not in batch:
        return batch
    sources = batch[SOURCES]
    if num_valid >= len(sources):
        return batch
    rows = torch.arange(len(sources), device=sources.device).reshape(-1, *[1] * (sources.ndim - 1))
    masked: Any = copy(batch)
    masked[SOURCES] = torch.where(rows < num_valid, sources, NO_SOURCE)
    return masked
