"""A user's own script up to its second update on tensors without values: what `headway estimate --script` traces.

The script runs as ever, with its arguments, its data and its loop, in a process of its own. Where it prepares a model, the model's
tensors lose their values; its loaders read real batches, of which only the shapes go on. From the first batch on, every request
for memory is followed. After the second update of every optimizer the script is left; where one does not step, at the latest
after the 50th update of another.
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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from headway.accelerator import Accelerator
from headway.common.callsite import Frame, is_headways, stack
from headway.data.loader import PreparedLoader
from headway.errors import ConfigError, HeadwayError
from headway.forecasting import begin_forecast
from headway.forecasting.device.devices import Device
from headway.forecasting.device.kernels import substituted
from headway.forecasting.tracing.compiled import refuse_compiled
from headway.forecasting.tracing.fake import copied, explained, fill
from headway.forecasting.tracing.step import STEPS, as_on_cuda, mark_model, state_of
from headway.forecasting.tracing.trace import StorageTracker, Trace


class DryRunResult(BaseException):
    """The script has made its updates and is left; not an Exception, so that it does not stop here."""


MOST_UPDATES = 50
"""Of the optimizer that steps most often, while others have not stepped twice."""
_SCALER = "torch/amp/grad_scaler.py"


def _reader() -> Frame | None:
    """Whose line reads a value: torch's scaler, or the innermost that is not torch's; None: torch's own."""
    for frame in map(Frame.of, stack()):
        if frame.file.endswith(_SCALER):
            return frame
        if "/torch/" not in frame.file and not frame.file.endswith("planning/dry_run/script.py"):
            return frame
    return None


class ScriptTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """A tracker that answers one where a value is read, and remembers where: a loop reads its loss to print it.

    Attributes:
        read_at: the user's lines that read a value.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.read_at: dict[str, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            reader = _reader()
            if reader is not None and not is_headways(reader.file):
                self.read_at[str(reader)] = None
            is_overflow = reader is not None and reader.file.endswith(_SCALER)  # it would skip every update
            number = 0 if is_overflow else 1
            dtype = args[0].dtype
            return bool(number) if dtype == torch.bool else float(number) if dtype.is_floating_point else number
        return super().__torch_dispatch__(func, types, args, kwargs)


class ScriptDryRun:
    """Follows a script's memory.

    Args:
        device: the target.

    Attributes:
        batch_size: samples of the first batch; None: it has no tensor.
        precision: of the script's Accelerator.
        is_running: a batch has come.
        is_done: all updates that are waited for were made.
        num_updates: of the optimizer that has stepped most often.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.tracker = ScriptTracker(device)
        self._block = contextlib.ExitStack()
        self._models: list[nn.Module] = []
        # By the ids of what they replaced, which is kept so that no other tensor gets the same: an optimizer may come later.
        self._made: dict[int, torch.Tensor] = {}
        self._before: list[torch.Tensor] = []
        self.is_running = False
        self.num_updates = 0
        self._steps: Counter[int] = Counter()
        self._followed: set[int] = set()
        self.batch_size: int | None = None
        self.precision = "no"
        self.is_done = False

    # ---------------------------------------------------------------- what is prepared

    def take_values(self, objects: tuple[Any, ...]) -> None:
        """Models lose their values; optimizers follow them."""
        for each in objects:
            if isinstance(each, nn.Module):
                refuse_compiled(each)
                self._before += each.parameters()
                self._made |= fill(each, self._fake)
                self._models.append(each)
        for each in objects:
            if isinstance(each, torch.optim.Optimizer):
                self._follow(each)

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["params"] = [self._made.get(id(parameter), parameter) for parameter in group["params"]]
        if self._device.is_cuda:
            as_on_cuda(optimizer)
        self._followed.add(id(optimizer))
        optimizer.register_step_pre_hook(lambda *_: self._enter("update"))
        optimizer.register_step_post_hook(lambda own, *_: self._updated(own))

    # ---------------------------------------------------------------- where the script is

    def arrived(self, batch: Any) -> Any:
        """A batch has come from a loader; returns it without values."""
        if not self.is_running:
            self._begin()
        self._enter("forward")
        with _disable_current_modes(), self._fake:
            without = tree_map(copied, batch)
        tensors = [leaf for leaf in tree_leaves(without) if isinstance(leaf, torch.Tensor)]
        if self.batch_size is None and tensors and tensors[0].dim():
            self.batch_size = tensors[0].shape[0]
        self.tracker.mark(tensors, "batch")
        return without

    def backward_begins(self) -> None:
        """The loss is there."""
        if self.is_running:
            self.tracker.mark_activations()
            self._enter("backward")

    def backward_ended(self) -> None:
        """Gradients are there."""
        if self.is_running:
            gradients = [p.grad for model in self._models for p in model.parameters() if p.grad is not None]
            self.tracker.mark(gradients, "gradients")

    def _begin(self) -> None:
        self.is_running = True
        self._block.enter_context(substituted(self._device, self.precision))
        self._block.enter_context(self._fake)
        self._block.enter_context(self.tracker)
        self.tracker.enter("set-up")
        for model in self._models:
            mark_model(model, self.tracker)

    def _enter(self, phase: str) -> None:
        if self.is_running:
            self.tracker.enter(f"step {self.num_updates + 1} {phase}")

    def _updated(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.is_running:
            return
        self.tracker.mark(state_of(optimizer), "optimizer state")
        self._steps[id(optimizer)] += 1
        self.num_updates = max(self._steps.values())
        if not self._late() or self.num_updates == MOST_UPDATES:
            self.is_done = True
            raise DryRunResult

    def _late(self) -> set[int]:
        """Optimizers that have not stepped twice."""
        return {each for each in self._followed if self._steps[each] < STEPS}

    def end(self) -> Trace:
        """Stop following; returns what was seen."""
        self.tracker.enter("end")
        self._block.close()
        found, late = self.tracker.trace(), self._late()
        caveats = list(found.caveats)
        if self.tracker.read_at:
            lines = ", ".join(self.tracker.read_at)
            caveats.append(
                f"values were read at {lines}; each was taken as 1, so a step that depends on them may take another path"
            )
        if self.num_updates < STEPS:
            caveats.append("the script ended after its first update; what later updates add is not in the numbers")
        elif late:
            caveats.append(
                f"a lower bound: {len(late)} of {len(self._followed)} optimizers had stepped fewer than {STEPS} times when another "
                f"had made {self.num_updates} updates and the trace ended, so their state, and maybe gradients, are missing"
            )
        return replace(found, caveats=tuple(caveats))


class DryRunLoader:
    """A prepared loader whose batches lose their values.

    Args:
        inner: the loader.
        dry_run: is told of each batch.
    """

    def __init__(self, inner: PreparedLoader, dry_run: ScriptDryRun) -> None:
        self.inner, self._dry_run = inner, dry_run

    def __iter__(self) -> Iterator[Any]:
        end = object()
        with _disable_current_modes():
            batches = iter(self.inner)
        while True:
            with _disable_current_modes():
                batch = next(batches, end)
            if batch is end:
                return
            yield self._dry_run.arrived(batch)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def watched_by(dry_run: ScriptDryRun) -> type[Accelerator]:
    """The Accelerator that the script gets instead of Headway's."""

    class DryRunAccelerator(Accelerator):
        def prepare(self, *objects: Any, **options: Any) -> Any:  # type: ignore[override]
            dry_run.precision = self.mixed_precision
            # Where the model goes is what is forecast; here it stays where it is.
            options["device_placement"] = [not isinstance(each, nn.Module) for each in objects]
            with _disable_current_modes():
                dry_run.take_values(objects)
                prepared = super().prepare(*objects, **options)
            return tuple(map(wrapped, prepared)) if len(objects) > 1 else wrapped(prepared)

        def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
            return wrapped(super().prepare_data_loader(*args, **kwargs))

        def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            dry_run.precision = self.mixed_precision
            kwargs = {"device_placement": False, **kwargs} if not args else kwargs
            with _disable_current_modes():
                dry_run.take_values((model,))
                return super().prepare_model(model, *args, **kwargs)

        def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                dry_run.take_values((optimizer,))
                return super().prepare_optimizer(optimizer, *args, **kwargs)

        def backward(self, *args: Any, **kwargs: Any) -> Any:
            dry_run.backward_begins()
            super().backward(*args, **kwargs)
            dry_run.backward_ended()

        def gather_for_metrics(self, input_data: Any, *args: Any, **kwargs: Any) -> Any:
            gathered = super().gather_for_metrics(input_data, *args, **kwargs)
            with _disable_current_modes():
                return tree_map(zeros, gathered)  # metrics are computed outside torch, too

        def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
            inner = dataloader.inner if isinstance(dataloader, DryRunLoader) else dataloader
            return wrapped(super().skip_first_batches(inner, num_batches))

    def zeros(leaf: Any) -> Any:
        return torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf

    def wrapped(prepared: Any) -> Any:
        return DryRunLoader(prepared, dry_run) if isinstance(prepared, PreparedLoader) else prepared

    return DryRunAccelerator


def dry_run_script(script: Path, arguments: Sequence[str], device: Device) -> tuple[Trace, int]:
    """Run a script up to its second update; for a process that does nothing else.

    Args:
        script: a Python file with a training loop on Headway's Accelerator, or on Accelerate's where Headway stands in for it.
        arguments: its own.
        device: the target.

    Returns:
        The memory of its first updates, and the samples of its first batch; 0: not known.

    Raises:
        ConfigError: there is no such file, or it made no update.
        UnsupportedError: the step cannot be traced; the operation and the line are named.
    """
    if not script.is_file():
        raise ConfigError(f"there is no script {script}")
    dry_run = ScriptDryRun(device)
    # Whatever builds on the Accelerator (the Trainer, Accelerate's name) is imported after this and takes this one.
    begin_forecast()
    home = sys.modules[Accelerator.__module__]
    home.__dict__["Accelerator"] = watched_by(dry_run)
    sys.modules["headway"].__dict__.pop("Accelerator", None)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(str(script), run_name="__main__")
    except HeadwayError:
        if dry_run.num_updates < STEPS:
            raise
    except SystemExit as leaving:
        if leaving.code not in (None, 0) and dry_run.num_updates < STEPS:
            raise ConfigError(f"{script} ended with {leaving.code!r} before its second update") from leaving
    except BaseException as error:
        if dry_run.num_updates < STEPS:
            if isinstance(error, Exception) and dry_run.is_running:
                raise explained(error, dry_run.tracker.last) from error
            raise
        if not isinstance(error, Exception | DryRunResult):
            raise
    finally:
        trace = dry_run.end()
    if dry_run.num_updates == 0:
        raise ConfigError(
            f"{script} made no update: it must prepare a model, an optimizer and a loader with an Accelerator, and step the optimizer"
        )
    return trace, dry_run.batch_size or 0
