"""Warning if losses are weighted by rows although the labels contain padding, which row counts do not take into account."""

import torch

from headway.core.runtime.collectives.tree import Tree, list_tensors
from headway.core.runtime.readback import Readback
from headway.log import get_logger

log = get_logger(__name__)

_IGNORED_LABEL = -100
"""Label that torch's losses ignore by default."""
_MAX_CHECKS = 4
"""Number of micro-batches that are checked. Padding is usually found in the first one."""


class PaddingCheck:
    """Check whether the labels of the first few micro-batches contain padding. It warns once.

    The host does not wait for the device. On an accelerator, the warning therefore appears with a later micro-batch.
    """

    def __init__(self) -> None:
        self._num_checks = 0
        self._pending: Readback | None = None  # whether the last checked micro-batch contains padding

    def check(self, piece: Tree) -> None:
        """Look for padding in the tensors of a micro-batch, and warn if an earlier check has found it.

        Args:
            piece: Micro-batch. Its int64 tensors on the device of the first one count as labels.
        """
        if self._pending is None and self._num_checks < _MAX_CHECKS:
            self._num_checks += 1
            labels = [tensor for tensor in list_tensors(piece) if tensor.dtype == torch.int64]
            flags = [(each == _IGNORED_LABEL).any() for each in labels if each.device == labels[0].device]
            self._pending = Readback(torch.stack(flags).any()) if flags else None
        self.warn_if_found()

    def warn_if_found(self) -> None:
        """Warn if the last check has found padding. Do nothing if its result is not on the host yet."""
        pending = self._pending
        if pending is None or not pending.is_ready:
            return
        self._pending = None
        if pending.read():
            self._num_checks = _MAX_CHECKS
            log.warning_once(
                "labels of this batch contain -100, and its micro-batches are weighted by their rows: a mean over the other "
                "tokens needs weight=, the number of labels that count (docs/microbatching.md)"
            )
