"""The state of a run: what a checkpoint takes from an Accelerator's objects, and puts back."""

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint.format.values import encode
from headway.checkpoint.loading.files import TargetLayout
from headway.checkpoint.loading.reader import CheckpointReader
from headway.checkpoint.loading.restoring import LoadRollback, restore
from headway.checkpoint.resume.batch import BatchPlan, GlobalBatch
from headway.checkpoint.resume.comparison import Restored, RunComparison, layout_of, recount_schedules, schedule_units
from headway.checkpoint.resume.positions import (
    Changed,
    EvaluationStart,
    EvaluationStarts,
    TrainingPasses,
    WindowSnapshot,
    has_changing_state,
    loader_lengths,
    loader_states,
    put_loaders_back,
)
from headway.checkpoint.resume.saved import SavedRun, read_run
from headway.checkpoint.resume.stand_ins import FrozenWeights, LocalState
from headway.checkpoint.saving.saver import Saver
from headway.checkpoint.state import CollectedState, Stateful, StatefulObjects, collect, parameter_names
from headway.data.loader import PreparedLoader
from headway.errors import CheckpointError
from headway.log import get_logger
from headway.precision.mixed import Precision
from headway.runtime.collectives.checked import Collectives
from headway.runtime.events import notify
from headway.runtime.process import ProcessRuntime
from headway.runtime.seed import derive_rng_states, read_rng_states, write_rng_states
from headway.strategies.base import Strategy
from headway.training.local_sgd import LocalTraining
from headway.training.prepared.prepare import Preparation
from headway.training.step import TrainingStep
from headway.training.windows import UpdateClock
from headway.version import __version__
from headway.weights.pieces import is_spread

log = get_logger(__name__)


