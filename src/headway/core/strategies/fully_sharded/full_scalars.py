"""`FullScalars`, which makes `item()` of a sum over shards return the sum over all ranks, as for a plain tensor.

torch's DTensor returns only this rank's term. A norm computed by a script (`p.grad.pow(2).sum().item()`) would then be a
different wrong number on each rank. The handler is registered in DTensor's dispatcher table, which torch's own context
parallelism uses in this way, too.
"""

from typing import TYPE_CHECKING, Any

from headway.common.optional import LazyModule
from headway.core.runtime import process
from headway.core.runtime.control_plane.conditional_calls import RankConditionalCallCheck
from headway.core.runtime.process import ProcessRuntime
from headway.core.strategies._torch import local_scalar_dense

if TYPE_CHECKING:
    from torch.distributed import tensor as dtensor
else:
    dtensor = LazyModule("torch.distributed.tensor")

_ITEM = local_scalar_dense


class FullScalars:
    """Handler that makes `item()` of a DTensor return its full value, such as the sum of all ranks' terms.

    Each process has one handler. It stays registered in DTensor's dispatcher until the process runtime ends.
    """

    def __init__(self) -> None:
        self._call_check: RankConditionalCallCheck | None = None
        self._handlers: dict[Any, Any] = dtensor.DTensor._op_dispatcher._custom_op_handlers
        self._handler = self._compute_item  # kept, because each access to a bound method creates a new object

    def register_handler(self, runtime: ProcessRuntime) -> None:
        """Register the handler, unless it or another handler for `item()` is already registered."""
        if self._call_check is None:
            self._call_check = RankConditionalCallCheck(runtime, "sharded")
            self._handlers.setdefault(_ITEM, self._handler)
            process.release_at_end(self.release)

    def _compute_item(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value of a 0-d DTensor as a number. DTensor's dispatcher calls this for `item()`.

        If ranks hold terms or shards of the value, this is a collective over the DTensor's mesh.

        Args:
            operation: torch's operator. Unused.
            args: Tuple that contains the DTensor.
            kwargs: Keyword arguments of the operator. Empty.

        Raises:
            UnsupportedError: If not all ranks of the mesh call it.
        """
        number = args[0]
        if all(placement.is_replicate() for placement in number.placements):
            return number.to_local().item()
        if self._call_check is not None:
            self._call_check.check("item() of a number that is summed over parts is called", "the number")
        return number.full_tensor().item()

    def release(self) -> None:
        """Remove the handler from DTensor's dispatcher."""
        if self._handlers.get(_ITEM) is self._handler:
            del self._handlers[_ITEM]
