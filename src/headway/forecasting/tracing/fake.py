"""Trace training steps on fake tensors. If that fails, explain which operation prevents it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from headway.common.callsite import find_user_line
from headway.errors import HeadwayError, MetaModelError, UnsupportedError
from headway.forecasting._torch import FakeTensorMode, fake_tensor, is_fake, tree_leaves, tree_map
from headway.forecasting.device.devices import Device
from headway.forecasting.device.kernels import substitute_kernels
from headway.forecasting.tracing.compiled import can_compile, refuse_compiled, skip_kernels
from headway.forecasting.tracing.four_bit import is_unpacked_four_bit, pack_four_bit
from headway.forecasting.tracing.repeats import RepeatProof, find_blocks, trace_repeated
from headway.forecasting.tracing.step import Batch, StepEngine, StepRecipe, run_recipe
from headway.forecasting.tracing.tensors import make_empty_like
from headway.forecasting.tracing.third_update import add_third_update
from headway.forecasting.tracing.trace import StorageTracker, Trace
from headway.forecasting.tracing.work import WorkCounter
from headway.offload.placement.meta_model import init_empty_weights

Spread = Callable[[nn.Module], AbstractContextManager[StepEngine]]
"""Function that takes a model without values and returns a context in which the model is distributed over ranks."""

_REASONS: dict[type[Any], str] = {
    fake_tensor.DataDependentOutputException: (
        "it reads a value of a tensor (.item(), .tolist(), `if tensor:`), and nothing is computed here"
    ),
    fake_tensor.DynamicOutputShapeException: (
        "the shape of its result depends on values (nonzero, unique, a mask of bools as index), and nothing is computed here"
    ),
    fake_tensor.UnsupportedOperatorException: (
        "it has no fake kernel, which gives the shape of its result without computing it (torch.library.register_fake)"
    ),
}
"""Reason why an operation cannot be traced, by the exception that torch raises."""


def trace_step(
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
    """Trace training steps of a model as they would run on a device.

    Args:
        make: Function that makes the model. It is called in a context in which parameters take no memory.
        batch: Function that makes a micro-batch.
        recipe: Configuration of the steps.
        device: Device to trace for.
        prepare: Function that changes the model before training, for example to add activation checkpointing. None: no
            change. Default: None.
        spread: Function that distributes the model over ranks, or None for one process. Default: None.
        counts_work: Whether to also count floating point operations and memory traffic, which takes a sixth more time.
            Default: False.
        can_repeat: Whether `spread` treats all repeated blocks equally, so that tracing a few of them is enough.
            Default: True.
        proofs: Results of earlier traces of this model, which can show that one trace with a few blocks is enough (see
            `trace_repeated`). A new result is appended. Default: None.

    Raises:
        UnsupportedError: If the step cannot be traced. The message names the operation and the user's line.
        LossError: If the loss is not a scalar with a gradient.
        ConfigError: If the user's loop (`recipe.loop`) does not call backward, or makes too few updates.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    unused_models = [_make_model(make, fake, prepare)]
    if counts_work:
        refuse_compiled(unused_models[0])
    blocks = None if callable(recipe.loop) or not can_repeat else find_blocks(unused_models[0])

    def trace_model(count: int | None = None) -> Trace:
        # The first trace uses the model in which the blocks were found. A trace changes its model.
        model = unused_models.pop() if unused_models else _make_model(make, fake, prepare)
        if blocks is not None and count is not None:
            blocks.shorten(model, count)
        fill_model(model, fake)
        model = model.train()
        with ExitStack() as stack:
            graphs = stack.enter_context(skip_kernels()) if can_compile() and not counts_work else None
            tracker = StorageTracker(device, WorkCounter(device) if counts_work else None, graphs)
            engine = stack.enter_context(spread(model)) if spread is not None else StepEngine(model)
            try:
                with substitute_kernels(device, recipe.precision), fake, ExitStack() as modes:
                    batches = _make_batches(batch, fake)
                    for mode in engine.make_modes():
                        modes.enter_context(mode)
                    with tracker:
                        run_recipe(model, recipe, batches, tracker, device.is_cuda, engine)
            except HeadwayError:
                raise
            except Exception as error:
                raise make_trace_error(error, tracker.last_operation) from error
            return tracker.build_trace()

    extrapolated = None if blocks is None else trace_repeated(trace_model, blocks.count, proofs)
    return add_third_update(extrapolated or trace_model())


