"""Restore a run's state from a checkpoint, all or nothing."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

import torch

from headway.core.checkpoint.loading.reader import CheckpointReader
from headway.core.checkpoint.loading.restoring import restore_objects
from headway.core.checkpoint.loading.rollback import LoadRollback
from headway.core.checkpoint.loading.target_layout import TargetLayout
from headway.core.checkpoint.resume.batch import BatchPlan, GlobalBatch
from headway.core.checkpoint.resume.comparison import RestoreResult, RunComparison
from headway.core.checkpoint.resume.frozen_parameters import FrozenParameters
from headway.core.checkpoint.resume.frozen_weights import FrozenWeights
from headway.core.checkpoint.resume.loader_positions import restore_loader_positions
from headway.core.checkpoint.resume.local_sgd_state import LocalSGDState
from headway.core.checkpoint.resume.objects import CheckpointedObjects
from headway.core.checkpoint.resume.progress import LoopProgress
from headway.core.checkpoint.resume.saved import SavedRun, read_run
from headway.core.checkpoint.resume.schedules import recount_schedules
from headway.core.runtime.events import notify_listeners
from headway.core.runtime.seed import seed_from_update
from headway.errors import CheckpointError, CollectiveError


class StateRestorer:
    """Restorer of one run's state from a checkpoint.

    If a step before the copy of the weights fails, all changes are undone. The weights are copied last, and a failure
    of that copy leaves the models partly changed.

    Args:
        objects: Objects of the run.
        progress: Progress of the run's training loop.
        reader: Reader of checkpoints.
        local: Object that collects and restores the state that differs between ranks under local SGD.
        batch: Global batch of the run.
        frozen_weights: Object that compares digests of frozen weights, if a checkpoint does not hold their values.
        frozen_parameters: Names of frozen parameters.
    """

    def __init__(
        self,
        objects: CheckpointedObjects,
        progress: LoopProgress,
        reader: CheckpointReader,
        local: LocalSGDState,
        batch: GlobalBatch,
        frozen_weights: FrozenWeights,
        frozen_parameters: FrozenParameters,
    ) -> None:
        run = objects.run
        self._objects = objects
        self._run = run
        self._progress = progress
        self._reader = reader
        self._local = local
        self._batch = batch
        self._frozen_weights = frozen_weights
        self._frozen_parameters = frozen_parameters
        self._comparison = RunComparison(
            run.runtime, run.collectives, run.strategy, run.precision, batch, objects.preparation
        )

    def load(
        self,
        path: Path,
        is_strict: bool,
        hooks: Sequence[Callable[[list[torch.nn.Module], str], None]] = (),
        changed: Collection[str] | None = (),
    ) -> RestoreResult:
        """Load a checkpoint. Every rank must call it.

        If this fails before the weights are copied, all changes are undone, except those that load hooks have made. A
        failed copy of the weights leaves the models partly changed.

        Args:
            path: Folder of the checkpoint.
            is_strict: Whether to refuse any difference from this run.
            hooks: Functions called with the list of models and the folder. A model that a hook removes from the list is
                not loaded. Default: (), no functions.
            changed: Parts of the run that were changed on purpose, as in `RunComparison.check`. With "data", the epoch
                starts over. Default: (), nothing was changed.

        Raises:
            CheckpointError: On every rank, if the checkpoint is missing, damaged or does not fit, or with `is_strict`
                if anything differs. Only on this rank, if its weights could not be copied.
        """
        objects = self._objects
        run = self._run
        parts = objects.list_stateful()
        manifest, saved_state = self._reader.read(path, TargetLayout(parts, run.runtime.rank, run.runtime.world_size))
        parts = self._frozen_weights.verify_and_exclude(saved_state, parts)
        self._local.replace_means(saved_state)
        saved_run = read_run(manifest.about, saved_state, run.runtime, run.precision, run.strategy.data_shard.count)
        restored = RestoreResult(path, manifest.about)
        # A script may register a hook on some ranks only.
        num_hooks = int(max(run.collectives.gather_numbers([float(len(hooks))]))[0])
        if num_hooks:  # hooks may load models themselves, so everything that does not depend on them is checked first
            parts.excluded_models = set(range(len(parts.models)))
            self._comparison.check(restored, parts, saved_state, saved_run, is_strict, changed)
            models_to_load = list(parts.models)
            for index in range(num_hooks):
                self._call_load_hook(hooks[index] if index < len(hooks) else None, models_to_load, path)
            parts.excluded_models = {
                index for index, model in enumerate(parts.models) if not any(model is each for each in models_to_load)
            }
        plan = self._comparison.check(restored, parts, saved_state, saved_run, is_strict, changed)
        is_data_replaced = "data" in (changed or ())
        restore_objects(
            parts,
            saved_state,
            lambda rollback: self._restore_position(saved_run, plan, is_data_replaced, rollback),
            objects.exchange_errors,
        )
        # Listeners are notified before the RNG states are set, because they might draw random numbers.
        notify_listeners(
            "resumed",
            step=saved_run.num_updates,
            source=run.clock,
            epoch=saved_run.epoch,
            folder=str(path),
            differences=restored.differences,
            notes=manifest.about.get("notes"),
        )
        self._restore_counters(saved_run, plan)
        self._progress.restore(saved_run, is_data_replaced)
        self._restore_rng_states(saved_run)
        self._frozen_parameters.compare_at_update(saved_run.frozen, str(path))
        self._local.resume_blocks(parts, saved_run.local_steps)
        return restored

    def _call_load_hook(
        self, hook: Callable[[list[torch.nn.Module], str], None] | None, models: list[torch.nn.Module], path: Path
    ) -> None:
        """Call a load hook, and raise an error on every rank if it fails on one.

        Args:
            hook: Function of the list of models and the folder. None: only other ranks have a hook.
            models: Models that will be loaded. The hook may remove some.
            path: Folder of the checkpoint.

        Raises:
            CheckpointError: If the hook has failed on another rank only. A rank on which it fails raises the hook's own
                error.
        """
        failure: Exception | None = None
        try:
            if hook is not None:
                hook(models, str(path))
        except Exception as error:
            # If all ranks have an error already, some of them raise it in the exchange below.
            if isinstance(error, CollectiveError) and error.is_on_all_ranks:
                raise
            failure = error
        try:
            message = None if failure is None else f"{type(failure).__name__}: {failure}"
            messages = self._objects.exchange_errors(message)
        except CollectiveError:
            if failure is None:
                raise
        if failure is not None:
            raise failure
        if messages:
            raise CheckpointError(f"{path} was not loaded, because a load hook failed:\n  " + "\n  ".join(messages))

    def _restore_position(
        self, saved_run: SavedRun, plan: BatchPlan, is_data_replaced: bool, rollback: LoadRollback
    ) -> None:
        """Restore the gradient scaler, the global batch, the loaders' positions and the RNG states.

        The scaler is restored only if the mixed precision is unchanged. Any of these steps can still fail.

        Args:
            saved_run: Counters and positions of the saved run.
            plan: Settings of loaders and gradient accumulation with which the run continues.
            is_data_replaced: Whether the loaders' data was replaced, so that they start the epoch at its first batch.
            rollback: Rollback to which an undo step is added before each change.
        """
        objects = self._objects
        precision = self._run.precision
        if saved_run.precision == precision.name:
            rollback.add("the scaler", partial(precision.restore, precision.snapshot()))
            precision.load_state_dict(saved_run.scaler)
        rollback.add("the global batch", self._batch.prepare_undo())
        self._batch.apply_plan(plan)
        restore_loader_positions(objects.loaders, saved_run, is_data_replaced, rollback)
        rng_states = objects.read_rng_states()
        rollback.add("the RNG states", partial(objects.write_rng_states, rng_states, rng_states.get("loaders")))
        self._restore_rng_states(saved_run)

    def _restore_rng_states(self, saved_run: SavedRun) -> None:
        """Set the saved RNG states. If the checkpoint has none for this rank, seed the generators anew.

        The new seed depends on the run's seed, the number of updates, and the index of this rank's data shard.
        """
        if saved_run.is_own:
            self._objects.write_rng_states(saved_run.rng_states, saved_run.loader_rng)
        else:
            seed_from_update(saved_run.seed, saved_run.num_updates, self._run.strategy.data_shard.index)
            self._objects.preparation.loader_rng.load_state(saved_run.loader_rng)

    def _restore_counters(self, saved_run: SavedRun, plan: BatchPlan) -> None:
        """Restore the counters of updates, scheduler steps and accumulation windows. Their values have been checked."""
        run = self._run
        windows = run.windows
        preparation = self._objects.preparation
        run.run_id = saved_run.run_id
        run.clock.resume(saved_run.num_updates)
        run.seen.resume(saved_run.seen)
        for optimizer, count in zip(preparation.optimizers, saved_run.optimizer_updates):
            optimizer.resume(count)
        recount_schedules(preparation, saved_run)
        for scheduler in preparation.schedulers:
            scheduler.catch_up()
        # Only with the same split of the data: otherwise this rank's batches differ.
        pieces = self._objects.step.pieces
        if saved_run.is_own and saved_run.pieces and pieces:
            pieces.restore_fields(**saved_run.pieces)
        if saved_run.is_own:
            for model, order in zip(preparation.models, saved_run.exchange_orders):
                run.strategy.set_reduction_order(model, order)
        self._objects.step.drop_all_gradients()
        windows.resume(preparation.models, saved_run.nominal, saved_run.num_updates)
        if plan.is_kept:
            preparation.keep_tick_base(*saved_run.ticks)
        loaders = preparation.loaders
        windows.reads.trained_on.extend(loaders[index] for index in saved_run.trained_on if index < len(loaders))
        windows.reads.read_in_training.extend(
            loaders[index] for index in saved_run.read_in_training if index < len(loaders)
        )
        for scheduler, count in zip(preparation.schedulers, saved_run.repeated_calls):
            scheduler.ignore_repeated(count)
