"""The run as its Accelerator set it up, for what scripts ask without the Accelerator: states and free functions."""

import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

from headway.config.engines import TorchDynamoPlugin
from headway.config.layout_choice import ResolvedLayout
from headway.runtime.collectives.checked import Collectives
from headway.training.windows import AccumulationWindows


@dataclass(eq=False)
class AcceleratorRun:
    """One Accelerator's run; `AcceleratorRun.latest` is that of the Accelerator built last.

    Attributes:
        collectives: the way to the other processes.
        mixed_precision: "no", "bf16" or "fp16".
        windows: held weakly, so that what was prepared goes with its Accelerator.
        adjust_scheduler: schedules are counted in micro-batches.
        chosen: how the run is spread.
        dynamo_plugin: what the Accelerator was given.
        device_mesh: torch's, where the layout has one.
        answers_after_end: states speak of this run even when its process runtime has ended.
    """

    latest: ClassVar["AcceleratorRun | None"] = None
    collectives: Collectives
    mixed_precision: str
    windows: weakref.ref[AccumulationWindows]
    adjust_scheduler: bool
    chosen: ResolvedLayout
    dynamo_plugin: TorchDynamoPlugin
    device_mesh: Any = None
    answers_after_end: bool = True

    def __post_init__(self) -> None:
        AcceleratorRun.latest = self

    @property
    def accumulation(self) -> AccumulationWindows | None:
        """The windows, while their Accelerator lives."""
        return self.windows()
