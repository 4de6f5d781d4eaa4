"""Objects of a run whose state is saved in checkpoints, and the run's RNG states."""

from dataclasses import asdict
from typing import Any

import torch

from headway.core.checkpoint.state import Stateful, StatefulObjects
from headway.core.runtime.seed import read_rng_states, write_rng_states
from headway.core.training.prepared.prepare import Preparation
from headway.core.training.run import Run
from headway.core.training.step import TrainingStep
from headway.core.weights.compiled import rename_bare_items
from headway.core.weights.pieces import is_sharded

_LOADERS = "loaders"
"""Key in the dict of RNG states for the generator from which loaders draw the order of samples."""


class CheckpointedObjects:
    """Objects of one run whose state is saved in checkpoints.

    Args:
        run: Run of the Accelerator.
        preparation: Prepared objects of the Accelerator.
        step: Training step of the Accelerator.

    Attributes:
        run: Run of the Accelerator.
        preparation: Prepared objects of the Accelerator.
        step: Training step of the Accelerator.
        loaders: Prepared loaders. The run may add loaders to this list later.
    """

    def __init__(self, run: Run, preparation: Preparation, step: TrainingStep) -> None:
        self.run = run
        self.preparation = preparation
        self.step = step
        self.loaders = preparation.loaders

    @property
    def models(self) -> list[torch.nn.Module]:
        """Prepared models, as `prepare` returned them."""
        return list(self.preparation.models)

    def list_bare_models(self) -> list[torch.nn.Module]:
        """Return the models without wrappers such as DDP's and torch.compile's.

        Full parameters that are currently gathered from their shards are freed first.
        """
        strategy = self.run.strategy
        for model in self.preparation.models:
            strategy.free_gathered(model)
        return [getattr(model, "_orig_mod", model) for model in map(strategy.unwrap_model, self.preparation.models)]

    def list_stateful(self) -> StatefulObjects:
        """Return the models, optimizers, schedulers and registered objects, with functions to access their state."""
        strategy = self.run.strategy
        other_objects: dict[str, list[Stateful]] = {
            "scheduler": [each.scheduler for each in self.preparation.schedulers],
            "custom": list(self.run.custom),
        }
        return StatefulObjects(
            self.list_bare_models(),
            [each.optimizer for each in self.preparation.optimizers],
            other_objects,
            export=lambda model: rename_bare_items(strategy.export_state(model)),
            get_part=strategy.get_part,
            expose_state=strategy.expose_state,
            apply_loaded_values=strategy.apply_loaded_values,
        )

    @property
    def is_sharded(self) -> bool:
        """Whether any model state is sharded over ranks."""
        export = self.run.strategy.export_state
        return any(is_sharded(value) for model in self.list_bare_models() for _, value in export(model))

    def read_piece_size(self) -> dict[str, int | None]:
        """Return the state of automatic micro-batching, or {} if batches are not split automatically.

        It contains the limit on rows per micro-batch, and the state of the search for this limit.
        """
        return {} if self.step.pieces is None else asdict(self.step.pieces)

    def read_rng_states(self) -> dict[str, Any]:
        """Return the states of all random generators by name, including the separate generator of the loaders."""
        return {**read_rng_states(self.run.runtime.hardware), _LOADERS: self.preparation.loader_rng.state()}

    def write_rng_states(self, rng_states: dict[str, Any], loader_rng: torch.Tensor | None) -> None:
        """Set the states of all random generators.

        Args:
            rng_states: States by name. An entry for the loaders' generator is ignored in favor of `loader_rng`.
            loader_rng: State of the loaders' separate generator. None if they use torch's global generator.
        """
        own = {name: state for name, state in rng_states.items() if name != _LOADERS}
        write_rng_states(own, self.run.runtime.hardware)
        self.preparation.loader_rng.load_state(loader_rng)

    def exchange_errors(self, failure: str | None) -> list[str]:
        """Send this rank's error message, or None, to all ranks. Return the error messages of all ranks.

        Every rank must call it. All ranks get an identical list, so that either all of them continue or none does. In a
        run with several ranks, each message begins with its rank.
        """
        failures = self.run.collectives.gather_objects(failure)
        if len(failures) == 1:
            return [text for text in failures if text is not None]
        return [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
