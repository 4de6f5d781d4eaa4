"""Description of the latest Accelerator, for classes and functions that have no Accelerator at hand."""

import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

from headway.core.config.compilation import TorchDynamoPlugin
from headway.core.config.layout_choice import ResolvedLayout
from headway.core.runtime.collectives.checked import Collectives
from headway.core.training.run import Run
from headway.core.training.windows import AccumulationWindows


@dataclass(eq=False)
class AcceleratorFacts:
    """Description of one Accelerator that remains available after the Accelerator has been freed.

    It holds no reference to prepared objects, so these are freed with their Accelerator.

    Attributes:
        latest: Description of the Accelerator that was created last, or None.
        collectives: Collectives over all processes.
        mixed_precision: "no", "bf16", "fp16" or "fp8".
        windows: Weak reference to the accumulation windows. `accumulation` returns the windows themselves.
        adjust_scheduler: Whether the lengths of schedules are counted in micro-batches.
        resolved_layout: Layout of the run, with its options.
        dynamo_plugin: Settings of torch.compile.
        device_mesh: torch's device mesh, or None if the layout has none.
        is_available_after_end: Whether state classes (such as PartialState) still describe the run after
            `end_training()`.
    """

    latest: ClassVar["AcceleratorFacts | None"] = None
    collectives: Collectives
    mixed_precision: str
    windows: weakref.ref[AccumulationWindows]
    adjust_scheduler: bool
    resolved_layout: ResolvedLayout
    dynamo_plugin: TorchDynamoPlugin
    device_mesh: Any
    is_available_after_end: bool = True

    @property
    def accumulation(self) -> AccumulationWindows | None:
        """The accumulation windows, or None if their Accelerator has been freed."""
        return self.windows()


def publish_facts(run: Run) -> AcceleratorFacts:
    """Create the description of a run's Accelerator, store it as `AcceleratorFacts.latest`, and return it."""
    facts = AcceleratorFacts(
        collectives=run.collectives,
        mixed_precision=run.mixed_precision,
        windows=weakref.ref(run.windows),
        adjust_scheduler=run.accumulation.adjust_scheduler,
        resolved_layout=run.layout,
        dynamo_plugin=run.compilation,
        device_mesh=getattr(run.strategy, "mesh", None),
    )
    AcceleratorFacts.latest = facts
    return facts
