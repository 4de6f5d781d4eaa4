"""One number of a sharded tensor: `item()` of a sum over parts is the whole sum, as it is of a plain tensor.

torch's DTensor takes this rank's term for it, so that a norm summed up by hand (`p.grad.pow(2).sum().item()`) is another wrong
number on each rank. What DTensors do in an operation stands in their dispatcher's table, which is open to others: torch's own
context parallelism comes and goes there.
"""

from typing import Any

import torch

from headway.common.optional import Later
from headway.runtime import process
from headway.runtime.conditional_calls import RankConditionalCallCheck
from headway.runtime.process import ProcessRuntime

dtensor = Later("torch.distributed.tensor")

_ITEM = torch.ops.aten._local_scalar_dense.default


class WholeScalars:
    """The process's entry in that table, until its runtime ends, to which this belongs."""

    def __init__(self) -> None:
        self._calls: RankConditionalCallCheck | None = None
        self._table: dict[Any, Any] = dtensor.DTensor._op_dispatcher._custom_op_handlers
        self._entry = self._item

    def enter(self, runtime: ProcessRuntime) -> None:
        """From now on; where it is entered already, nothing changes."""
        if self._calls is None:
            self._calls = RankConditionalCallCheck(runtime, "sharded")
            self._table.setdefault(_ITEM, self._entry)
            process.at_end(self.release)

    def _item(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Where ranks hold terms or parts of it, an exchange among all ranks of its mesh.

        Raises:
            UnsupportedError: not all of them come here.
        """
        number = args[0]
        if all(placed.is_replicate() for placed in number.placements):
            return number.to_local().item()
        if self._calls is not None:
            self._calls.check("item() of a number that is summed over parts is called", "the number")
        return number.full_tensor().item()

    def release(self) -> None:
        """Leave torch as it was."""
        if self._table.get(_ITEM) is self._entry:
            del self._table[_ITEM]
