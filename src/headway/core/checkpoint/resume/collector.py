"""Collect the state of a run for a checkpoint."""

import secrets
import time
from dataclasses import asdict
from typing import Any

import torch

from headway.core.checkpoint.format.values import encode_value
from headway.core.checkpoint.resume.batch import GlobalBatch
from headway.core.checkpoint.resume.comparison import get_layout_sizes, list_schedule_units
from headway.core.checkpoint.resume.frozen_parameters import FrozenParameters
from headway.core.checkpoint.resume.frozen_weights import FrozenWeights
from headway.core.checkpoint.resume.local_sgd_state import LocalSGDState
from headway.core.checkpoint.resume.objects import CheckpointedObjects
from headway.core.checkpoint.resume.positions import (
    EvaluationStart,
    has_changing_state,
    list_loader_lengths,
    list_loader_states,
)
from headway.core.checkpoint.resume.progress import LoopProgress
from headway.core.checkpoint.state import CollectedState, collect_state, map_parameter_names
from headway.core.data.loader import PreparedLoader
from headway.errors import CheckpointError
from headway.log import get_logger
from headway.version import __version__

log = get_logger(__name__)


class StateCollector:
    """Collector of the state of a run (models, optimizers, loaders, counters, RNG states) for a checkpoint.

    Args:
        objects: Objects of the run.
        progress: Progress of the run's training loop.
        local: Object that collects and restores the state that differs between ranks under local SGD.
        batch: Global batch of the run.
        frozen_weights: Object that replaces frozen weights by digests, if a checkpoint should not hold their values.
        frozen_parameters: Names of frozen parameters.
    """

    def __init__(
        self,
        objects: CheckpointedObjects,
        progress: LoopProgress,
        local: LocalSGDState,
        batch: GlobalBatch,
        frozen_weights: FrozenWeights,
        frozen_parameters: FrozenParameters,
    ) -> None:
        self._objects = objects
        self._run = objects.run
        self._windows = objects.run.windows
        self._progress = progress
        self._local = local
        self._batch = batch
        self._frozen_weights = frozen_weights
        self._frozen_parameters = frozen_parameters

    def collect(
        self, evaluation_start: EvaluationStart | None = None, is_alone: bool = False, saves_frozen: bool = True
    ) -> tuple[CollectedState, dict[str, Any]]:
        """Return the state of all ranks except their RNG states, and the manifest's `about` section.

        Every rank must call it unless `is_alone` is True. Within an accumulation window, the result describes the run
        at the start of the window, except for registered objects, whose state is saved as it is now.

        Args:
            evaluation_start: State at the start of the evaluation in progress, at which a resumed run continues.
                Default: None, no evaluation is in progress.
            is_alone: Whether only this rank's state is collected, without communication. Default: False.
            saves_frozen: Whether to include the values of frozen weights. False: only their digests. Default: True.

        Raises:
            CheckpointError: If the state of an object cannot be collected on another rank, or holds something that only
                pickle could store. A rank on which user code fails raises that error instead.
        """
        objects = self._objects
        progress = self._progress
        is_unfinished = self._windows.is_unfinished
        self._warn_of_missing_state(is_unfinished)
        collected, loaders = self._collect_own_objects(evaluation_start, is_unfinished, is_alone)
        if not saves_frozen:
            self._frozen_weights.replace_with_digests(collected, objects.list_bare_models(), is_alone)
        self._gather_into(collected, "loaders", loaders, is_alone)
        run = self._describe_run()
        about = self._describe_checkpoint(is_unfinished)
        window_start = progress.window_start if is_unfinished else None
        if window_start is None:
            run["pieces"] = objects.read_piece_size()
            run["local_steps"] = self._local.list_steps()
        else:
            run["pieces"] = window_start.pieces
            run["local_steps"] = window_start.local_steps
        if not is_alone:
            run["exchange_orders"] = self._list_reduction_orders()
            self._local.add_rank_values(collected, run["local_steps"])
        # The resumed run continues at the start of the window or evaluation, and repeats what came after it.
        start = window_start if is_unfinished else evaluation_start
        finished_passes = progress.passes.count_finished()
        if start is not None:
            run["epoch"] = about["epoch"] = start.epoch
            finished_passes = start.finished_passes
            num_calls = [each.num_calls for each in objects.preparation.schedulers]
            run["repeated_calls"] = [now - before for now, before in zip(num_calls, start.num_calls)]
        if evaluation_start is None:
            progress.record_saved_epoch(run["epoch"])
            if not is_alone:  # copies in memory are made after every update, and must not cause a warning
                self._windows.record_save()
        # In the next epoch, no pass is finished yet.
        run["passes_over"] = progress.passes.list_by_loader(finished_passes if run["epoch"] <= progress.epoch else {})
        collected.state["run"] = run
        if is_alone:
            about = about | {"saved_by": [self._run.runtime.rank]}
        else:
            about = self._run.collectives.broadcast_object(about)
        self._run.run_id = about["run"]
        return collected, about

    def collect_own(self) -> tuple[CollectedState, dict[str, Any]]:
        """Return this rank's state, including its RNG states, and the manifest's `about` section.

        Called between two accumulation windows. This needs no communication. The result lacks the loader states and RNG
        states of the other ranks.
        """
        collected, about = self.collect(None, is_alone=True)
        collected.state["run"]["exchange_orders"] = self._list_reduction_orders()
        self.add_rng_states(collected, None, is_alone=True)
        return collected, {key: value for key, value in about.items() if key != "saved_by"}

    def add_rng_states(
        self, collected: CollectedState, evaluation_start: EvaluationStart | None = None, is_alone: bool = False
    ) -> None:
        """Add the RNG states to a collected state. All ranks that have called `collect` must call it.

        It is called last, because user code in a save might draw random numbers. Within an accumulation window, the
        states are those of its start, if they were recorded. Later saves within a window then find them recorded.

        Args:
            collected: State to extend.
            evaluation_start: State at the start of the evaluation in progress, whose RNG states are added. Default:
                None, no evaluation is in progress.
            is_alone: Whether only this rank calls it, so that only its own RNG states are added. Default: False.
        """
        start = self._progress.window_start if self._windows.is_unfinished else evaluation_start
        rng_states = None if start is None else start.rng_states
        if rng_states is None:
            rng_states = self._objects.read_rng_states()
        self._gather_into(collected, "streams", rng_states, is_alone)
        self._progress.expect_saves()

    def replace_frozen_weights(self, collected: CollectedState) -> None:
        """Replace frozen weights in a collected state with their digests. Every rank must call it."""
        self._frozen_weights.replace_with_digests(collected, self._objects.list_bare_models(), is_alone=False)

    def list_step_tensors(self, collected: CollectedState) -> set[str]:
        """Return the names of tensors that change only in an optimizer step: parameters and optimizer states.

        Return an empty set under local SGD, because averaging changes these tensors too.
        """
        if self._local.has_diverged or any(self._local.list_steps()):
            return set()
        parameters = {f"model/{name}" for name in map_parameter_names(self._objects.list_bare_models()).values()}
        return {
            name
            for name in collected.tensors
            if name in parameters or (name.startswith("optimizer/") and name.split("/", 3)[2] != "groups")
        }

    # ---------------------------------------------------------------- parts of the state

    def _warn_of_missing_state(self, is_unfinished: bool) -> None:
        """Warn if no model or optimizer is prepared, or if an accumulation window is open.

        Args:
            is_unfinished: Whether an accumulation window is open.
        """
        preparation = self._objects.preparation
        if preparation.optimizers and not preparation.models and not self._run.custom:
            log.warning_once(
                "no model is prepared, so this checkpoint lacks its weights: pass it to accelerator.prepare() with its optimizer"
            )
        if not preparation.optimizers and is_unfinished:
            log.warning_once(
                "no optimizer is prepared, so this checkpoint lacks its state: pass it to accelerator.prepare() with its model"
            )
        elif is_unfinished:
            log.warning(
                "a checkpoint is saved in the middle of a window (%d of %d micro-batches); it resumes at the window's start%s",
                self._windows.current.num_done,
                self._windows.num_steps,
                self._describe_unrecorded_state(),
            )

    def _collect_own_objects(
        self, evaluation_start: EvaluationStart | None, is_unfinished: bool, is_alone: bool
    ) -> tuple[CollectedState, list[dict[str, Any]]]:
        """Return the state of this rank's objects, and the states of its loaders.

        If a `state_dict` fails on one rank, all ranks raise an error instead of waiting for that rank.

        Args:
            evaluation_start: State at the start of the evaluation in progress, or None.
            is_unfinished: Whether an accumulation window is open. Buffers, extra states and loader states are then
                those of the window's start, and `evaluation_start` is ignored.
            is_alone: Whether only this rank calls it, so that errors are not exchanged.

        Raises:
            CheckpointError: If the collection failed on another rank. The rank on which it failed raises its own error.
        """
        objects = self._objects
        failure: Exception | None = None
        collected = CollectedState()
        states: list[dict[str, Any]] = []
        try:
            collected = collect_state(objects.list_stateful())
            window_start = self._progress.window_start if is_unfinished else None
            if window_start is not None and window_start.forward_state is not None:
                window_start.forward_state.replace_state(collected)
            if evaluation_start is None or is_unfinished:
                states = list_loader_states(objects.loaders, window_start)
            else:
                states = evaluation_start.loader_states
        except Exception as error:
            failure = error
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        failures = [] if is_alone else objects.exchange_errors(message)
        if failure is not None:
            raise failure
        if failures:
            raise CheckpointError("nothing was saved; earlier checkpoints are unchanged.\n  " + "\n  ".join(failures))
        return collected, states

    def _describe_unrecorded_state(self) -> str:
        """Return a phrase for the log that lists the state which a save between two micro-batches stores as it is now.

        All other state is stored as of the start of the accumulation window. Return "" if this holds for all state.
        """
        window_start = self._progress.window_start
        parts = ["registered objects"] if self._run.custom else []
        if window_start is None or window_start.forward_state is None:
            parts += ["the models' buffers"] if has_changing_state(self._objects.list_bare_models()) else []
            parts += ["the RNG states"]
        return f", but for {' and '.join(parts)}, which are saved as they are now" if parts else ""

    def _gather_into(self, collected: CollectedState, name: str, own_value: Any, is_alone: bool) -> None:
        """Gather the values of all ranks, and store them as a list under one key of the state.

        Args:
            collected: State to extend.
            name: Key in the state.
            own_value: This rank's value.
            is_alone: Whether only this rank calls it. The list then has only this rank's value.
        """
        run = self._run
        values = (
            {run.runtime.rank: own_value} if is_alone else dict(enumerate(run.collectives.gather_objects(own_value)))
        )
        collected.state[name] = [
            encode_value(value, f"{name}/{rank}", collected.tensors) for rank, value in values.items()
        ]

    def _list_reduction_orders(self) -> list[Any]:
        return [self._run.strategy.get_reduction_order(each) for each in self._objects.preparation.models]

    def _describe_run(self) -> dict[str, Any]:
        """Return the counters and settings from which a resumed run continues, as JSON values (`SavedRun`)."""
        run = self._run
        windows = self._windows
        preparation = self._objects.preparation
        return {
            "num_updates": run.clock.num_updates,
            "optimizer_updates": [each.num_updates for each in preparation.optimizers],
            "batch": asdict(self._batch.get_state()),
            "ticks": preparation.tick_base,
            "nominal": windows.list_nominal_weights(preparation.models),
            "scaler": run.precision.state_dict(),
            "precision": run.precision.name,
            "seeds": [each.seed for each in preparation.loaders],
            "lengths": list_loader_lengths(preparation.loaders),
            "units": list_schedule_units(preparation),
            "seed": torch.initial_seed() & ((1 << 63) - 1),
            "data_shards": run.strategy.data_shard.count,
            "epoch": self._progress.compute_next_epoch(),
            "counts_epochs": self._progress.counts_epochs,
            "trained_on": [self._get_loader_index(each) for each in windows.trained_on],
            # In a pipeline, a rank has the parameters of its own stage only.
            **({} if "pp" in get_layout_sizes(run.strategy) else {"frozen": self._frozen_parameters.list_names()}),
            "read_in_training": [self._get_loader_index(each) for each in windows.read_in_training],
        }

    def _get_loader_index(self, loader: PreparedLoader) -> int:
        # A view that skips batches is another object with the same seed.
        return [each.seed for each in self._objects.loaders].index(loader.seed)

    def _describe_checkpoint(self, is_unfinished: bool) -> dict[str, Any]:
        """Return the `about` section of the manifest.

        Args:
            is_unfinished: Whether the checkpoint is saved within an accumulation window.
        """
        run = self._run
        return {
            "num_updates": run.clock.num_updates,
            "epoch": self._progress.compute_next_epoch(),
            "world_size": run.runtime.world_size,
            **({"layout": axes} if (axes := get_layout_sizes(run.strategy)) else {}),
            "accumulation": self._windows.num_steps,
            "global_batch": self._batch.get_size(),
            "was_in_mid_window": is_unfinished,
            "run": secrets.token_hex(8) if run.run_id is None else run.run_id,
            "device": run.runtime.hardware.kind,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": {"headway": __version__, "torch": torch.__version__},
            "notes": dict(run.notes),
        }
