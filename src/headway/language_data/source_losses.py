"""Mean loss per source of a mixture, over all ranks and all batches since the last report."""

from collections.abc import Sequence

import torch

from headway.accelerator import Accelerator
from headway.errors import ConfigError, DataError


class SourceLosses:
    """Recorder that sums losses by source. `compute` returns the means, which can be passed to `accelerator.log`.

    `add` needs no communication and does not wait for the device. The mean of a source is over all of its rows, or all
    of its tokens, of all ranks. Create it on every rank.

    Args:
        accelerator: Accelerator whose ranks train.
        names: Names of the sources, by their index: `mixture.names`.
        prefix: Text before the names in the result. Default: "loss/".

    Raises:
        ConfigError: If `names` is a single string or empty.

    Example::

        losses = SourceLosses(accelerator, mixture.names)
        for batch in loader:
            row_losses = loss_fn(model(batch["inputs"]), batch["labels"], reduction="none")  # shape [rows]
            losses.add(row_losses, batch["source"])
            accelerator.backward(row_losses.mean())
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.num_updates % 10 == 0:
                accelerator.log(losses.compute())
    """

    def __init__(self, accelerator: Accelerator, names: Sequence[str], prefix: str = "loss/") -> None:
        if isinstance(names, str) or not names:
            raise ConfigError(f"SourceLosses got the names {names!r}; give those of the sources, such as mixture.names")
        self._accelerator = accelerator
        self.names = tuple(names)
        self.prefix = prefix
        # Row 0 holds the sum of each source's losses, row 1 their number.
        self._sums_and_counts = torch.zeros(2, len(self.names), dtype=torch.float64)

    def add(self, losses: torch.Tensor, sources: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Add the losses of a batch to the sums. The losses are detached; no rank waits.

        Args:
            losses: Loss of each row, of shape [rows], or of each token, of shape [rows, tokens].
            sources: Source index of each row, of shape [rows], or of each token, of shape [rows, tokens], as in packed
                batches. Rows or tokens with a negative index, such as padding, are not counted.
            mask: Boolean tensor of shape [rows] or of the shape of `losses`, which is True for the rows or tokens to
                count. Default: None, all are counted.

        Raises:
            DataError: If the shapes of the arguments do not match.
        """
        losses = losses.detach()
        if losses.ndim == 0 or sources.shape not in (losses.shape, losses.shape[:1]):
            raise DataError(
                f"losses of shape {list(losses.shape)} and sources of shape {list(sources.shape)}; give one source per row or token, "
                "and one loss per row or token (reduction='none')"
            )
        if mask is not None and mask.shape not in (losses.shape, losses.shape[:1]):
            raise DataError(
                f"a mask of shape {list(mask.shape)} for losses of shape {list(losses.shape)}; give one value per row or per loss"
            )
        if self._sums_and_counts.device != losses.device:
            self._sums_and_counts = self._sums_and_counts.to(losses.device)
        self._sums_and_counts += sum_by_source(losses, sources, mask, len(self.names))

    def compute(self) -> dict[str, float]:
        """Return the mean loss of each source over all ranks since the last call, and reset the sums.

        All ranks must call this method. A source without losses since the last call is left out.

        Returns:
            Mean losses as floats, equal on all ranks. The keys are the source names with the prefix.
        """
        totals = self._accelerator.reduce(self._sums_and_counts, reduction="sum")
        self._sums_and_counts = torch.zeros_like(self._sums_and_counts)
        sums, counts = totals.tolist()
        return {f"{self.prefix}{name}": loss / count for name, loss, count in zip(self.names, sums, counts) if count}


def sum_by_source(
    losses: torch.Tensor, sources: torch.Tensor, mask: torch.Tensor | None, num_sources: int
) -> torch.Tensor:
    """Return the sum and the number of each source's losses, as a float64 tensor of shape [2, num_sources].

    Args:
        losses: Loss of each row or token.
        sources: Index of each loss's source, of the shape of `losses` or [rows]. Losses with a negative index are not
            counted.
        mask: Boolean tensor of the shape of `losses` or [rows], which is True for the losses to count. None: all are
            counted.
        num_sources: Number of sources.
    """
    sources = _expand_rows(sources.to(losses.device).long(), losses)
    is_counted = sources >= 0
    if mask is not None:
        is_counted = is_counted & _expand_rows(mask.to(losses.device).bool(), losses)
    # A loss that is not counted can be NaN, so replace it instead of multiplying it by 0.
    counted_losses = torch.where(is_counted, losses, 0)
    sums_and_counts = torch.stack([counted_losses.double().flatten(), is_counted.double().flatten()])
    totals = sums_and_counts.new_zeros(2, num_sources)
    return totals.index_add_(1, sources.clamp(min=0).flatten(), sums_and_counts)


def _expand_rows(values: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    """Return `values`, which has one value per row or per loss, in the shape of `losses`."""
    return values.reshape(*values.shape, *[1] * (losses.ndim - values.ndim)).expand_as(losses)