class RunState:
    """The state of one Accelerator's run.

    Attributes:
        runtime, clock, windows: as they were given; those of the step.
        local: what each rank has of its own under local SGD.
        notes: what other parts want to find in each manifest again.
        evaluations: where a save in an evaluation goes back to.
        before_batches: called with a loader that updates are made from before each of its batches, where none is in hand.
        run_id: of the run, in each of its manifests; that of the run that is resumed. None before the first save or load.

    Args:
        runtime, collectives, strategy, precision, preparation, step, clock, local_training: the Accelerator's.
    """

    def __init__(
        self,
        runtime: ProcessRuntime,
        collectives: Collectives,
        strategy: Strategy,
        precision: Precision,
        preparation: Preparation,
        step: TrainingStep,
        clock: UpdateClock,
        local_training: LocalTraining,
    ) -> None:
        self.runtime, self.clock, self.windows = runtime, clock, step.windows
        self._step = step
        self.saver, self.reader = Saver(runtime, collectives, clock), CheckpointReader(runtime, collectives)
        self.custom: list[Stateful] = []
        self.epoch = 0
        self._is_saving = False
        self.notes: dict[str, Any] = {}
        self.run_id: str | None = None
        self._ask: Callable[[PreparedLoader], None] | None = None
        self.before_batches: list[Callable[[PreparedLoader], None]] = []
        self._passes = TrainingPasses(self.windows, preparation.loaders)
        self.evaluations = EvaluationStarts(
            self.windows, preparation.loaders, self._read_rng_states, self.next_epoch, self._passes
        )
        self._began: dict[int, int] | None = None
        self._told_over: int | None = None
        self._batch = GlobalBatch(preparation.loaders, self.windows)
        self._frozen = FrozenWeights(collectives)
        self.local = LocalState(local_training, preparation, collectives)
        self._comparison = RunComparison(runtime, collectives, strategy, precision, self._batch, preparation)
        self._collectives = collectives
        self._strategy = strategy
        self._precision = precision
        self._preparation = preparation
        self._mark: WindowSnapshot | None = None
        preparation.events.asked.append(self._before_fetch)

    @property
    def models(self) -> list[torch.nn.Module]:
        """The prepared models, as the user made them."""
        return list(self._preparation.models)

    @property
    def loaders(self) -> list[PreparedLoader]:
        """The prepared loaders."""
        return self._preparation.loaders

    @property
    def is_stopped(self) -> bool:
        """Has a loader been stopped, so that no further epoch should begin?"""
        return any(loader.is_stopped for loader in self._preparation.loaders)

    @property
    def is_without_loader(self) -> bool:
        """Does the loop take its batches from elsewhere, and whole?"""
        return not self.windows.active and not self.windows.is_cut

    def place(self, before: EvaluationStart | None = None) -> tuple[object, ...]:
        """Where the run is; a checkpoint of the same place holds the same (custom objects aside)."""
        states = [each.run_state() for each in self.loaders] if before is None else before.states
        positions = [(each["epoch"], each["consumed"]) for each in states]
        return self.clock.num_updates, self.windows.num_windows, self.windows.is_unfinished, *positions

    # ---------------------------------------------------------------- marks

    def expect_saves(self) -> None:
        """Checkpoints will be saved: marks of windows hold RNG states too from now on."""
        self._is_saving = True

    def ask_before_batches(self, ask: Callable[[PreparedLoader], None] | None) -> None:
        """Call `ask` with a loader before each of its batches, where the run may be asked to end; None: nobody asks."""
        self._ask = ask

    def _before_fetch(self, loader: PreparedLoader) -> None:
        # A loop may collect an update's micro-batches first; not from a loader that nothing is trained on.
        trained_on = {each.seed for each in self.windows.trained_on}
        most = self.windows.num_steps if not trained_on or loader.seed in trained_on else 1
        if is_free := self._preparation.events.is_free(loader, most):
            self._note_window()
        if self._began is not None:
            self._passes.note(loader)
            self._check_told()
        if self._ask is not None:
            self.evaluations.note(loader)
            if is_free:
                self._ask(loader)
        if self.before_batches and is_free and loader.seed in trained_on:
            for each in self.before_batches:
                each(loader)

    def _check_told(self) -> None:
        """A save in this epoch told that it was over: is something trained all the same?"""
        if self._told_over is not None and self.windows.num_windows > self._told_over:
            self._told_over = None
            log.warning_once(
                "a checkpoint was saved between two loops of epoch %d that train: it counts as saved at the epoch's end, and a run "
                "resumed from it leaves out the rest of the epoch. Save within the loops, or after the last of them",
                self.epoch,
            )

    def _note_window(self) -> None:
        """Note where a window begins, where one may be saved in its middle."""
        if self.windows.num_steps > 1 and not self.windows.is_unfinished:
            loaders = self._preparation.loaders
            # Reading all generators costs about 90 us.
            rng_states = self._read_rng_states() if self._is_saving else None
            changed = None
            if self._is_saving:
                changed = Changed() if self._mark is None or self._mark.changed is None else self._mark.changed
                changed.note(self._bare_models())
            states = [each.run_state(is_brief=True) for each in loaders]
            self._mark = WindowSnapshot(rng_states, states, self.local.steps(), self._pieces(), changed)

    def _pieces(self) -> dict[str, int | None]:
        return {} if self._step.pieces is None else asdict(self._step.pieces)

    def _read_rng_states(self) -> dict[str, Any]:
        return {**read_rng_states(self.runtime.hardware), "loaders": self._preparation.loader_rng.state()}

    # ---------------------------------------------------------------- out

    def _bare_models(self) -> list[torch.nn.Module]:
        for model in self._preparation.models:
            self._strategy.at_rest(model)
        return [getattr(model, "_orig_mod", model) for model in map(self._strategy.unwrap, self._preparation.models)]

    def _parts(self) -> StatefulObjects:
        preparation = self._preparation
        others: dict[str, list[Stateful]] = {
            "scheduler": [each.scheduler for each in preparation.schedulers],
            "custom": list(self.custom),
        }
        return StatefulObjects(
            self._bare_models(),
            [each.optimizer for each in preparation.optimizers],
            others,
            self._strategy.export_state,
            part_of=self._strategy.part_of,
            exposed=self._strategy.exposed,
            settle=self._strategy.settle,
        )

    def collect(
        self, before: EvaluationStart | None = None, is_alone: bool = False, saves_frozen: bool = True
    ) -> tuple[CollectedState, dict[str, Any]]:
        """The state of all ranks but their RNG states, and what a reader of the manifest wants to know.

        Every rank calls it, or, with `is_alone`, this one without the others.

        Args:
            before: the beginning of the evaluation in progress, which a resumed run is to go back to.
            is_alone: replicated state and this rank's own is all there is.
            saves_frozen: with the frozen weights' values; False: with their digests.
        """
        is_unfinished = self.windows.is_unfinished
        if is_unfinished:
            log.warning(
                "a checkpoint is saved in the middle of a window (%d of %d micro-batches); it resumes at the window's start%s",
                self.windows.current.num_done,
                self.windows.num_steps,
                self._not_marked(),
            )
        collected, states = self._collect_own(before, is_unfinished, is_alone)
        if not saves_frozen:
            self._frozen.take_out(collected, self._bare_models(), is_alone)
        self._add("loaders", states, collected, is_alone)
        run, about, over = self._run_state(), self._about(is_unfinished), self._passes.over()
        mark = self._mark if is_unfinished else None
        run["pieces"] = self._pieces() if mark is None else mark.pieces
        run["local_steps"] = steps = self.local.steps() if mark is None else mark.local_steps
        if not is_alone:
            run["exchange_orders"] = [self._strategy.exchange_order(each) for each in self.models]
            self.local.add(collected, steps)
        if before is not None and not is_unfinished:
            run["epoch"] = about["epoch"] = before.epoch
            over = before.over
        if self._began is not None and before is None and run["epoch"] > self.epoch:
            self._told_over = self.windows.num_windows
        run["passes_over"] = self._passes.state(over if run["epoch"] == self.epoch else {})
        collected.state["run"] = run
        about = about | {"saved_by": [self.runtime.rank]} if is_alone else self._collectives.broadcast_object(about)
        self.run_id = about["run"]
        return collected, about

    def collect_own(self) -> tuple[CollectedState, dict[str, Any]]:
        """The state between two windows with nothing but this rank's own loaders and RNG states; no rank is asked for anything."""
        collected, about = self.collect(None, is_alone=True)
        collected.state["run"]["exchange_orders"] = [self._strategy.exchange_order(each) for each in self.models]
        self.seal(collected, None, is_alone=True)
        return collected, {key: value for key, value in about.items() if key != "saved_by"}

    @property
    def is_sharded(self) -> bool:
        """Is anything of the models spread over ranks?"""
        return any(is_spread(value) for model in self._bare_models() for _, value in self._strategy.export_state(model))

    def leave_frozen_out(self, collected: CollectedState) -> None:
        """Put digests in the place of frozen weights; every rank calls it."""
        self._frozen.take_out(collected, self._bare_models(), is_alone=False)

    def steady(self, collected: CollectedState) -> set[str]:
        """Names of tensors that only an optimizer's step changes: parameters and what optimizers keep of them."""
        if self.local.has_parted or any(self.local.steps()):
            return set()  # there averages change them too
        parameters = {f"model/{name}" for name in parameter_names(self._bare_models()).values()}
        return {
            name
            for name in collected.tensors
            if name in parameters or (name.startswith("optimizer/") and name.split("/", 3)[2] != "groups")
        }

    def _collect_own(
        self, before: EvaluationStart | None, is_unfinished: bool, is_alone: bool
    ) -> tuple[CollectedState, list[dict[str, Any]]]:
        """This rank's state and its loaders'; where a `state_dict` fails, the other ranks hear of it instead of waiting."""
        failure: Exception | None = None
        collected, states = CollectedState(), []
        try:
            collected = collect(self._parts())
            mark = self._mark if is_unfinished else None
            if mark is not None and mark.changed is not None:
                mark.changed.put_into(collected)
            states = loader_states(self.loaders, mark) if before is None or is_unfinished else before.states
        except Exception as error:
            failure = error
        told = [] if is_alone else self._agree(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        if told:
            raise CheckpointError("nothing was saved; earlier checkpoints are as they were.\n  " + "\n  ".join(told))
        return collected, states

    def _not_marked(self) -> str:
        """What a save in the middle of a window does not take back to the window's start, in words."""
        parts = ["registered objects"] if self.custom else []
        if self._mark is None or self._mark.changed is None:
            parts += ["the models' buffers"] if has_changing_state(self._bare_models()) else []
            parts += ["the RNG states"]
        return f", but for {' and '.join(parts)}, which are saved as they are now" if parts else ""

    def seal(self, collected: CollectedState, before: EvaluationStart | None = None, is_alone: bool = False) -> None:
        """Add the RNG states, after all else of the user's that may draw from them has run; called like `collect`."""
        is_unfinished = self.windows.is_unfinished
        marked = self._mark.rng_states if is_unfinished and self._mark is not None else None
        rng_states = self._read_rng_states() if marked is None else marked
        if before is not None and not is_unfinished:
            rng_states = before.rng_states
        self._add("streams", rng_states, collected, is_alone)
        self._is_saving = True

    def _add(self, name: str, own: Any, collected: CollectedState, is_alone: bool) -> None:
        """Every rank's value; of a rank alone only its own."""
        told = {self.runtime.rank: own} if is_alone else dict(enumerate(self._collectives.gather_objects(own)))
        collected.state[name] = [encode(value, f"{name}/{rank}", collected.tensors) for rank, value in told.items()]

    def _run_state(self) -> dict[str, Any]:
        preparation = self._preparation
        return {
            "num_updates": self.clock.num_updates,
            "optimizer_updates": [each.num_updates for each in preparation.optimizers],
            "batch": asdict(self._batch.state()),
            "ticks": preparation.tick_base,
            "nominal": self.windows.nominal_weights(preparation.models),
            "scaler": self._precision.state_dict(),
            "precision": self._precision.name,
            "seeds": [each.seed for each in preparation.loaders],
            "lengths": loader_lengths(preparation.loaders),
            "units": schedule_units(preparation),
            "seed": torch.initial_seed() & ((1 << 63) - 1),
            "data_shards": self._strategy.data_shard.count,
            "epoch": self.next_epoch(),
            "counts_epochs": self._began is not None,
            "trained_on": [self._number(each) for each in self.windows.trained_on],
        }

    def _number(self, loader: PreparedLoader) -> int:
        # A view that skips batches is another object with the same seed.
        return [each.seed for each in self.loaders].index(loader.seed)

    def next_epoch(self) -> int:
        """The epoch that a run resumed from now begins with."""
        trained_on = self.windows.trained_on
        if not trained_on:
            return self.epoch
        if self._began is None:  # a loop that does not go by epochs(): the first loader counts them
            return trained_on[0].next_epoch
        is_over = not any(each.is_unfinished for each in trained_on) and any(
            each.next_epoch != self._began.get(each.seed, 0) for each in trained_on
        )
        return self.epoch + 1 if is_over else self.epoch

    def begin_epoch(self) -> None:
        """An epoch of the loop begins."""
        self._passes.begin_epoch()
        self._told_over = None
        self._began = {each.seed: each.next_epoch for each in self.loaders}

    def end_epoch(self) -> None:
        """It is over."""
        for loader in self.loaders:
            loader.end_epoch()
        self._passes.end_epoch()
        self._told_over = None
        self.epoch += 1
        self._began = {each.seed: each.next_epoch for each in self.loaders}

    def _about(self, is_unfinished: bool) -> dict[str, Any]:
        return {
            "num_updates": self.clock.num_updates,
            "epoch": self.next_epoch(),
            "world_size": self.runtime.world_size,
            **({"layout": axes} if (axes := layout_of(self._strategy)) else {}),
            "accumulation": self.windows.num_steps,
            "global_batch": self._batch.size(),
            "was_in_mid_window": is_unfinished,
            "run": secrets.token_hex(8) if self.run_id is None else self.run_id,
            "device": self.runtime.hardware.kind,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": {"headway": __version__, "torch": torch.__version__},
            "notes": dict(self.notes),
        }

    # ---------------------------------------------------------------- back

    def load(
        self,
        path: Path,
        is_strict: bool,
        hooks: Sequence[Callable[[list[torch.nn.Module], str], None]] = (),
        changed: Collection[str] | None = (),
    ) -> Restored:
        """Take a checkpoint up, all of it or nothing; every rank calls it.

        Args:
            path: its folder.
            is_strict: refuse what differs in anything.
            changed: as for `RunComparison.check`; with "data" the epoch is begun anew.
            hooks: called with the models and the folder; a model that one takes out of the list is not loaded.

        Raises:
            CheckpointError: on every rank: missing, damaged, or it does not fit; or `is_strict`, and something differs.
        """
        parts = self._parts()
        manifest, found = self.reader.read(path, TargetLayout(parts, self.runtime.rank, self.runtime.world_size))
        parts = self._frozen.put_back(found, parts)
        self.local.take(found)
        saved = read_run(manifest.about, found, self.runtime, self._precision, self._strategy.data_shard.count)
        restored = Restored(path, manifest.about)
        if hooks:  # they may load models themselves, so all that does not hang on them is checked before
            parts.left_out = set(range(len(parts.models)))
            self._comparison.check(restored, parts, found, saved, is_strict, changed)
            wanted = list(parts.models)
            for hook in hooks:
                hook(wanted, str(path))
            parts.left_out = {i for i, model in enumerate(parts.models) if not any(model is each for each in wanted)}
        self._comparison.check(restored, parts, found, saved, is_strict, changed)
        plan, is_new = self._comparison.plan(saved), "data" in (changed or ())
        restore(parts, found, lambda undo: self._restore_position(saved, plan, is_new, undo), self._agree)
        # Told before the RNG states are set: who listens may draw from them.
        notify(
            "resumed",
            step=saved.num_updates,
            source=self.clock,
            epoch=saved.epoch,
            folder=str(path),
            differences=restored.differences,
            notes=manifest.about.get("notes"),
        )
        self._take_up(saved, plan, is_new)
        self.local.take_up(parts, saved.local_steps)
        return restored

    def _agree(self, failure: str | None) -> list[str]:
        """What failed on any rank: all of them take the state up, or none."""
        told = self._collectives.gather_objects(failure)
        several = len(told) > 1
        return [f"rank {rank}: {text}" if several else text for rank, text in enumerate(told) if text is not None]

    def _restore_position(self, saved: SavedRun, plan: BatchPlan, is_new: bool, undo: LoadRollback) -> None:
        """What may still fail, as the state is read by others: the scaler, the loaders' positions, the generators."""
        if saved.precision == self._precision.name:
            undo.add("the scaler", partial(self._precision.load_state_dict, self._precision.state_dict()))
            self._precision.load_state_dict(saved.scaler)
        undo.add("the global batch", self._batch.way_back())
        self._batch.carry_out(plan)
        put_loaders_back(self.loaders, saved, is_new, undo)
        rng_states = self._read_rng_states()
        undo.add("the RNG states", partial(self._write_rng_states, rng_states, rng_states.get("loaders")))
        self._take_rng_states(saved)

    def _take_rng_states(self, saved: SavedRun) -> None:
        if saved.is_own:
            self._write_rng_states(saved.rng_states, saved.loader_rng)
        else:
            derive_rng_states(saved.seed, saved.num_updates, self._strategy.data_shard.index)
            self._preparation.loader_rng.load_state(saved.loader_rng)

    def _write_rng_states(self, rng_states: dict[str, Any], loader_rng: torch.Tensor | None) -> None:
        own = {name: state for name, state in rng_states.items() if name != "loaders"}
        write_rng_states(own, self.runtime.hardware)
        self._preparation.loader_rng.load_state(loader_rng)

    def _take_up(self, saved: SavedRun, plan: BatchPlan, is_new: bool) -> None:
        """The counters and the generators, which were read before."""
        preparation = self._preparation
        self.run_id = saved.run_id
        self.clock.resume(saved.num_updates)
        for optimizer, count in zip(preparation.optimizers, saved.optimizer_updates):
            optimizer.resume(count)
        recount_schedules(preparation, saved)
        for scheduler in preparation.schedulers:
            scheduler.catch_up()
        if saved.is_own and saved.pieces and self._step.pieces:  # else the ranks' batches may be others
            self._step.pieces.go_on(**saved.pieces)
        for model, order in zip(preparation.models, saved.exchange_orders if saved.is_own else ()):
            self._strategy.keep_exchange_order(model, order)
        self.windows.resume(preparation.models, saved.nominal, saved.num_updates)
        if plan.is_kept:
            preparation.keep_ticks(*saved.ticks)
        known = preparation.loaders
        self.windows.trained_on.extend(known[number] for number in saved.trained_on if number < len(known))
        self.epoch, self._mark, self._told_over = saved.epoch, None, None
        self._began = {each.seed: each.next_epoch for each in preparation.loaders} if saved.counts_epochs else None
        self._passes.load([] if is_new else saved.passes_over)
        self.evaluations.forget()
        self._take_rng_states(saved)
