"""Container of the parts that track a run's training loop, collect its state for checkpoints, and restore it."""

from headway.core.checkpoint.loading.reader import CheckpointReader
from headway.core.checkpoint.resume.batch import GlobalBatch
from headway.core.checkpoint.resume.collector import StateCollector
from headway.core.checkpoint.resume.frozen_parameters import FrozenParameters
from headway.core.checkpoint.resume.frozen_weights import FrozenWeights
from headway.core.checkpoint.resume.local_sgd_state import LocalSGDState
from headway.core.checkpoint.resume.objects import CheckpointedObjects
from headway.core.checkpoint.resume.progress import LoopProgress
from headway.core.checkpoint.resume.restorer import StateRestorer
from headway.core.checkpoint.saving.saver import Saver
from headway.core.training.local_blocks import LocalTraining
from headway.core.training.prepared.prepare import Preparation
from headway.core.training.run import Run
from headway.core.training.step import TrainingStep


class CheckpointState:
    """Container of the parts that save and restore the state of one run.

    Args:
        run: Run of the Accelerator.
        preparation: Prepared objects of the Accelerator.
        step: Training step of the Accelerator.
        local_training: Local SGD state of the Accelerator.

    Attributes:
        run: Run of the Accelerator.
        objects: Objects whose state is saved in checkpoints.
        local: Object that collects and restores the state that differs between ranks under local SGD.
        progress: Progress of the loop through its epochs and loaders.
        collector: Collector of the state for a checkpoint.
        restorer: Restorer of the state from a checkpoint.
        saver: Coordinator of saves.
        reader: Reader of checkpoints.
    """

    def __init__(self, run: Run, preparation: Preparation, step: TrainingStep, local_training: LocalTraining) -> None:
        self.run = run
        self.saver = Saver(run.runtime, run.collectives, run.clock)
        self.reader = CheckpointReader(run.runtime, run.collectives)
        self.objects = CheckpointedObjects(run, preparation, step)
        self.local = LocalSGDState(local_training, preparation, run.collectives)
        self.progress = LoopProgress(self.objects, self.local)
        batch = GlobalBatch(preparation.loaders, run.windows)
        frozen_weights = FrozenWeights(run.collectives)
        frozen_parameters = FrozenParameters(self.objects.list_bare_models, run.hooks)
        self.collector = StateCollector(
            objects=self.objects,
            progress=self.progress,
            local=self.local,
            batch=batch,
            frozen_weights=frozen_weights,
            frozen_parameters=frozen_parameters,
        )
        self.restorer = StateRestorer(
            objects=self.objects,
            progress=self.progress,
            reader=self.reader,
            local=self.local,
            batch=batch,
            frozen_weights=frozen_weights,
            frozen_parameters=frozen_parameters,
        )
