"""Replace Headway's Accelerator in a script by one that strips the values of models and reports its calls."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.accelerator import Accelerator
from headway.core.checkpoint.resume.comparison import RestoreResult
from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.tree import map_tensors
from headway.planning._torch import disable_current_modes
from headway.planning.dry_run.script_loaders import DryRunLoader
from headway.planning.dry_run.script_trace import ScriptDryRun


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
                return map_tensors(make_zeros, gathered)  # real zeros, because metrics may be computed outside of torch

        def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
            inner = dataloader.inner if isinstance(dataloader, DryRunLoader) else dataloader
            return wrap_loader(super().skip_first_batches(inner, num_batches))

    def make_zeros(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def wrap_loader(prepared: Any) -> Any:
        return DryRunLoader(prepared, dry_run) if isinstance(prepared, PreparedLoader) else prepared

    return DryRunAccelerator


class FilelessAccelerator(Accelerator):
    """Accelerator that saves, loads and tracks nothing.

    A dry run has no values to write. With the checkpoint of a finished run, it would have no updates left to trace.
    """

    def save_state(self, output_dir: str | Path | None = None, *args: Any, **kwargs: Any) -> Path:
        """Return the folder that a run would save into. Nothing is saved."""
        return Path(output_dir or self.project_dir or ".")

    def load_state(self, input_dir: str | Path | None = None, *args: Any, **kwargs: Any) -> RestoreResult:
        """Return the result of loading a checkpoint from before the first update. Nothing is loaded."""
        return RestoreResult(Path(input_dir or self.project_dir or "."), {"num_updates": 0, "epoch": 0})

    def resume(self, *args: Any, **kwargs: Any) -> None:
        """Return None, as a run without a checkpoint does."""

    def _ignore(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    save = save_model = push_to_hub = _ignore
    # Without a started run, `get_tracker` returns placeholders that do nothing.
    init_trackers = log = log_images = log_artifact = log_event = _ignore
