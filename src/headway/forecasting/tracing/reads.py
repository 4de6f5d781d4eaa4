"""Answer reads of values by optimizers that a trace runs on tensors without values.

Some of torch's optimizers call `.item()` on step counts and norms. These values only scale an update, so they do not
change the memory that the update takes. Two kinds of reads are not answered, because they might choose what an update
does: reads by an optimizer of an unknown class, and reads of anything but floating-point numbers. LBFGS, for example,
reads Boolean tensors to decide whether it has converged, and its first update creates no state if it has.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from headway.forecasting._torch import FakeTensor, TorchDispatchMode
from headway.forecasting.tracing.tensors import iterate_plain_tensors
from headway.layouts.whole_updates.kinds import find_kind_of_class

_ANSWER = 1000.0
"""Value that every read of a floating-point number returns.

As a step count, it is large enough for RAdam to rectify its update, as in all updates after the first few.
"""


class ReadAnswers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode in which every read of a floating-point number from a fake tensor returns the same number."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (
            func is torch.ops.aten._local_scalar_dense.default
            and args[0].dtype.is_floating_point
            and any(isinstance(part, FakeTensor) for part in iterate_plain_tensors(args[0]))
        ):
            return _ANSWER
        # No NotImplemented for DTensors, because the modes below would then not see the call.
        return func(*args, **(kwargs or {}))


def answer_reads(optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    """Return a context in which an optimizer of a known class can read floating-point numbers from fake tensors."""
    is_known = find_kind_of_class(type(optimizer)) is not None
    return ReadAnswers() if is_known else nullcontext()  # type: ignore[no-untyped-call]
