"""Run a user's script on tensors without values up to its second update (`headway estimate --script`).

The script runs as usual, with its arguments, data and loop, in the process of the command. When it prepares a model,
the model's tensors lose their values. Its loaders read real batches, but pass on only the shapes of their tensors. All
memory is traced from the first batch on. Nothing is saved, loaded or tracked. The script ends after the second update
of every optimizer. If one of the optimizers steps less often, the script ends after the 50th update of another one.
"""

import contextlib
import runpy
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.accelerator import Accelerator
from headway.common import scope
from headway.common.callsite import Frame, is_headway_file, walk_stack
from headway.core.checkpoint.resume.comparison import RestoreResult
from headway.core.data.loader import PreparedLoader
from headway.core.runtime.dry_run import mark_dry_run
from headway.errors import ConfigError, HeadwayError
from headway.extras.moving_average import ModelAverages
from headway.forecasting.device.devices import Device
from headway.forecasting.device.kernels import substitute_kernels
from headway.forecasting.tracing.compiled import refuse_compiled
from headway.forecasting.tracing.fake import fill_model, make_empty_leaf, make_trace_error
from headway.forecasting.tracing.step import NUM_UPDATES, choose_cuda_kernels, list_state, mark_model
from headway.forecasting.tracing.trace import StorageTracker, Trace
from headway.planning._torch import FakeTensorMode, disable_current_modes, tree_leaves, tree_map

MOST_UPDATES = 50
"""Number of updates of one optimizer after which the script ends, even if other optimizers have not stepped twice."""
_SCALER = "torch/amp/grad_scaler.py"
"""Path of torch's module with the gradient scaler, which reads from the device whether gradients overflow."""


class ScriptFinished(BaseException):
    """Raised to end the user's script after its last traced update.

    It derives from `BaseException` so that the script's error handlers do not catch it.
    """


def _find_reader() -> Frame | None:
    """Return the stack frame of the code that reads a tensor's value on the host, for example with `.item()`.

    This is the frame of torch's GradScaler if it is on the stack, or else the innermost frame outside of torch. The
    result is None if there is no such frame.
    """
    for frame in map(Frame.from_frame, walk_stack()):
        if frame.file.endswith(_SCALER):
            return frame
        if "/torch/" not in frame.file and not frame.file.endswith("planning/dry_run/script.py"):
            return frame
    return None


class ScriptTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """Storage tracker that answers reads of a tensor's value with 1, and records the lines that read values.

    Reads are common, because loops often print the loss. Only torch's GradScaler gets 0, which means that no gradient
    overflows.

    Attributes:
        read_at: Lines of code outside of Headway and torch that read a value, in order. Also those of torch's
            GradScaler. The lines are the keys, and all values are None.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.read_at: dict[str, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            reader = _find_reader()
            if reader is not None and not is_headway_file(reader.file):
                self.read_at[str(reader)] = None
            # GradScaler reads whether gradients overflow. An overflow would skip every update.
            is_scaler = reader is not None and reader.file.endswith(_SCALER)
            number = 0 if is_scaler else 1
            dtype = args[0].dtype
            if dtype == torch.bool:
                return bool(number)
            return float(number) if dtype.is_floating_point else number
        return super().__torch_dispatch__(func, types, args, kwargs)


class ScriptDryRun:
    """Tracker of the memory and the progress of a script.

    Args:
        device: Device to forecast for.

    Attributes:
        tracker: Tracker of the memory of tensors.
        batch_size: Samples of the first batch, or None if unknown.
        precision: Precision of the script's Accelerator.
        is_running: Whether the first batch has been received.
        is_done: Whether the script has made all updates that the dry run traces.
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
        self.num_updates = 0
        self._num_steps: Counter[int] = Counter()  # by `id` of the optimizer
        self._optimizer_ids: set[int] = set()
        self.batch_size: int | None = None
        self.precision = "no"
        self.is_done = False

    # ---------------------------------------------------------------- models and optimizers

    def strip_values(self, objects: tuple[Any, ...]) -> None:
        """Replace the tensors of models with fake tensors, and make optimizers update the fake parameters.

        Args:
            objects: Arguments that the script passes to `prepare`. Other objects than models and optimizers are
                ignored.

        Raises:
            UnsupportedError: If `torch.compile` has compiled a model or one of its submodules.
        """
        for each in objects:
            if isinstance(each, nn.Module):
                refuse_compiled(each)
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

    def receive_batch(self, batch: Any) -> Any:
        """Record a batch from a loader, and return a fake copy of the batch. The first batch starts the trace."""
        if not self.is_running:
            self._begin_tracking()
        self._enter_phase("forward")
        with disable_current_modes(), self._fake:
            fake_batch = tree_map(make_empty_leaf, batch)
        tensors = [leaf for leaf in tree_leaves(fake_batch) if isinstance(leaf, torch.Tensor)]
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
        if self.is_running:
            self.tracker.enter_phase(f"step {self.num_updates + 1} {phase}")

    def _record_update(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.is_running:
            return
        self.tracker.mark_tensors(list_state(optimizer), "optimizer state")
        self._num_steps[id(optimizer)] += 1
        self.num_updates = max(self._num_steps.values())
        if not self._list_late() or self.num_updates == MOST_UPDATES:
            self.is_done = True
            raise ScriptFinished

    def _list_late(self) -> set[int]:
        """Return the `id` of each optimizer that has made fewer updates than the dry run traces."""
        return {each for each in self._optimizer_ids if self._num_steps[each] < NUM_UPDATES}

    def finish_trace(self) -> Trace:
        """Stop tracking and return the trace, with caveats about values that were read and updates that are missing."""
        self.tracker.enter_phase("end")
        self._tracing_contexts.close()
        trace, late = self.tracker.build_trace(), self._list_late()
        caveats = list(trace.caveats)
        if self.tracker.read_at:
            lines = ", ".join(self.tracker.read_at)
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


class DryRunLoader:
    """Wrapper of a prepared loader that yields batches of fake tensors in place of the real batches.

    Args:
        inner: Prepared loader to read from.
        dry_run: Dry run that records each batch.
    """

    def __init__(self, inner: PreparedLoader, dry_run: ScriptDryRun) -> None:
        self.inner = inner
        self._dry_run = dry_run

    def __iter__(self) -> Iterator[Any]:
        end = object()
        with disable_current_modes():
            batches = iter(self.inner)
        while True:
            with disable_current_modes():
                batch = next(batches, end)
            if batch is end:
                return
            yield self._dry_run.receive_batch(batch)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class FilelessAccelerator(Accelerator):
    """Accelerator that saves, loads and tracks nothing.

    A dry run has no values to write. With the checkpoint of a finished run, it would have no updates left to trace.
    """

    def save_state(self, output_dir: str | Path | None = None, *args: Any, **kwargs: Any) -> Path:
        return Path(output_dir or self.project_dir or ".")

    def load_state(self, input_dir: str | Path | None = None, *args: Any, **kwargs: Any) -> RestoreResult:
        return RestoreResult(Path(input_dir or self.project_dir or "."), {"num_updates": 0, "epoch": 0})

    def resume(self, *args: Any, **kwargs: Any) -> None:
        return None

    def _ignore(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    save = save_model = push_to_hub = _ignore
    # Without a started run, `get_tracker` returns placeholders that do nothing.
    init_trackers = log = log_images = log_artifact = log_event = _ignore


def make_accelerator_class(dry_run: ScriptDryRun) -> type[Accelerator]:
    """Return a class that replaces Headway's Accelerator in the script, and reports its calls to the dry run."""

    class DryRunAccelerator(FilelessAccelerator):
        def prepare(self, *objects: Any, **options: Any) -> Any:  # type: ignore[override]
            dry_run.precision = self.mixed_precision
            # The target is the forecast's device, so the model is not moved here.
            options["device_placement"] = [not isinstance(each, nn.Module) for each in objects]
            with disable_current_modes():
                dry_run.strip_values(objects)
                prepared = super().prepare(*objects, **options)
            return tuple(map(wrap_loader, prepared)) if len(objects) > 1 else wrap_loader(prepared)

        def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
            return wrap_loader(super().prepare_data_loader(*args, **kwargs))

        def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            dry_run.precision = self.mixed_precision
            kwargs = {"device_placement": False, **kwargs} if not args else kwargs
            with disable_current_modes():
                dry_run.strip_values((model,))
                return super().prepare_model(model, *args, **kwargs)

        def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            with disable_current_modes():
                dry_run.strip_values((optimizer,))
                return super().prepare_optimizer(optimizer, *args, **kwargs)

        def backward(self, *args: Any, **kwargs: Any) -> Any:
            dry_run.record_backward_start()
            super().backward(*args, **kwargs)
            dry_run.record_backward_end()

        def gather_for_metrics(self, input_data: Any, *args: Any, **kwargs: Any) -> Any:
            gathered = super().gather_for_metrics(input_data, *args, **kwargs)
            with disable_current_modes():
                return tree_map(make_zeros, gathered)  # real zeros, because metrics may be computed outside of torch

        def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
            inner = dataloader.inner if isinstance(dataloader, DryRunLoader) else dataloader
            return wrap_loader(super().skip_first_batches(inner, num_batches))

    def make_zeros(leaf: Any) -> Any:
        return torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf

    def wrap_loader(prepared: Any) -> Any:
        return DryRunLoader(prepared, dry_run) if isinstance(prepared, PreparedLoader) else prepared

    return DryRunAccelerator


def dry_run_script(script: Path, arguments: Sequence[str], device: Device) -> tuple[Trace, int]:
    """Run a script up to its second update, and trace its memory. The process must not be used for anything else.

    Args:
        script: Path of a Python file whose training loop uses Headway's Accelerator, or Accelerate's if Headway
            replaces Accelerate.
        arguments: Arguments of the script.
        device: Device to forecast for.

    Returns:
        The trace of the script's first updates, and the number of samples in its first batch. The number is 0 if
        unknown.

    Raises:
        ConfigError: If there is no such file, or if the script made no update or ended with an error code before its
            second update.
        UnsupportedError: If the step cannot be traced. The message names the operation and the user's line.
        Exception: Any exception that the script raises before its first batch.
    """
    if not script.is_file():
        raise ConfigError(f"there is no script {script}")
    dry_run = ScriptDryRun(device)
    # The Trainer and Accelerate's names are imported after this replacement, so they use the replaced class.
    mark_dry_run()
    home = sys.modules[Accelerator.__module__]
    home.__dict__["Accelerator"] = make_accelerator_class(dry_run)
    sys.modules["headway"].__dict__.pop("Accelerator", None)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(str(script), run_name="__main__")
    except HeadwayError:
        if dry_run.num_updates < NUM_UPDATES:
            raise
    except SystemExit as leaving:
        if leaving.code not in (None, 0) and dry_run.num_updates < NUM_UPDATES:
            raise ConfigError(f"{script} ended with {leaving.code!r} before its second update") from leaving
    except BaseException as error:
        if dry_run.num_updates < NUM_UPDATES:
            if isinstance(error, Exception) and dry_run.is_running:
                raise make_trace_error(error, dry_run.tracker.last_operation) from error
            raise
        if not isinstance(error, Exception | ScriptFinished):
            raise
    finally:
        trace = dry_run.finish_trace()
    if dry_run.num_updates == 0:
        raise ConfigError(
            f"{script} made no update: it must prepare a model, an optimizer and a loader with an Accelerator, and step the optimizer"
        )
    return trace, dry_run.batch_size or 0
