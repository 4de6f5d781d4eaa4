"""Collect the state of a run for a checkpoint."""

import secrets
import time
from dataclasses import asdict
from typing import Any

import torch

from headway.core.checkpoint.format.values import encode_value
from headway.core.checkpoint.resume.batch import GlobalBatch
from headway.core.checkpoint.resume.comparison import get_layout_sizes
from headway.core.checkpoint.resume.dropped_loaders import is_dropped
from headway.core.checkpoint.resume.evaluations import EvaluationStart
from headway.core.checkpoint.resume.frozen_parameters import FrozenParameters
from headway.core.checkpoint.resume.frozen_weights import FrozenWeights
from headway.core.checkpoint.resume.loader_positions import list_loader_lengths, list_loader_states
from headway.core.checkpoint.resume.local_sgd_state import LocalSGDState
from headway.core.checkpoint.resume.objects import CheckpointedObjects
from headway.core.checkpoint.resume.progress import LoopProgress
from headway.core.checkpoint.resume.schedules import list_schedule_units
from headway.core.checkpoint.resume.window_snapshot import WindowSnapshot, has_changing_state
from headway.core.checkpoint.state import CollectedState, collect_state, map_parameter_names
from headway.core.data.loader import PreparedLoader
from headway.core.training.seen_data import SeenTotals
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
        self._warn_of_missing_state()
        collected, loader_states = self._collect_own_objects(evaluation_start, is_alone)
        if not saves_frozen:
            self._frozen_weights.replace_with_digests(collected, self._objects.list_bare_models(), is_alone)
        seen = self._gather_positions(collected, loader_states, is_alone)
        run = self._describe_run() | self._describe_position(evaluation_start)
        collected.state["run"] = run
        if not is_alone:
            run["exchange_orders"] = self._list_reduction_orders()
            self._local.add_rank_values(collected, run["local_steps"])
        if evaluation_start is None:
            self._progress.record_saved_epoch(run["epoch"])
            if not is_alone:  # copies in memory are made after every update, and must not cause a warning
                self._windows.reads.record_save(self._windows.is_unfinished)
        about = self._describe_checkpoint(run["epoch"]) | seen.to_dict()
        if is_alone:
            about["saved_by"] = [self._run.runtime.rank]
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
        start = self._find_resume_point(evaluation_start)
        rng_states = None if start is None else start.rng_states
        if rng_states is None:
            rng_states = self._objects.read_rng_states()
        self._store_by_rank(collected, "streams", self._gather_by_rank(rng_states, is_alone))
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

    @property
    def _window_start(self) -> WindowSnapshot | None:
        """Snapshot of the start of the open accumulation window. None if no window is open or no snapshot was made."""
        return self._progress.window_start if self._windows.is_unfinished else None

    def _find_resume_point(self, evaluation_start: EvaluationStart | None) -> WindowSnapshot | EvaluationStart | None:
        """Return the state before the save from which a resumed run continues, repeating the work done since then.

        Return None if the run continues exactly where it was saved. An unfinished accumulation window takes precedence
        over an evaluation.

        Args:
            evaluation_start: State at the start of the evaluation in progress. None without one.
        """
        return self._window_start if self._windows.is_unfinished else evaluation_start

    def _warn_of_missing_state(self) -> None:
        """Warn if the checkpoint is incomplete, or if an accumulation window is open.

        It is incomplete if optimizers are prepared without a model, or if training runs without a prepared optimizer.
        """
        is_unfinished = self._windows.is_unfinished
        preparation = self._objects.preparation
        # A registered object may contain the model.
        if preparation.optimizers and not preparation.models and not self._run.custom:
            log.warning_once(
                "no model is prepared, so this checkpoint lacks its weights: pass it to accelerator.prepare() with its optimizer"
            )
        # Without an optimizer, only an open window shows that the script trains.
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
        self, evaluation_start: EvaluationStart | None, is_alone: bool
    ) -> tuple[CollectedState, list[dict[str, Any]]]:
        """Return the state of this rank's objects, and the states of its loaders.

        While an accumulation window is open, buffers, extra states and loader states are those of the window's start.
        If a `state_dict` fails on one rank, all ranks raise an error instead of waiting for that rank.

        Args:
            evaluation_start: State at the start of the evaluation in progress, or None. Ignored while an accumulation
                window is open.
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
            window_start = self._window_start
            if window_start is not None and window_start.forward_state is not None:
                window_start.forward_state.replace_state(collected)
            if evaluation_start is None or self._windows.is_unfinished:
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

    def _gather_positions(
        self, collected: CollectedState, loader_states: list[dict[str, Any]], is_alone: bool
    ) -> SeenTotals:
        """Store the loaders' states of all ranks in the state, and return the totals of samples and tokens.

        Both need the values of all ranks, so one collective is enough.

        Args:
            collected: State to extend.
            loader_states: States of this rank's loaders.
            is_alone: Whether only this rank calls it. The tokens of other ranks are then estimated.
        """
        seen = self._run.seen
        counts = seen.read_counts() if self._window_start is None else self._window_start.seen
        gathered = self._gather_by_rank((loader_states, seen.list_share(counts)), is_alone)
        self._store_by_rank(collected, "loaders", {rank: states for rank, (states, _) in gathered.items()})
        if is_alone:
            return seen.estimate_totals(counts)
        return seen.add_up(counts.samples, [share for _, share in gathered.values()])

    def _gather_by_rank(self, own_value: Any, is_alone: bool) -> dict[int, Any]:
        """Return the values of all ranks by rank, or only this rank's value if only this rank calls it."""
        run = self._run
        if is_alone:
            return {run.runtime.rank: own_value}
        return dict(enumerate(run.collectives.gather_objects(own_value)))

    def _store_by_rank(self, collected: CollectedState, name: str, values: dict[int, Any]) -> None:
        """Store values of ranks as a list under one key of the state, and their tensors among its tensors."""
        collected.state[name] = [
            encode_value(value, f"{name}/{rank}", collected.tensors) for rank, value in values.items()
        ]

    def _list_reduction_orders(self) -> list[Any]:
        """Return, for each prepared model, the order in which its gradients are reduced."""
        return [self._run.strategy.get_reduction_order(each) for each in self._objects.preparation.models]

    def _describe_run(self) -> dict[str, Any]:
        """Return the run's counters and settings at the time of the save, as JSON values (`SavedRun`)."""
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
            "prepared_in": [None if each.origin is None else each.origin.epoch for each in preparation.loaders],
            "prepared_by": ["" if each.origin is None else each.origin.lines for each in preparation.loaders],
            "prepared_before": [
                None if each.origin is None else each.origin.previous_epoch for each in preparation.loaders
            ],
            "dropped": self._list_dropped_loaders(),
            "absent_loaders": run.prepared.num_absent_loaders,
            "lengths": list_loader_lengths(preparation.loaders),
            "units": list_schedule_units(preparation),
            "seed": torch.initial_seed() & ((1 << 63) - 1),
            "data_shards": run.strategy.data_shard.count,
            "counts_epochs": self._progress.counts_epochs,
            "trained_on": [self._get_loader_index(each) for each in windows.reads.trained_on],
            # In a pipeline, a rank has the parameters of its own stage only.
            **({} if "pp" in get_layout_sizes(run.strategy) else {"frozen": self._frozen_parameters.list_names()}),
            "read_in_training": [self._get_loader_index(each) for each in windows.reads.read_in_training],
        }

    def _describe_position(self, evaluation_start: EvaluationStart | None) -> dict[str, Any]:
        """Return the position at which a resumed run continues, as JSON values (`SavedRun`).

        Args:
            evaluation_start: State at the start of the evaluation in progress, or None.
        """
        progress = self._progress
        window_start = self._window_start
        start = self._find_resume_point(evaluation_start)
        position: dict[str, Any] = {
            "epoch": progress.compute_next_epoch(),
            "pieces": self._objects.read_piece_size() if window_start is None else window_start.pieces,
            "local_steps": self._local.list_steps() if window_start is None else window_start.local_steps,
        }
        finished_passes = progress.passes.count_finished()
        if start is not None:
            position["epoch"] = start.epoch
            finished_passes = start.finished_passes
            num_calls = [each.num_calls for each in self._objects.preparation.schedulers]
            position["repeated_calls"] = [now - before for now, before in zip(num_calls, start.num_calls)]
        if position["epoch"] > progress.epoch:  # the run continues in the next epoch, in which no pass is finished yet
            finished_passes = {}
        position["passes_over"] = progress.passes.list_by_loader(finished_passes)
        return position

    def _list_dropped_loaders(self) -> list[int]:
        """Return the indices of the loaders, prepared in an epoch, to which this rank's script no longer refers."""
        loaders, reads = self._objects.loaders, self._windows.reads
        lists = [reads.trained_on, reads.read_in_training]
        indices = [index for index, each in enumerate(loaders) if each.origin is not None]
        return [index for index in indices if is_dropped(loaders, index, lists)]

    def _get_loader_index(self, loader: PreparedLoader) -> int:
        """Return the index of a prepared loader, or of the loader of which it is a view."""
        # A view that skips batches is another object with the same seed.
        return [each.seed for each in self._objects.loaders].index(loader.seed)

    def _describe_checkpoint(self, epoch: int) -> dict[str, Any]:
        """Return the `about` section of the manifest.

        Args:
            epoch: Epoch at which a resumed run continues.
        """
        run = self._run
        return {
            "num_updates": run.clock.num_updates,
            "epoch": epoch,
            "world_size": run.runtime.world_size,
            **({"layout": axes} if (axes := get_layout_sizes(run.strategy)) else {}),
            "accumulation": self._windows.num_steps,
            "global_batch": self._batch.get_size(),
            "was_in_mid_window": self._windows.is_unfinished,
            "run": secrets.token_hex(8) if run.run_id is None else run.run_id,
            "device": run.runtime.hardware.kind,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": {"headway": __version__, "torch": torch.__version__},
            "notes": dict(run.notes),
        }
