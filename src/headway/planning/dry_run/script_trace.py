"""Record the memory and the progress of a user's script that runs on tensors without values."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headway.common import scope
from headway.common.callsite import Frame, is_headway_file, walk_stack
from headway.extras.eager_calls import EagerCalls
from headway.extras.moving_average import ModelAverages
from headway.forecasting.device.devices import Device
from headway.forecasting.device.kernels import substitute_kernels
from headway.forecasting.tracing.batches import list_batch_tensors, map_batch
from headway.forecasting.tracing.fake_model import fill_model
from headway.forecasting.tracing.recipe import NUM_UPDATES
from headway.forecasting.tracing.reported_tensors import list_state, mark_model
from headway.forecasting.tracing.step import choose_cuda_kernels
from headway.forecasting.tracing.storage_tracker import StorageTracker
from headway.forecasting.tracing.tensors import make_empty
from headway.forecasting.tracing.trace import Trace
from headway.planning._torch import FakeTensorMode, disable_current_modes

MAX_UPDATES = 50
"""Number of updates of one optimizer after which the script ends, even if other optimizers have not stepped twice."""

_SCALER = "torch/amp/grad_scaler.py"
"""Path of torch's module with the gradient scaler, which reads from the device whether gradients overflow."""

_COMPILE_CAVEAT = (
    "the script uses torch.compile, but the forecast assumes that nothing is compiled; compiled code usually needs less "
    "memory, and CUDA graphs (mode='reduce-overhead') need memory of their own"
)
"""Caveat of the forecast of a script that calls `torch.compile`."""


class ScriptFinished(BaseException):
    """Raised to end the user's script after its last traced update.

    It derives from `BaseException` so that the script's error handlers do not catch it.
    """


class ScriptTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """Storage tracker that answers reads of a tensor's value with 1, and records the lines that read values.

    Reads are common, because loops often print the loss. Only torch's GradScaler gets 0, which means that no gradient
    overflows.

    Attributes:
        read_lines: Lines of code outside of Headway and torch that read a value, in order. Also those of torch's
            GradScaler. The lines are the keys, and all values are None.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.read_lines: dict[str, None] = {}
        self._eager_calls = scope.get_or_create(EagerCalls)

    @property
    def runs_compiled_eagerly(self) -> bool:  # type: ignore[override]
        """Whether compiled functions run without compilation, because the script has called `torch.compile`."""
        return self._eager_calls.is_eager

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            reader = _find_reader()
            if reader is not None and not is_headway_file(reader.file):
                self.read_lines[str(reader)] = None
            # GradScaler reads whether gradients overflow. An overflow would skip every update.
            is_scaler = reader is not None and reader.file.endswith(_SCALER)
            number = 0 if is_scaler else 1
            dtype = args[0].dtype
            if dtype == torch.bool:
                return bool(number)
            return float(number) if dtype.is_floating_point else number
        return super().__torch_dispatch__(func, types, args, kwargs)


def _find_reader() -> Frame | None:
    """Return the stack frame of the code that reads a tensor's value on the host, for example with `.item()`.

    This is the frame of torch's GradScaler if it is on the stack, or else the innermost frame outside of torch and this
    file. The result is None if there is no such frame.
    """
    for frame in map(Frame.from_frame, walk_stack()):
        if frame.file.endswith(_SCALER):
            return frame
        if "/torch/" not in frame.file and frame.file != __file__:
            return frame
    return None


class ScriptDryRun:
    """Tracker of the memory and the progress of a script.

    Args:
        device: Device to forecast for.

    Attributes:
        tracker: Tracker of the memory of tensors.
        batch_size: Samples of the first batch, or None if unknown.
        precision: Precision of the script's Accelerator.
        is_running: Whether the first batch has been received.
        is_fetching: Whether a loader is fetching a batch.
        num_updates: Number of updates of the optimizer that has stepped most often.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.tracker = ScriptTracker(device)
        self._tracing_contexts = contextlib.ExitStack()
        self._models: list[nn.Module] = []
        # Fake parameters by the `id` of the original. The originals are kept, so that no other tensor gets the same `id`
        # before an optimizer is prepared.
        self._fake_parameters: dict[int, torch.Tensor] = {}
        self._originals: list[torch.Tensor] = []
        self.is_running = False
        self.is_fetching = False
        self.num_updates = 0
        self._num_steps: Counter[int] = Counter()  # by `id` of the optimizer
        self._optimizer_ids: set[int] = set()
        self.batch_size: int | None = None
        self.precision = "no"

    # ---------------------------------------------------------------- models and optimizers

    @property
    def has_models(self) -> bool:
        """Whether the script has prepared a model."""
        return bool(self._models)

    def strip_values(self, objects: tuple[Any, ...]) -> None:
        """Replace the tensors of models with fake tensors, and make optimizers update the fake parameters.

        Args:
            objects: Arguments that the script passes to `prepare`. Objects other than models and optimizers
                are ignored.
        """
        for each in objects:
            if isinstance(each, nn.Module):
                self._originals += each.parameters()
                self._fake_parameters |= fill_model(each, self._fake)
                self._models.append(each)
        for each in objects:
            if isinstance(each, torch.optim.Optimizer):
                self._follow_optimizer(each)

    def _follow_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace an optimizer's parameters with their fake copies, and register hooks on its steps."""
        for group in optimizer.param_groups:
            group["params"] = [self._fake_parameters.get(id(parameter), parameter) for parameter in group["params"]]
        if self._device.is_cuda:
            choose_cuda_kernels(optimizer)
        self._optimizer_ids.add(id(optimizer))
        optimizer.register_step_pre_hook(lambda *_: self._enter_phase("update"))
        optimizer.register_step_post_hook(lambda own, *_: self._record_update(own))

    # ---------------------------------------------------------------- progress of the script

    @contextlib.contextmanager
    def mark_fetching(self) -> Iterator[None]:
        """Set `is_fetching` while the block runs."""
        was_fetching, self.is_fetching = self.is_fetching, True
        try:
            yield
        finally:
            self.is_fetching = was_fetching

    def receive_batch(self, batch: Any) -> Any:
        """Record a batch from a loader, and return a fake copy of the batch. The first batch starts the trace."""
        if not self.is_running:
            self._begin_tracking()
        self._enter_phase("forward")
        with disable_current_modes(), self._fake:
            fake_batch = map_batch(make_empty, batch)
        tensors = list_batch_tensors(fake_batch)
        if self.batch_size is None and tensors and tensors[0].dim():
            self.batch_size = tensors[0].shape[0]
        self.tracker.mark_tensors(tensors, "batch")
        return fake_batch

    def record_backward_start(self) -> None:
        """Record the start of backward. What forward has allocated and not freed then counts as activations.

        Do nothing before the first batch.
        """
        if self.is_running:
            self.tracker.mark_activations()
            self._enter_phase("backward")

    def record_backward_end(self) -> None:
        """Record the end of backward, and report the gradients to the tracker as memory of the kind "gradients".

        Do nothing before the first batch.
        """
        if self.is_running:
            gradients = [p.grad for model in self._models for p in model.parameters() if p.grad is not None]
            self.tracker.mark_tensors(gradients, "gradients")

    def _begin_tracking(self) -> None:
        """Begin to trace the script, with the memory of its prepared models and their averages as already allocated."""
        self.is_running = True
        self._tracing_contexts.enter_context(substitute_kernels(self._device, self.precision))
        self._tracing_contexts.enter_context(self._fake)
        self._tracing_contexts.enter_context(self.tracker)
        self.tracker.enter_phase("set-up")
        for model in self._models:
            mark_model(model, self.tracker)
            for average in scope.get_or_create(ModelAverages).list_averages(model):
                tensors = [each for each in average.list_tensors() if not each.is_meta]
                self.tracker.mark_tensors(tensors, "averages")

    def _enter_phase(self, phase: str) -> None:
        """Start a phase of the current update, such as "forward". Do nothing unless tracing has begun."""
        if self.is_running:
            self.tracker.enter_phase(f"step {self.num_updates + 1} {phase}")

    def _record_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer step, and end the script once enough updates were traced.

        Args:
            optimizer: Optimizer that has made a step.

        Raises:
            ScriptFinished: If each optimizer has made `NUM_UPDATES` updates, or if one has made `MAX_UPDATES`.
        """
        if not self.is_running:
            return
        self.tracker.mark_tensors(list_state(optimizer), "optimizer state")
        self._num_steps[id(optimizer)] += 1
        self.num_updates = max(self._num_steps.values())
        if not self._find_late_optimizers() or self.num_updates == MAX_UPDATES:
            raise ScriptFinished

    def _find_late_optimizers(self) -> set[int]:
        """Return the `id` of each optimizer that has made fewer updates than the dry run traces."""
        return {each for each in self._optimizer_ids if self._num_steps[each] < NUM_UPDATES}

    def finish_trace(self) -> Trace:
        """Stop tracking and return the trace, with caveats about values that were read and updates that are missing."""
        self.tracker.enter_phase("end")
        self._tracing_contexts.close()
        trace, late = self.tracker.build_trace(), self._find_late_optimizers()
        caveats = list(trace.caveats)
        if scope.get_or_create(EagerCalls).is_used:
            caveats.append(_COMPILE_CAVEAT)
        if self.tracker.read_lines:
            lines = ", ".join(self.tracker.read_lines)
            caveats.append(
                f"values were read at {lines}; each was taken as 1, so a step that depends on them may take another path"
            )
        if self.num_updates < NUM_UPDATES:
            caveats.append("the script ended after its first update; what later updates add is not in the numbers")
        elif late:
            caveats.append(
                f"a lower bound: {len(late)} of {len(self._optimizer_ids)} optimizers had stepped fewer than {NUM_UPDATES} times "
                f"when another had made {self.num_updates} updates and the trace ended, so their state, and maybe gradients, "
                "are missing"
            )
        return replace(trace, caveats=tuple(caveats))
