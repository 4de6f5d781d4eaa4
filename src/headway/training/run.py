"""The run as its Accelerator set it up, for what scripts ask without the Accelerator: states and free functions."""

import weakref
from typing import Any, ClassVar

from headway.config.engines import TorchDynamoPlugin
from headway.config.layout_choice import ResolvedLayout
from headway.runtime.collectives.checked import Collectives
from headway.training.windows import AccumulationWindows


class AcceleratorRun:
    """One Accelerator's run; `AcceleratorRun.latest` is that of the Accelerator built last.

    Attributes:
        collectives: the way to the other processes.
        mixed_precision: "no", "bf16" or "fp16".
        adjust_scheduler: schedules are counted in micro-batches.
        chosen: how the run is spread.
        dynamo_plugin: what the Accelerator was given.
        device_mesh: torch's, where the layout has one.
        answers_after_end: states speak of this run even when its process runtime has ended.
    """

    latest: ClassVar["AcceleratorRun | None"] = None

    def __init__(
        self,
        collectives: Collectives,
        mixed_precision: str,
        accumulation: AccumulationWindows,
        adjust_scheduler: bool,
        chosen: ResolvedLayout,
        dynamo_plugin: TorchDynamoPlugin,
        device_mesh: Any = None,
    ) -> None:
        self.collectives = collectives
        self.mixed_precision = mixed_precision
        self.adjust_scheduler = adjust_scheduler
        self.chosen = chosen
        self.dynamo_plugin = dynamo_plugin
        self.device_mesh = device_mesh
        self.answers_after_end = True
        # Weakly: what was prepared goes with its Accelerator.
        self._accumulation = weakref.ref(accumulation)
        AcceleratorRun.latest = self

    @property
    def accumulation(self) -> AccumulationWindows | None:
        """The windows, while their Accelerator lives."""
        return self._accumulation()
