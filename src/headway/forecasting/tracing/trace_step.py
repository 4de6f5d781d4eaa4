"""Trace training steps of a model on fake tensors, which have shapes but no values.

The model is made and filled with fake tensors, then its steps run under a `StorageTracker`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from torch import nn

from headway.core.runtime.collectives.tree import is_packed, list_leaves
from headway.errors import HeadwayError, MetaModelError, UnsupportedError
from headway.forecasting._torch import FakeTensorMode, disable_current_modes
from headway.forecasting.device.devices import Device
from headway.forecasting.device.kernels import substitute_kernels
from headway.forecasting.tracing.batches import map_batch
from headway.forecasting.tracing.compiled import can_compile, refuse_compiled, skip_kernels
from headway.forecasting.tracing.engine import StepEngine
from headway.forecasting.tracing.fake_model import fill_model
from headway.forecasting.tracing.recipe import StepRecipe
from headway.forecasting.tracing.repeated_blocks import find_blocks
from headway.forecasting.tracing.repeats import RepeatProof, trace_repeated
from headway.forecasting.tracing.reported_tensors import Batch
from headway.forecasting.tracing.step import run_recipe
from headway.forecasting.tracing.storage_tracker import StorageTracker
from headway.forecasting.tracing.tensors import make_empty
from headway.forecasting.tracing.third_update import add_third_update
from headway.forecasting.tracing.trace import Trace
from headway.forecasting.tracing.trace_errors import make_trace_error
from headway.forecasting.tracing.work import WorkCounter
from headway.offload.placement.meta_model import init_empty_weights

DistributeModel = Callable[[nn.Module], AbstractContextManager[StepEngine]]
"""Function that takes a model without values and returns a context in which the model is distributed over ranks."""


def trace_step(
    make: Callable[[], nn.Module],
    batch: Callable[..., Batch],
    recipe: StepRecipe,
    device: Device,
    prepare: Callable[[nn.Module], object] | None = None,
    distribute_model: DistributeModel | None = None,
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
        distribute_model: Function that distributes the model over ranks, or None for one process. Default: None.
        counts_work: Whether to also count floating-point operations and memory traffic, which takes a sixth more time.
            Default: False.
        can_repeat: Whether `distribute_model` treats all repeated blocks equally, so that tracing a few of them is
            enough. Default: True.
        proofs: Results of earlier traces of this model, which can show that one trace with a few blocks is enough (see
            `trace_repeated`). A new result is appended. Default: None.

    Raises:
        UnsupportedError: If the step cannot be traced. The message names the operation and the user's line.
        LossError: If the loss is not a scalar with a gradient.
        ConfigError: If the user's loop (`recipe.loop`) does not call backward, or makes too few updates.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    first_model = _make_model(make, fake, prepare)
    if counts_work:
        refuse_compiled(first_model)
    blocks = find_blocks(first_model) if can_repeat and not callable(recipe.loop) else None
    unused_models = [first_model]

    def trace_model(count: int | None = None) -> Trace:
        # The first trace uses the model in which the blocks were found. A trace changes its model.
        model = unused_models.pop() if unused_models else _make_model(make, fake, prepare)
        if blocks is not None and count is not None:
            blocks.shorten(model, count)
        fill_model(model, fake)
        model = model.train()
        with ExitStack() as stack:
            work_counter, graphs = None, None
            if counts_work:
                work_counter = WorkCounter(device)
            elif can_compile():
                graphs = stack.enter_context(skip_kernels())
            tracker = StorageTracker(device, work_counter, graphs)
            engine = StepEngine(model) if distribute_model is None else stack.enter_context(distribute_model(model))
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
    """Return a model without values, changed by `prepare`.

    Args:
        make: Function that makes the model. It is called in a context in which parameters take no memory.
        fake: Fake mode of the parameters and buffers that `prepare` gets.
        prepare: Function that changes the model before training. None: the parameters stay on the meta device.
    """
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
    real_batches: dict[tuple[int, ...], Batch] = {}  # by arguments of `batch`

    def make_fake_batch(*args: int) -> Batch:
        with disable_current_modes():
            if args not in real_batches:
                real_batches[args] = batch(*args)
                _refuse_packed(real_batches[args])
            with fake:
                return map_batch(make_empty, real_batches[args])

    return make_fake_batch


def _refuse_packed(batch: Batch) -> None:
    """Raise UnsupportedError if the batch contains a `PackedSequence`."""
    if any(map(is_packed, list_leaves(batch))):
        raise UnsupportedError(
            "the batch has a PackedSequence, in which the number of sequences at each step is a value, and nothing is computed here. "
            "Forecast the model with padded sequences (batch_fn=), which take as much or more"
        )
