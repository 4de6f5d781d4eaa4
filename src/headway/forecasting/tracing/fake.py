"""Tracing a step in which nothing is computed, and saying what stands in the way where that cannot be done."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from headway.common.callsite import users_line
from headway.errors import HeadwayError, MetaModelError, UnsupportedError
from headway.forecasting.device.devices import Device
from headway.forecasting.device.kernels import substituted
from headway.forecasting.tracing.compiled import may_compile, refuse_compiled, without_kernels
from headway.forecasting.tracing.repeats import RepeatProof, find_blocks, trace_repeated, with_third_update
from headway.forecasting.tracing.step import Batch, StepEngine, StepRecipe, run
from headway.forecasting.tracing.tensors import is_four_bit, pack, without_values
from headway.forecasting.tracing.trace import StorageTracker, Trace
from headway.forecasting.tracing.work import WorkCounter
from headway.offload.placement.meta_model import init_empty_weights

Spread = Callable[[nn.Module], AbstractContextManager[StepEngine]]
"""Spreads a model without values over ranks, for as long as its block lasts."""

_REASONS: dict[type[Any], str] = {
    fake_tensor.DataDependentOutputException: (
        "it reads a value of a tensor (.item(), .tolist(), `if tensor:`), and nothing is computed here"
    ),
    fake_tensor.DynamicOutputShapeException: (
        "the shape of its result depends on values (nonzero, unique, a mask of bools as index), and nothing is computed here"
    ),
    fake_tensor.UnsupportedOperatorException: (
        "it has no fake kernel, which says the shape of its result without computing it (torch.library.register_fake)"
    ),
}
"""Why an operation cannot be traced, by what torch raises for it."""


def trace(
    make: Callable[[], nn.Module],
    batch: Callable[..., Batch],
    recipe: StepRecipe,
    device: Device,
    prepare: Callable[[nn.Module], object] | None = None,
    spread: Spread | None = None,
    counts_work: bool = False,
    can_repeat: bool = True,
    proofs: list[RepeatProof] | None = None,
) -> Trace:
    """Trace training steps of a model, as they would run on a device.

    Args:
        make: makes the model, where parameters take no memory.
        batch: gives a micro-batch.
        recipe: how a step is made.
        device: the target.
        prepare: what is done to the model before it trains, such as activation checkpointing.
        spread: over which ranks; None: the model is on one process.
        counts_work: also count what operations compute and move, which takes a sixth of the time on top.
        can_repeat: `spread` treats blocks alike, however many there are, so that a few may stand for all.
        proofs: that they may, from other batches of the same model; see `trace_repeated`.

    Raises:
        UnsupportedError: something in the step cannot be traced; the operation and the user's line are named.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    made = [_made(make, fake, prepare)]
    if counts_work:
        refuse_compiled(made[0])
    blocks = None if callable(recipe.loop) or not can_repeat else find_blocks(made[0])

    def traced(count: int | None = None) -> Trace:
        model = made.pop() if made else _made(make, fake, prepare)
        if blocks is not None and count is not None:
            blocks.shorten(model, count)
        fill(model, fake)
        model = model.train()
        with ExitStack() as stack:
            graphs = stack.enter_context(without_kernels()) if may_compile() and not counts_work else None
            tracker = StorageTracker(device, WorkCounter(device) if counts_work else None, graphs)
            engine = stack.enter_context(spread(model)) if spread is not None else StepEngine(model)
            try:
                with substituted(device, recipe.precision), fake, ExitStack() as modes:
                    batches = _batches(batch, fake)
                    for mode in engine.modes():
                        modes.enter_context(mode)
                    with tracker:
                        run(model, recipe, batches, tracker, device.is_cuda, engine)
            except HeadwayError:
                raise
            except Exception as error:
                raise explained(error, tracker.last) from error
            return tracker.trace()

    found = None if blocks is None else trace_repeated(traced, blocks.count, proofs)
    return with_third_update(found or traced())


def _made(
    make: Callable[[], nn.Module], fake: FakeTensorMode, prepare: Callable[[nn.Module], object] | None
) -> nn.Module:
    try:
        with init_empty_weights():
            model = make()
    except (
        MetaModelError
    ):  # a buffer that is computed from parameters, as by spectral norm: here it needs no values either
        with init_empty_weights(include_buffers=True):
            model = make()
    if prepare is not None:
        fill(model, fake)
        prepare(model)
    return model


def _batches(batch: Callable[..., Batch], fake: FakeTensorMode) -> Callable[..., Batch]:
    """Fake copies of one batch of each length, which the tracker does not see being made."""
    from torch.utils._python_dispatch import _disable_current_modes

    made: dict[tuple[int, ...], Batch] = {}

    def next_batch(*asked: int) -> Batch:
        with _disable_current_modes():
            if asked not in made:
                made[asked] = _without_packed(batch(*asked))
            with fake:
                return tree_map(copied, made[asked])

    return next_batch


def _without_packed(batch: Batch) -> Batch:
    if any(map(_is_packed, tree_leaves(batch, is_leaf=_is_packed))):
        raise UnsupportedError(
            "the batch has a PackedSequence, in which the number of sequences at each step is a value, and nothing is computed here. "
            "Forecast the model with padded sequences (batch_fn=), which take as much or more"
        )
    return batch


def _is_packed(each: Any) -> bool:
    return isinstance(each, PackedSequence)


def copied(leaf: Any) -> Any:
    """A tensor of the same shape, strides and dtype, without values where a fake mode is on; anything else as it is."""
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def fill(model: nn.Module, fake: FakeTensorMode) -> dict[int, torch.Tensor]:
    """Fake memory for every parameter and buffer; what is tied stays tied. Returns what replaced them, by their ids."""
    made: dict[int, torch.Tensor] = {}

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        if is_fake(tensor):
            return tensor
        if id(tensor) not in made:
            with fake:
                made[id(tensor)] = without_values(tensor)
        return made[id(tensor)]

    for module in model.modules():
        if is_four_bit(module):
            pack(module, fake)
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = filled(tensor)  # type: ignore[assignment]
    return made


def explained(error: Exception, last: str) -> UnsupportedError:
    """What stood in the way of a trace; `last` is the operation that ran last."""
    cause: Any = getattr(error, "inner_exception", error)  # of TorchDynamo
    said = (str(cause).strip() or "it gives no reason").splitlines()[0]
    operation, why = last or "before its first operation", f"{type(cause).__name__}: {said}"
    if isinstance(cause, fake_tensor.UnsupportedFakeTensorException):
        why = str(cause.reason)
    for kind, reason in _REASONS.items():
        if isinstance(cause, kind):
            operation, why = str(cause.func), reason
    line = users_line(cause.__traceback__)
    where = f", called at {line}" if line else ""
    if not last:
        advice = "A batch that is a mapping is called as model(**batch), a pair as model(batch[0]); docs/forecast.md has more"
    else:
        advice = "A forecast needs a step whose shapes depend on shapes alone"
    return UnsupportedError(f"the step cannot be traced: {operation}{where}: {why}. {advice}")