def _make_model(
    make: Callable[[], nn.Module], fake: FakeTensorMode, prepare: Callable[[nn.Module], object] | None
) -> nn.Module:
    try:
        with init_empty_weights():
            model = make()
    except MetaModelError:
        # The model computes a buffer from its parameters, as spectral norm does. A trace needs no values of buffers.
        with init_empty_weights(include_buffers=True):
            model = make()
    if prepare is not None:
        fill_model(model, fake)
        prepare(model)
    return model


def _make_batches(batch: Callable[..., Batch], fake: FakeTensorMode) -> Callable[..., Batch]:
    """Return a function that returns fake copies of batches. For each sequence length, it calls `batch` only once.

    The real batches are created outside of the storage tracker, so the memory for their creation is not recorded.

    Args:
        batch: Function that makes a micro-batch.
        fake: Fake mode in which the copies are made.
    """
    from headway.forecasting._torch import disable_current_modes

    real_batches: dict[tuple[int, ...], Batch] = {}  # by arguments of `batch`

    def make_fake_batch(*args: int) -> Batch:
        with disable_current_modes():
            if args not in real_batches:
                real_batches[args] = batch(*args)
                _refuse_packed(real_batches[args])
            with fake:
                return tree_map(make_empty_leaf, real_batches[args])

    return make_fake_batch


def _refuse_packed(batch: Batch) -> None:
    """Raise UnsupportedError if the batch contains a `PackedSequence`."""
    if any(map(_is_packed, tree_leaves(batch, is_leaf=_is_packed))):
        raise UnsupportedError(
            "the batch has a PackedSequence, in which the number of sequences at each step is a value, and nothing is computed here. "
            "Forecast the model with padded sequences (batch_fn=), which take as much or more"
        )


def _is_packed(each: Any) -> bool:
    return isinstance(each, PackedSequence)


def make_empty_leaf(leaf: Any) -> Any:
    """Return an uninitialized tensor on the CPU with the shape, strides and dtype of the given tensor.

    Values that are not tensors are returned unchanged.
    """
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def fill_model(model: nn.Module, fake: FakeTensorMode) -> dict[int, torch.Tensor]:
    """Replace every parameter and buffer with a fake tensor that has its own storage. Tied tensors stay tied.

    Tensors that are already fake are kept.

    Args:
        model: Model to change in place.
        fake: Fake mode that the new tensors belong to.

    Returns:
        The replacement of each tensor, by the `id` of the original.
    """
    replacements: dict[int, torch.Tensor] = {}  # by `id` of the original

    def make_fake(tensor: torch.Tensor) -> torch.Tensor:
        if is_fake(tensor):
            return tensor
        if id(tensor) not in replacements:
            with fake:
                replacements[id(tensor)] = make_empty_like(tensor)
        return replacements[id(tensor)]

    for module in model.modules():
        if is_unpacked_four_bit(module):
            pack_four_bit(module, fake)
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = make_fake(tensor)  # type: ignore[assignment]
    return replacements


def make_trace_error(error: Exception, last_operation: str) -> UnsupportedError:
    """Return the error to raise after a failed trace. Its message has the operation, the user's line and the reason.

    If torch refuses an operation because the trace has no values, the message names this reason. A real run could raise
    any other exception, too, for example because of a wrong shape or name.

    Args:
        error: Exception that ended the trace.
        last_operation: Name of the last operation that ran, or "" if none ran.
    """
    cause: Any = getattr(error, "inner_exception", error)  # TorchDynamo wraps the exception
    line = find_user_line(cause.__traceback__)
    where = f", called at {line}" if line else ""
    needs_shapes = "A forecast needs a step whose shapes depend on shapes alone"
    if isinstance(cause, fake_tensor.UnsupportedFakeTensorException):
        return UnsupportedError(f"the step cannot be traced: {last_operation}{where}: {cause.reason}. {needs_shapes}")
    for kind, reason in _REASONS.items():
        if isinstance(cause, kind):
            return UnsupportedError(f"the step cannot be traced: {cause.func}{where}: {reason}. {needs_shapes}")
    message = (str(cause).strip() or "it gives no reason").splitlines()[0].rstrip(".")
    at = f" at {line}" if line else ""
    if not last_operation:
        return UnsupportedError(
            f"the step failed{at} before its first operation: {type(cause).__name__}: {message}. A batch that is a mapping "
            "is called as model(**batch), a pair as model(batch[0]); docs/forecast.md has more"
        )
    return UnsupportedError(
        f"the step failed{at}, after {last_operation}: {type(cause).__name__}: {message}. If it runs without a forecast, it needs "
        "the values of tensors, and a forecast knows only their shapes"
    )
