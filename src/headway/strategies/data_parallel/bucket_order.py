"""The order in which DDP's buckets hold gradients, which a resumed run takes up.

After the first backward DDP lays its buckets out anew, in the order in which gradients came. How a sum over three ranks or more is
rounded depends on where in a bucket a number lies, so a run that begins with DDP's first layout again differs in its last bits.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

_KEY = "rebuilt_per_bucket_param_indices"
_FEWEST = 3
"""Ranks of a sum that its order decides about."""


def order_of(engine: DistributedDataParallel) -> list[int]:
    """The numbers of the parameters as they lie in the buckets; none where that is not known, or all the same. All ranks call it."""
    if not _is_rebuilt(engine):
        return []
    engine.reducer._rebuild_buckets()  # after the first backward: what the next forward would do
    if _KEY not in _told(engine) and engine.logger is not None:
        engine.logger.set_runtime_stats_and_log()
    return [int(number) for number in re.findall(r"\d+", str(_told(engine).get(_KEY, "")))]


def take_order(engine: DistributedDataParallel, order: Sequence[int]) -> None:
    """Let the first layout be this one, by gradients of zero that come in that order; every rank calls it."""
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    if not _is_rebuilt(engine) or sorted(order) != list(range(len(trained))):
        return
    grads = [parameter.grad for parameter in trained]
    with _without_hooks(trained):
        engine.reducer.prepare_for_backward([])
        for number in order:
            trained[number].grad = None
            trained[number].backward(torch.zeros_like(trained[number]))
    for parameter, grad in zip(trained, grads):
        parameter.grad = grad


def _told(engine: DistributedDataParallel) -> dict[str, Any]:
    return engine._get_ddp_logging_data()  # type: ignore[no-untyped-call, no-any-return]


def _is_rebuilt(engine: DistributedDataParallel) -> bool:
    is_fixed = engine.find_unused_parameters or engine.static_graph
    return not is_fixed and engine.process_group.size() >= _FEWEST


@contextmanager
def _without_hooks(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """A block in which no hook of a script's own sees gradients come."""
    held = [
        (hooks, dict(hooks))
        for parameter in parameters
        for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        if hooks
    ]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in held:
            hooks.update(kept)
