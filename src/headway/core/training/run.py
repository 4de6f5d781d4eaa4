"""`Run`: the objects that the components of an Accelerator share. `headway.core.training.build` creates it."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from headway.core.config.compilation import TorchDynamoPlugin
from headway.core.config.engines import EngineOptions
from headway.core.config.layout_choice import ResolvedLayout
from headway.core.config.run import GradientAccumulationPlugin
from headway.core.data.loader import LoaderEvents
from headway.core.precision.mixed import Precision
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.process import ProcessRuntime
from headway.core.strategies.base import Strategy
from headway.core.training.hooks import StepHooks
from headway.core.training.prepared.objects import PreparedObjects
from headway.core.training.seen_data import SeenData
from headway.core.training.update_clock import UpdateClock
from headway.core.training.windows import AccumulationWindows


@dataclass(eq=False)
class Run:
    """Objects that an Accelerator's training step, guards, checks, loaders and checkpoints share.

    A component receives either the run, or only the fields that it needs.

    Attributes:
        runtime: Runtime of this process.
        collectives: Collectives over all processes.
        layout: Layout of the run, with its options.
        mixed_precision: "no", "bf16", "fp16" or "fp8".
        accumulation: Options of gradient accumulation.
        compilation: Settings of torch.compile.
        replays_batches: Whether a batch that ran out of memory is run again in smaller micro-batches.
        strategy: Strategy that runs backward and reduces gradients.
        precision: Precision that scales losses.
        clock: Counter of updates.
        seen: Counter of the samples and tokens that the run has trained on.
        events: Callbacks for events of the loaders.
        prepared: Prepared models, optimizers, loaders and schedulers.
        windows: Accumulation windows.
        hooks: Lists of hooks into the training step. A list is empty unless a feature needs its hook.
        run_id: ID of the run in the manifests of its checkpoints. A resumed run keeps it. None before the first save or
            load.
        custom: Objects that the script registered for checkpoints.
        notes: Values, by name, that components of the run store in the manifest of each checkpoint.
        around_save: Function that returns the context in which a checkpoint is collected and written. Default: a
            context that does nothing.
    """

    runtime: ProcessRuntime
    collectives: Collectives
    layout: ResolvedLayout
    mixed_precision: str
    accumulation: GradientAccumulationPlugin
    compilation: TorchDynamoPlugin
    replays_batches: bool
    strategy: Strategy
    precision: Precision
    clock: UpdateClock
    seen: SeenData
    events: LoaderEvents
    prepared: PreparedObjects
    windows: AccumulationWindows
    hooks: StepHooks
    run_id: str | None = None
    custom: list[Any] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    around_save: Any = nullcontext

    @property
    def options(self) -> EngineOptions:
        """Options from `kwargs_handlers`: for DDP, autocast, GradScaler, the process group and layouts."""
        return self.layout.options
