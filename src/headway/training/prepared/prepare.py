"""What prepare() does with each kind of object, and what it remembers of them."""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from headway.config.layout_choice import launched_on
from headway.config.run import DataLoaderConfiguration
from headway.data.build import prepare_loader
from headway.data.loader import PreparedLoader
from headway.data.sampling.order import LoaderGenerator, LoadingRules
from headway.errors import ConfigError, PrepareError
from headway.log import get_logger
from headway.memory import attempt
from headway.offload import spread_over
from headway.runtime.collectives.ranks import share_rng_states, synchronize_rng_states
from headway.runtime.control_plane.attendance import RankConditionalCallCheck
from headway.runtime.seed import mix
from headway.runtime.transfers import move
from headway.strategies.deepspeed.plugin import DummyOptim, DummyScheduler
from headway.training.checks.replicas import check_alike, compare_data
from headway.training.prepared import model as prepared_model
from headway.training.prepared.objects import OptimizerEntry
from headway.training.prepared.optimizer import PreparedOptimizer, repoint
from headway.training.prepared.registry import AcceleratorRegistry
from headway.training.prepared.scheduler import (
    KeptSteps,
    PreparedScheduler,
    SchedulerStepRule,
    StepsPerMicroBatch,
    StepsPerProcess,
    StepsPerUpdate,
    schedule_length,
)
from headway.training.step import TrainingStep
from headway.training.weights import PretrainedLoads

log = get_logger(__name__)

_REACH = 4
"""How many times the fewest rounds are tried before a global batch counts as not divisible."""


@dataclass(frozen=True)
class Wrappers:
    """What optimizers and schedules become; for a class of Accelerators that has kinds of its own."""

    optimizer: type[PreparedOptimizer] = PreparedOptimizer
    scheduler: type[PreparedScheduler] = PreparedScheduler
    keeps_precision: bool = False
    """Do models that are forgotten go on under autocast?"""


@dataclass(eq=False)
class Preparation:
    """Prepares objects for one Accelerator.

    Args:
        step: what they take part in; its registry holds them.
        neighbours: the other Accelerators of this process.
        loading: how loaders split, pad and move batches; `set_evenness` and `load_by` change it.
        places: move models and batches to the device.
        rule: how schedules tick.
        follows_optimizer: schedules tick for updates; False: for each call.
        rng_types: RNG states to make equal over ranks when a loader begins.
        global_batch_size: samples per update, which the accumulation is derived from; None: it is given.
        transforms: what is done to a model that learns, or does not, before it is wrapped; in order.
        rules: what loaders go by.
        wrappers: what optimizers and schedules become.

    Attributes:
        models, optimizers, loaders, schedulers: in the order they were prepared.
        weights: what models are filled from.
        loader_rng: what loaders draw their orders from.
        events: of the run's loaders.
    """

    step: TrainingStep
    neighbours: AcceleratorRegistry
    loading: DataLoaderConfiguration
    places: bool
    rule: SchedulerStepRule
    follows_optimizer: bool
    rng_types: tuple[str, ...]
    global_batch_size: int | None
    transforms: Callable[[bool], Sequence[Callable[[torch.nn.Module], Any]]]
    rules: LoadingRules
    wrappers: Wrappers

    def __post_init__(self) -> None:
        parts = self.step.parts
        self.events = parts.events
        self._windows, self._prepared, self._strategy = parts.windows, parts.prepared, parts.strategy
        self.models, self.optimizers = parts.prepared.models, parts.prepared.optimizers
        self.loaders, self.schedulers = parts.prepared.loaders, parts.prepared.schedulers
        self._runtime = parts.runtime
        self._evaluated: set[int] = set()
        self.weights = PretrainedLoads(self._strategy)
        self.loader_rng = LoaderGenerator(is_private=self._is_spread and self.rules.parts_streams)
        self._tick_base: tuple[int, int] | None = None
        self._is_sharing = False
        capabilities = self._strategy.capabilities
        self._lone = None if capabilities.lone_forward else RankConditionalCallCheck(self._runtime, self._strategy.name)
        # Stages of a pipeline are called one after the other, and agree by themselves.
        is_joint = not capabilities.lone_pieces
        lone: Sequence[prepared_model.Look] = (self._lone,) if self._lone is not None and is_joint else ()
        self._looks = (*lone, *parts.moments.before_forward)
        attempt.register(self)

    def prepare(self, objects: Sequence[Any], placement: list[bool] | None, is_strict: bool = False) -> list[Any]:
        """Prepare by kind - models, optimizers, loaders, schedules - and return in the order given.

        Args:
            objects: as for `Accelerator.prepare`.
            placement: one truth value for each, or None.
            is_strict: refuse objects of other kinds, which otherwise come back as they are, with one warning.
        """
        if not objects:
            raise PrepareError("prepare() got nothing; give models, optimizers, loaders, schedules")
        if placement is not None and len(placement) != len(objects):
            raise ConfigError(
                f"device_placement has {len(placement)} entries for {len(objects)} objects; give one for each"
            )
        places: Sequence[bool | None] = placement or [None] * len(objects)
        kinds = [self._kind(obj) for obj in objects]
        unknown = [obj for obj, kind in zip(objects, kinds) if kind is None]
        if unknown:
            _report_unknown(unknown, is_strict)
        made = dict(enumerate(objects))
        for kind in ("model", "optimizer", "loader", "scheduler"):
            for index, obj in enumerate(objects):
                if kinds[index] == kind:
                    made[index] = self._one(kind, obj, places[index])
        if "model" in kinds:
            self._check_optimizers()
        self.adopt()
        return [made[index] for index in range(len(objects))]

    def _kind(self, obj: Any) -> str | None:
        if obj is None or isinstance(obj, PreparedLoader | PreparedOptimizer | PreparedScheduler):
            return "done"
        if isinstance(obj, torch.nn.Module):
            return "model"
        if isinstance(obj, torch.optim.Optimizer | DummyOptim):
            return "optimizer"
        if isinstance(obj, DataLoader):
            return "loader"
        if isinstance(obj, DummyScheduler) or self.wrappers.scheduler.wraps(obj):
            return "scheduler"
        return None

    def _one(self, kind: str, obj: Any, place: bool | None) -> Any:
        if kind == "model":
            return self.model(obj, place)
        if kind == "optimizer":
            return self.optimizer(obj)
        return self.loader(obj, place) if kind == "loader" else self.scheduler(obj)

    def _share_rng_states(self) -> None:
        """Once, before anything is prepared: ranks of one part of the data draw alike."""
        if not self._is_sharing and self._strategy.everyone.world_size > self._strategy.data_shard.count:
            share_rng_states(self._strategy.everyone, self._strategy.data_shard.index)
        self._is_sharing = True

    # ---------------------------------------------------------------- each kind

    def model(self, model: torch.nn.Module, place: bool | None = None, is_evaluation: bool = False) -> torch.nn.Module:
        """Move, wrap, and give the same object back."""
        if any(model is known for known in self.models):
            if not is_evaluation and id(model) in self._evaluated and self._is_spread:
                raise PrepareError(
                    f"{type(model).__name__} was prepared with evaluation_mode=True, so its gradients would not be reduced; call "
                    "free_memory() before preparing it for training"
                )
            return model
        self._share_rng_states()
        if not is_evaluation:  # each rank may evaluate one of its own
            self._compare(model)
        is_moved = self._is_moved(model, place, is_evaluation)
        if any(parameter.is_meta for parameter in model.parameters()):
            if is_evaluation:
                raise PrepareError(
                    f"{type(model).__name__}, to evaluate with, is without memory (meta device); load it before"
                )
            self._strategy.materialise(model)
        if is_moved and is_evaluation:
            move(model, self._runtime.device)  # it stays whole, whatever the strategy cuts
        elif is_moved:
            self._strategy.place(model, self._runtime.device)
        elif self._is_spread:
            self._check_device(model)
        if self.models:
            self._strategy.capabilities.require("several_models", self._strategy.name, "prepare one model")
        for transform in self.transforms(False) if is_evaluation else ():
            transform(model)
        prepared_model.detach(model)  # one that was forgotten, and went on under autocast
        if is_evaluation:
            prepared_model.attach(model, None, self._strategy.forward_context(self.step.precision))
            self._evaluated.add(id(model))
        else:
            self._set_up(model)
        self._prepared.add_model(model)
        return model

    def _compare(self, model: torch.nn.Module) -> None:
        """Have all ranks built the same? What this one lacks may come from files, or from rank 0."""
        steps, expected = str(self._windows.num_steps), self.weights.names(model)
        settings = {"gradient_accumulation_steps": steps, "mixed_precision": self.step.precision.name}
        if check_alike(model, settings, self._strategy.everyone):
            expected.update(name for name, _ in (*model.named_parameters(), *model.named_buffers()))
        self._strategy.expect(expected)

    def _set_up(self, model: torch.nn.Module) -> None:
        engine = self._strategy.setup(model, self.transforms(True))
        self.weights.read(model)
        context, capabilities = self._strategy.forward_context(self.step.precision), self._strategy.capabilities
        learns = any(parameter.requires_grad for parameter in model.parameters())
        is_replicated = learns and self._is_spread and capabilities.deferred_sync
        keep_local = partial(self._strategy.accumulate, sync=False) if is_replicated else None
        shards = None if capabilities.copies else self._strategy.name
        prepared_model.attach(model, engine, context, keep_local, shards, self._looks, self._lone)

    @property
    def _is_spread(self) -> bool:
        """Does the model train on several processes, in copies or in parts?"""
        return self._strategy.everyone.world_size > 1

    def _is_moved(self, model: torch.nn.Module, place: bool | None, is_evaluation: bool) -> bool:
        """Is the model to be moved? One that is dispatched over several places stays where it lies, and is never replicated."""
        is_moved = self.places if place is None else place
        places, count = spread_over(model, self._runtime.device), self._strategy.everyone.world_size
        if not places:
            return is_moved
        what = f"{type(model).__name__} was dispatched over {', '.join(places)} (hf_device_map)"
        if count > 1 and not is_evaluation:
            raise PrepareError(
                f"{what}, so it cannot be one of {count} replicas: a model that was loaded with device_map= or placed by "
                "dispatch_model() can only be trained by one process. Start one (headway launch -n 1), or load it without a device "
                "map, so that each process holds all of it"
            )
        if place:
            raise PrepareError(
                f"{what}, and device_placement=[True] would move all of it to {self._runtime.device}, under hooks that expect it "
                "elsewhere. Leave device_placement out, or load the model without a device map"
            )
        log.info_once(f"{what}: it stays there")
        return False

    def _check_device(self, model: torch.nn.Module) -> None:
        wanted = self._runtime.device
        found = {parameter.device for parameter in model.parameters()}
        if found - {wanted}:
            raise PrepareError(
                f"{type(model).__name__} lies on {', '.join(sorted(map(str, found)))}, but this process computes on {wanted}; "
                "move it there, or leave device_placement on"
            )

    def optimizer(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        """Wrap, once."""
        optimizer = self._strategy.stand_for(optimizer, 1) if isinstance(optimizer, DummyOptim) else optimizer
        for known in map(_as_made, self.optimizers):
            if optimizer is known or optimizer is known.optimizer:
                return known
        self._strategy.accept(optimizer)
        repoint(optimizer, self._strategy)
        made = self.wrappers.optimizer(optimizer, self.step, self.neighbours, self._lone)
        self.optimizers.append(made)
        return made

    def adopt(self) -> None:
        """Let an engine that takes a model and its optimizer together have them, once both are known."""
        optimizers, count = [each.optimizer for each in self.optimizers], self._strategy.data_shard.count
        rows = [loader.total_batch_size // count for loader in self.loaders if loader.total_batch_size]
        for made in self._strategy.adopt(optimizers, self.step.precision.name, self._windows.num_steps, rows):
            self.neighbours.note_prepared(made, self.step)

    def _check_optimizers(self) -> None:
        known = {id(parameter) for model in self.models for parameter in model.parameters()}
        for optimizer in self.optimizers:
            repoint(optimizer.optimizer, self._strategy)
            _as_made(optimizer).check_owned(known)

    def loader(self, loader: DataLoader[Any], place: bool | None = None) -> PreparedLoader:
        """Shard, and derive the accumulation where a global batch size was asked for."""
        for known in self.loaders:
            if loader is known:
                return known
        self._share_rng_states()
        if not self.loading.dispatch_batches:
            compare_data(loader.dataset, self._strategy.data_group)
        places = self.places if place is None else place
        made = prepare_loader(
            loader,
            shard=self._strategy.data_shard,
            config=self.loading,
            device=self._runtime.device if places else None,
            collectives=self._strategy.data_group,
            everyone=self._strategy.everyone,
            events=self.events,
            seed=self._seed(),
            rng_types=self.rng_types,
            stream=self.loader_rng,
            rules=self.rules,
        )
        others = [name for name in self.rng_types if name != "generator"]
        if others:
            synchronize_rng_states(others)
        self._prepared.add_loader(made)
        if self.global_batch_size is not None and len(self.loaders) == 1:
            self._windows.set_steps(self._derive_steps(made, self.global_batch_size))
        return made

    def _derive_steps(self, loader: PreparedLoader, wanted: int) -> int:
        """The micro-batches per update of so many samples; the loader is told where they have to be of different sizes.

        Raises:
            ConfigError: the ranks' batches do not make it up. Where machines were lost that is not the script's doing: it is split
                unevenly then.
        """
        num_shards, per_step = self._strategy.data_shard.count, loader.total_batch_size
        if per_step and wanted % per_step == 0:
            steps = wanted // per_step
            log.info("global batch %d = %d per process x %d processes x %d accumulation steps",
                     wanted, per_step // num_shards, num_shards, steps)  # fmt: skip
            return steps
        if per_step and launched_on(self._strategy.everyone.world_size) is not None:
            fewest = -(-wanted // per_step)
            for steps in range(fewest, _REACH * fewest + 1):
                if loader.fits_window(wanted, steps):
                    loader.ask_window(wanted, steps, per_step)
                    log.warning_once("the global batch of %d samples is split unevenly among the ranks", wanted)
                    return steps
        raise ConfigError(
            f"global_batch_size={wanted} is not a multiple of what all ranks read at once ({per_step} samples); choose a "
            "multiple, or another batch size for the loader"
        )

    def _seed(self) -> int:
        """Rank 0's seed for the next loader; every loader has an order of its own."""
        given = self.loading.data_seed
        seed = torch.initial_seed() if given is None else given
        agreed = self._strategy.everyone.broadcast_object(seed)
        return mix(agreed & ((1 << 63) - 1), len(self.loaders))

    def scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Wrap, bound to its prepared optimizer; say once how it will tick."""
        rule = self.rule
        if isinstance(scheduler, DummyScheduler):
            scheduler = self._strategy.stand_for(scheduler, self.tick_base[0])
            rule = StepsPerUpdate()  # such a configuration counts updates
        for known in self.schedulers:
            if scheduler is known or scheduler is known.scheduler:
                return cast(PreparedScheduler, known)
        bound = getattr(scheduler, "optimizer", None)
        followed = [o for o in self.optimizers if bound is None or bound is o or bound is o.optimizer]
        if not followed and self.follows_optimizer and self.wrappers.scheduler.needs_optimizer:
            raise PrepareError(
                f"{type(scheduler).__name__} follows an optimizer that is not prepared; prepare that optimizer before it or in the "
                "same call, or pass step_scheduler_with_optimizer=False"
            )
        made = self.wrappers.scheduler(
            scheduler, followed, rule=rule, follows_optimizer=self.follows_optimizer, step=self.step
        )
        self.schedulers.append(made)
        if self.follows_optimizer and rule is self.rule:
            self._explain(made)
        return made

    # ---------------------------------------------------------------- the clock's word

    def _explain(self, scheduler: PreparedScheduler) -> None:
        name, rule = type(scheduler.scheduler).__name__, self.rule
        length, end = schedule_length(scheduler.scheduler), ""
        if length is not None:
            updates = -(-length // max(1, rule.ticks(self._windows.num_steps)))
            end = f"; it ends after {length} ticks, {updates} updates from now"
        log.info_once(f"{name} is {rule.reason}{end}")

    @property
    def tick_base(self) -> tuple[int, int]:
        """(processes, micro-batches per update) that schedules are counted by: this run's, or that of the one resumed."""
        # With split batches a single process makes as many updates as many do.
        num_processes = 1 if self.loading.split_batches else self._strategy.data_shard.count
        return self._tick_base or (num_processes, self._windows.num_steps)

    def keep_ticks(self, num_processes: int, accumulation: int) -> None:
        """Tick as the run that is resumed did, where schedules count what a single process would do.

        Args:
            num_processes: of that run's data.
            accumulation: its micro-batches per update.
        """
        if self.tick_base == (num_processes, accumulation):
            return
        self._tick_base = (num_processes, accumulation)
        if isinstance(self.rule, StepsPerProcess):
            self.rule = StepsPerProcess(num_processes)
        elif isinstance(self.rule, StepsPerMicroBatch | KeptSteps):
            self.rule = KeptSteps(num_processes * accumulation, self._windows.num_steps)
        for scheduler in self.schedulers:
            scheduler.go_by(self.rule)

    # ---------------------------------------------------------------- loaders' evenness, the end

    def load_by(self, loading: DataLoaderConfiguration) -> None:
        """How loaders that are prepared from now on split, pad and move batches."""
        self.loading = loading.taken()

    def set_evenness(self, even_batches: bool) -> None:
        """Let this and later epochs of map-style loaders complete their last round, or not."""
        self.load_by(replace(self.loading, even_batches=even_batches))
        for loader in self.loaders:
            loader.even_batches = even_batches

    @contextmanager
    def evenness(self, even_batches: bool) -> Iterator[None]:
        """`set_evenness` for a block."""
        before = self.loading.even_batches
        self.set_evenness(even_batches)
        try:
            yield
        finally:
            self.set_evenness(before)

    def held(self) -> dict[int, str]:
        """The ids of all prepared objects, and what a message calls them."""
        names = {id(model): type(model).__name__ for model in self.models}
        names.update((id(each), type(each.optimizer).__name__) for each in self.optimizers)
        names.update((id(each), f"loader of {type(each.dataset).__name__}") for each in self.loaders)
        names.update((id(each), type(each.scheduler).__name__) for each in self.schedulers)
        return names

    def release(self, kept: Container[int] = ()) -> None:
        """Forget everything prepared, or all but the objects of those ids; models get their own class back."""
        for model in self.models:
            if id(model) not in kept:
                prepared_model.detach(model)
                if self.wrappers.keeps_precision:
                    prepared_model.attach(model, None, self._strategy.forward_context(self.step.precision))
                if kept:
                    self._strategy.release(model)
        self._prepared.forget(kept)
        if not self.loaders:
            self.loader_rng.load_state(None)
        self._evaluated &= {id(model) for model in self.models}
        self.step.release()
        if not self.models:
            self._strategy.release()


def _as_made(optimizer: OptimizerEntry) -> PreparedOptimizer:
    """What the registry holds, as the class that this file put into it."""
    return cast(PreparedOptimizer, optimizer)


def _report_unknown(objects: Sequence[Any], is_strict: bool) -> None:
    kinds = [f"{type(obj).__module__}.{type(obj).__qualname__}" for obj in objects]
    text = (
        f"prepare() got {', '.join(dict.fromkeys(kinds))}, which is not a model (nn.Module), optimizer, DataLoader or schedule (an "
        "object with step, state_dict and load_state_dict). Wrap data in a torch DataLoader; leave other objects out"
    )
    if is_strict:
        raise PrepareError(text)
    log.warning_once("%s. It comes back as it is; prepare(..., strict=True) makes this an error", text)
