"""Preparation of models, optimizers, loaders and schedulers for `Accelerator.prepare`.

`Preparation.prepare` sorts its arguments by kind, and prepares the models first::

    prepare_model         checks that ranks built equal models; moves, replicates or shards the model; attaches its engine
    prepare_optimizer     gives the optimizer the prepared parameters, and wraps it in a `PreparedOptimizer`
    prepare_loader        divides the data among ranks (`core/data/build.py`)
    prepare_scheduler     wraps the scheduler in a `PreparedScheduler`, with a rule for its steps per update

The prepared objects are in the lists of `PreparedObjects` (`objects.py`), which the training step uses too.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from headway.common import scope
from headway.core import extensions
from headway.core.config.layout_after_loss import find_launched_ranks
from headway.core.config.run import DataLoaderConfiguration
from headway.core.data.build import prepare_loader
from headway.core.data.loader import PreparedLoader
from headway.core.data.sampling.loader_generator import LoaderGenerator
from headway.core.memory.object_owners import register_owner
from headway.core.runtime.collectives.rng import share_rng_states, synchronize_rng_states
from headway.core.runtime.control_plane.conditional_calls import RankConditionalCallCheck
from headway.core.runtime.dry_run import is_dry_run
from headway.core.runtime.moving import move_module
from headway.core.runtime.seed import mix_seed
from headway.core.strategies.placeholders import OptimizerPlaceholder, SchedulerPlaceholder
from headway.core.training.behavior import Behavior
from headway.core.training.checks.equal_inputs import check_models, compare_data
from headway.core.training.checks.schedule_lengths import get_schedule_length, warn_if_prepared_length_is_doubtful
from headway.core.training.prepared import model as prepared_model
from headway.core.training.prepared.dispatched import list_dispatch_places
from headway.core.training.prepared.exchanged_parameters import repoint_parameters
from headway.core.training.prepared.low_bit import load_low_bit_extension
from headway.core.training.prepared.objects import OptimizerEntry
from headway.core.training.prepared.odd_tensors import check_odd_tensors
from headway.core.training.prepared.optimizer import PreparedOptimizer
from headway.core.training.prepared.packed_documents import is_flattening, requests_check
from headway.core.training.prepared.registry import AcceleratorRegistry, PreparationListeners
from headway.core.training.prepared.scheduler import (
    KeptSteps,
    PreparedScheduler,
    SchedulerStepRule,
    StepsPerMicroBatch,
    StepsPerProcess,
    StepsPerUpdate,
    is_like_optimizer,
)
from headway.core.training.pretrained_weights import PretrainedLoads
from headway.core.training.step import TrainingStep
from headway.core.weights.compiled import accept_bare_names
from headway.errors import ConfigError, PrepareError
from headway.log import get_logger

log = get_logger(__name__)

_MAX_STEPS_FACTOR = 4
"""Upper limit for the number of micro-batches per update, as a multiple of the smallest possible number.

It applies if machines were lost and a global batch must be split unevenly. If no number up to the limit fits, preparing
the loader raises an error.
"""


class ObjectKind(Enum):
    """Kind of an object that was passed to `prepare()`."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    LOADER = "loader"
    SCHEDULER = "scheduler"
    NEEDS_NOTHING = "needs nothing"
    """None, an object that is prepared already, or a weight average, which is notified when its model is prepared."""
    UNKNOWN = "unknown"


class TickBase(NamedTuple):
    """Pair of numbers from which scheduler steps per update are computed.

    The product of both is the number of micro-batches that a single-process loop trains on while this run makes one
    update.

    Attributes:
        num_processes: Number of updates that the single-process loop makes while this run makes one: the number of
            ranks that read different data. 1 if an update has equally many samples on any number of processes.
        num_steps: Micro-batches in each of these updates.
    """

    num_processes: int
    num_steps: int


@dataclass(eq=False)
class Preparation:
    """Part of an Accelerator that prepares models, optimizers, loaders and schedulers.

    Args:
        step: Training step of the run, whose registry holds the objects.
        accelerators: Registry of the Accelerators of this process.
        loading: Settings for splitting, padding and moving batches. `set_evenness` and `set_loading` change them.
        moves_objects: Whether to move models and batches to the device.
        rule: Rule for the number of scheduler steps per update.
        follows_optimizer: Whether schedulers advance only with updates. If False, each call of step() advances them.
        rng_types: RNGs to synchronize across ranks at the start of each pass over a loader.
        global_batch_size: Samples per update, from which the number of accumulation steps is derived. None: the number
            of accumulation steps is set directly.
        transforms: Function that returns the functions to apply to a model before it is wrapped, in order. Its argument
            is whether the model trains.
        behavior: Rules of the Accelerator, such as its classes of optimizers and schedulers.

    Attributes:
        models: Models in order of preparation.
        optimizers: Optimizers in order of preparation.
        loaders: Loaders in order of preparation.
        schedulers: Schedulers in order of preparation.
        weights: Pretrained checkpoints from which models are filled.
        loader_rng: Random generator from which the shuffled orders of loaders are drawn.
        events: Callbacks for events of the loaders.
    """

    step: TrainingStep
    accelerators: AcceleratorRegistry
    loading: DataLoaderConfiguration
    moves_objects: bool
    rule: SchedulerStepRule
    follows_optimizer: bool
    rng_types: tuple[str, ...]
    global_batch_size: int | None
    transforms: Callable[[bool], Sequence[Callable[[torch.nn.Module], Any]]]
    behavior: Behavior

    def __post_init__(self) -> None:
        run = self.step.run
        self.events = run.events
        self.models = run.prepared.models
        self.optimizers = run.prepared.optimizers
        self.loaders = run.prepared.loaders
        self.schedulers = run.prepared.schedulers
        self._windows = run.windows
        self._prepared = run.prepared
        self._strategy = run.strategy
        self._runtime = run.runtime
        self._evaluated_ids: set[int] = set()  # IDs of models that are only evaluated
        self._packing_checked_ids: set[int] = set()  # IDs of models that are known to separate packed documents
        self.weights = PretrainedLoads(self._strategy)
        self.loader_rng = LoaderGenerator(
            is_private=self._has_several_ranks and self.behavior.loading_rules.separates_rng_streams
        )
        self._resumed_tick_base: TickBase | None = None
        self._has_shared_rng_states = False
        capabilities = self._strategy.capabilities
        self._rank_check: RankConditionalCallCheck | None = None
        self._forward_hooks: Sequence[prepared_model.ForwardHook] = (*run.hooks.before_forward,)
        if not capabilities.lone_forward:
            self._rank_check = RankConditionalCallCheck(self._runtime, self._strategy.name)
            # Stages of a pipeline are called one after another and synchronize themselves, so they need no check.
            if not capabilities.lone_pieces:
                self._forward_hooks = (self._rank_check, *self._forward_hooks)
        register_owner(self)

    def prepare(self, objects: Sequence[Any], placement: list[bool] | None, is_strict: bool = False) -> list[Any]:
        """Prepare models, optimizers, loaders and schedulers, and return them in the order of `objects`.

        Models are prepared first, whatever the order, then optimizers, loaders and schedulers.

        Args:
            objects: Objects as for `Accelerator.prepare`.
            placement: For each object, whether to move it to the device. None: the Accelerator's setting for all.
            is_strict: Whether objects of other types are an error. Otherwise they are returned unchanged, with one
                warning.

        Raises:
            PrepareError: If `objects` is empty, or one of them cannot be prepared.
            ConfigError: If `placement` and `objects` differ in length, or if a loader's batches do not add up to the
                global batch size.
            UnsupportedError: If the strategy does not support an object, such as a second model or an optimizer.
            DataError: If ranks gave different data, and the rules of the Accelerator forbid it.
        """
        if not objects:
            raise PrepareError("prepare() got nothing; give models, optimizers, loaders, schedules")
        if placement is not None and len(placement) != len(objects):
            raise ConfigError(
                f"device_placement has {len(placement)} entries for {len(objects)} objects; give one for each"
            )
        are_moved: Sequence[bool | None] = placement or [None] * len(objects)
        kinds = [self._find_kind(obj) for obj in objects]
        unknown = [obj for obj, kind in zip(objects, kinds) if kind is ObjectKind.UNKNOWN]
        if unknown:
            _report_unknown(unknown, is_strict)
        prepared = list(objects)
        self._strategy.announce_models([obj for obj, kind in zip(objects, kinds) if kind is ObjectKind.MODEL])
        # An optimizer gets the parameters of the prepared models, and a scheduler looks up its prepared optimizer.
        for kind in (ObjectKind.MODEL, ObjectKind.OPTIMIZER, ObjectKind.LOADER, ObjectKind.SCHEDULER):
            for index, obj in enumerate(objects):
                if kinds[index] is kind:
                    prepared[index] = self._prepare_one(kind, obj, are_moved[index])
        if ObjectKind.MODEL in kinds:
            self._check_optimizers()
        self.create_engine_if_ready()
        return prepared

    def _find_kind(self, obj: Any) -> ObjectKind:
        """Return the kind of an object passed to `prepare()`.

        Raises:
            PrepareError: If the object resembles an optimizer, but is not a `torch.optim.Optimizer`.
        """
        if obj is None or isinstance(obj, PreparedLoader | PreparedOptimizer | PreparedScheduler):
            return ObjectKind.NEEDS_NOTHING
        if getattr(obj, "follows_model", False):  # a weight average
            return ObjectKind.NEEDS_NOTHING
        if isinstance(obj, torch.nn.Module):
            return ObjectKind.MODEL
        if isinstance(obj, torch.optim.Optimizer | OptimizerPlaceholder):
            return ObjectKind.OPTIMIZER
        if isinstance(obj, DataLoader):
            return ObjectKind.LOADER
        if isinstance(obj, SchedulerPlaceholder) or self.behavior.scheduler.is_scheduler(obj):
            return ObjectKind.SCHEDULER
        if self.behavior.scheduler.needs_optimizer and is_like_optimizer(obj):
            # Such an optimizer would make an update in each micro-batch, and its state would be missing in checkpoints.
            raise PrepareError(
                f"prepare() got a {type(obj).__module__}.{type(obj).__qualname__}, which has an optimizer's methods but is not a "
                "torch.optim.Optimizer, so its updates cannot be counted, skipped or saved. Use a subclass of torch.optim.Optimizer: "
                "instead of schedulefree.ScheduleFreeWrapper, say, AdamWScheduleFree, SGDScheduleFree or RAdamScheduleFree"
            )
        return ObjectKind.UNKNOWN

    def _prepare_one(self, kind: ObjectKind, obj: Any, is_moved: bool | None) -> Any:
        """Prepare one object, and return its prepared form.

        Args:
            kind: Kind of the object, which needs preparation.
            obj: Object that the script passed to `prepare()`.
            is_moved: Whether to move a model, or the batches of a loader, to the device. None: as configured.
        """
        if kind is ObjectKind.MODEL:
            return self.prepare_model(obj, is_moved)
        if kind is ObjectKind.OPTIMIZER:
            return self.prepare_optimizer(obj)
        return self.prepare_loader(obj, is_moved) if kind is ObjectKind.LOADER else self.prepare_scheduler(obj)

    def create_engine_if_ready(self) -> None:
        """Create an engine that needs models and optimizers together, such as DeepSpeed's, once both are prepared.

        Then check whether models separate packed documents (see `check_packed_models`).
        """
        optimizers, num_shards = [each.optimizer for each in self.optimizers], self._strategy.data_shard.count
        batch_sizes = [loader.total_batch_size // num_shards for loader in self.loaders if loader.total_batch_size]
        # The engine's own optimizers make steps, too, which must not be taken for steps of unprepared optimizers.
        for engine_optimizer in self._strategy.create_engine(
            optimizers, self.step.precision.name, self._windows.num_steps, batch_sizes
        ):
            self.accelerators.record_preparer(engine_optimizer, self.step)
        self.check_packed_models()

    def check_packed_models(self) -> None:
        """Raise an error if a loader packs several documents into a sequence, but a model does not separate them.

        A loader's collator requests the check (see `requests_check`). Each model is checked once. Models that are only
        evaluated are not checked.

        Raises:
            PrepareError: If a model ignores the boundaries between documents.
        """
        collators = [loader.collate_fn for loader in self.loaders]
        collator = next(filter(requests_check, collators), None)
        models = [each for each in self.models if id(each) not in self._evaluated_ids | self._packing_checked_ids]
        if collator is not None and models and not is_dry_run():
            # None: full precision, but the model itself may be in half precision, which the check then finds out.
            is_half = self.step.precision.name != "no" or None
            is_error = self.behavior.refuses_leaks or not is_flattening(collator)
            extensions.load("feature", "packing")(models, collator, is_half, is_error)
            self._packing_checked_ids.update(map(id, models))

    # ---------------------------------------------------------------- models

    def prepare_model(
        self, model: torch.nn.Module, is_moved: bool | None = None, is_evaluation: bool = False
    ) -> torch.nn.Module:
        """Move and wrap a model, and return it as the same object. A model that is prepared already is left unchanged.

        Args:
            model: Model to prepare.
            is_moved: Whether to move it to the device. None: the Accelerator's setting.
            is_evaluation: Whether it is only evaluated, and therefore not sharded. Default: False.

        Raises:
            PrepareError: If the model cannot be prepared, or if ranks built different models. In a run on several
                processes, also if a model that was prepared for evaluation is now prepared for training.
            UnsupportedError: If the strategy supports only one model, and another one is prepared already.
        """
        if any(model is prepared for prepared in self.models):
            self._check_same_mode(model, is_evaluation)
            return model
        self._share_rng_states()
        if not is_evaluation:  # each rank may evaluate a different model
            self._compare_models(model)
        should_move = self._should_move(model, is_moved, is_evaluation)
        self._initialize_values(model, is_evaluation)
        self._place_model(model, should_move, is_evaluation)
        if self.models:
            self._strategy.capabilities.require("several_models", self._strategy.name, "prepare one model")
        if is_evaluation:
            self._set_up_for_evaluation(model)
        else:
            self._set_up_for_training(model)
        self._prepared.add_model(model)
        return model

    def _check_same_mode(self, model: torch.nn.Module, is_evaluation: bool) -> None:
        """Raise `PrepareError` if a model that was prepared for evaluation is now prepared for training."""
        if not is_evaluation and id(model) in self._evaluated_ids and self._has_several_ranks:
            raise PrepareError(
                f"{type(model).__name__} was prepared with evaluation_mode=True, so its gradients would not be reduced; call "
                "free_memory() before preparing it for training"
            )

    def _share_rng_states(self) -> None:
        """Give ranks that read the same data shard equal RNG states. Only the first call has an effect."""
        if not self._has_shared_rng_states and self._strategy.everyone.world_size > self._strategy.data_shard.count:
            share_rng_states(self._strategy.everyone, self._strategy.data_shard.index)
        self._has_shared_rng_states = True

    def _compare_models(self, model: torch.nn.Module) -> None:
        """Raise `PrepareError` if ranks built different models, or if they cannot share a tensor of the model.

        Otherwise pass the strategy the names of the tensors that will have values: those that registered checkpoints
        fill, and all of them if rank 0's model has values.
        """
        if self._has_several_ranks:
            check_odd_tensors(model)
        settings = {
            "gradient_accumulation_steps": str(self._windows.num_steps),
            "mixed_precision": self.step.precision.name,
        }
        names_with_values = self.weights.list_names(model)
        if check_models(model, settings, self._strategy.everyone, names_with_values):
            names_with_values.update(name for name, _ in (*model.named_parameters(), *model.named_buffers()))
        self._strategy.expect_values(names_with_values)

    def _should_move(self, model: torch.nn.Module, is_moved: bool | None, is_evaluation: bool) -> bool:
        """Whether to move the model to this process's device.

        Dispatched models, whose parts are on several devices, are not moved.

        Args:
            model: Model to prepare.
            is_moved: Whether the caller requests a move. None: the Accelerator's setting.
            is_evaluation: Whether the model is only evaluated.

        Raises:
            PrepareError: If the model is dispatched, and the caller requests a move, or several processes train it.
        """
        places, num_ranks = list_dispatch_places(model, self._runtime.device), self._strategy.everyone.world_size
        if not places:
            return self.moves_objects if is_moved is None else is_moved
        what = f"{type(model).__name__} was dispatched over {', '.join(places)} (hf_device_map)"
        if num_ranks > 1 and not is_evaluation:
            raise PrepareError(
                f"{what}, so it cannot be one of {num_ranks} replicas: a model that was loaded with device_map= or placed by "
                "dispatch_model() can only be trained by one process. Start one (headway launch -n 1), or load it without a device "
                "map, so that each process holds all of it"
            )
        if is_moved:
            raise PrepareError(
                f"{what}, and device_placement=[True] would move all of it to {self._runtime.device}, under hooks that expect it "
                "elsewhere. Leave device_placement out, or load the model without a device map"
            )
        log.info_once(f"{what}: it stays there")
        return False

    def _initialize_values(self, model: torch.nn.Module, is_evaluation: bool) -> None:
        """Initialize a model that is on the meta device. Raise `PrepareError` if it is only evaluated."""
        if not any(parameter.is_meta for parameter in model.parameters()):
            return
        if is_evaluation:
            raise PrepareError(
                f"{type(model).__name__} was passed for evaluation, but is on the meta device and has no values. Load its "
                "weights before prepare()"
            )
        self._strategy.materialize_model(model)

    def _place_model(self, model: torch.nn.Module, should_move: bool, is_evaluation: bool) -> None:
        """Move a model to this process's device, or check that it is there.

        Args:
            model: Model to prepare.
            should_move: Whether to move it. If False, only a run on several processes checks its device.
            is_evaluation: Whether the model is only evaluated, and therefore not sharded, whatever the strategy.
        """
        if should_move and is_evaluation:
            move_module(model, self._runtime.device)
        elif should_move:
            self._strategy.move_model(model, self._runtime.device)
        elif self._has_several_ranks:
            self._check_device(model)

    def _check_device(self, model: torch.nn.Module) -> None:
        """Raise `PrepareError` if any parameter of the model is not on this process's device."""
        own_device = self._runtime.device
        devices = {parameter.device for parameter in model.parameters()}
        if devices - {own_device}:
            raise PrepareError(
                f"{type(model).__name__} is on {', '.join(sorted(map(str, devices)))}, but this process computes on {own_device}; "
                "move it there, or leave device_placement on"
            )

    def _set_up_for_evaluation(self, model: torch.nn.Module) -> None:
        """Apply the transforms for evaluation, fill the model from registered checkpoints, and make it run under autocast."""
        for transform in self.transforms(False):
            transform(model)
        self.weights.read(model)
        prepared_model.detach_engine(model)  # a model released earlier may still run under autocast
        prepared_model.attach_engine(model, None, self._strategy.forward_context(self.step.precision))
        self._evaluated_ids.add(id(model))

    def _set_up_for_training(self, model: torch.nn.Module) -> None:
        """Replicate or shard a model for training, fill it from registered checkpoints, and attach its engine.

        At the end, notify the process's `PreparationListeners`.
        """
        prepared_model.detach_engine(model)  # a model released earlier may still run under autocast
        accept_bare_names(model)
        engine = self._strategy.setup_model(model, self.transforms(True))
        self.weights.read(model)
        capabilities = self._strategy.capabilities
        is_trainable = any(parameter.requires_grad for parameter in model.parameters())
        has_no_sync = is_trainable and self._has_several_ranks and capabilities.deferred_sync
        sharding_strategy = None if capabilities.copies else self._strategy.name
        methods = None
        if sharding_strategy is not None and callable(getattr(type(model), "save_pretrained", None)):
            methods = extensions.load("feature", "sharded_adapters")(model, self._strategy, self._runtime)
        if sharding_strategy is not None and any(
            callable(getattr(type(module), "save_pretrained", None))
            for module in model.modules()
            if module is not model
        ):
            extensions.load("feature", "sharded_submodules")(model, self._strategy, self._runtime)
        prepared_model.attach_engine(
            model,
            engine,
            self._strategy.forward_context(self.step.precision),
            make_no_sync_context=partial(self._strategy.micro_batch_context, sync=False) if has_no_sync else None,
            sharding_strategy=sharding_strategy,
            forward_hooks=self._forward_hooks,
            rank_check=self._rank_check,
            methods=methods,
        )
        for listener in scope.get_or_create(PreparationListeners):
            listener(model, self.step)

    @property
    def _has_several_ranks(self) -> bool:
        """Whether models train on several processes, replicated or sharded."""
        return self._strategy.everyone.world_size > 1

    # ---------------------------------------------------------------- optimizers

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        """Wrap an optimizer, or return the existing wrapper if the optimizer was prepared before.

        Raises:
            UnsupportedError: If the optimizer cannot step on the parameters as the strategy stores them.
            PrepareError: If it is a placeholder, and the strategy has no configuration that defines the real optimizer.
        """
        if isinstance(optimizer, OptimizerPlaceholder):
            optimizer = self._strategy.replace_placeholder(optimizer, 1)
        for wrapper in map(_as_prepared, self.optimizers):
            if optimizer is wrapper or optimizer is wrapper.optimizer:
                return wrapper
        self._strategy.check_optimizer(optimizer)
        if (low_bit := load_low_bit_extension()) is not None:
            low_bit.prepare_optimizer(optimizer, self._strategy)
        repoint_parameters(optimizer, self._strategy)
        prepared = self.behavior.optimizer(optimizer, self.step, self.accelerators, self._rank_check)
        self.optimizers.append(prepared)
        return prepared

    def _check_optimizers(self) -> None:
        """Give optimizers that were prepared before their model the model's parameters, and check that they own no others.

        Raises:
            PrepareError: If an optimizer has parameters that belong to no prepared model.
        """
        prepared_ids = {id(parameter) for model in self.models for parameter in model.parameters()}
        for optimizer in self.optimizers:
            repoint_parameters(optimizer.optimizer, self._strategy)
            _as_prepared(optimizer).check_owned(prepared_ids)

    # ---------------------------------------------------------------- loaders

    def prepare_loader(self, loader: DataLoader[Any], is_moved: bool | None = None) -> PreparedLoader:
        """Shard a loader over ranks, or return it unchanged if it is prepared already.

        If a global batch size is set, the number of accumulation steps is derived from the first loader.

        Args:
            loader: Loader to prepare.
            is_moved: Whether to move batches to the device. None: the Accelerator's setting.

        Raises:
            DataError: If the loader cannot be split, or if ranks gave different data and the rules forbid it.
            ConfigError: If the loader's batches cannot add up to the global batch size.
        """
        for prepared in self.loaders:
            if loader is prepared:
                return prepared
        self._share_rng_states()
        if not (self.loading.dispatch_batches or isinstance(loader.dataset, IterableDataset)):
            compare_data(loader.dataset, self._strategy.everyone, self.behavior.loading_rules.raises_for_unequal_data)
        should_move = self.moves_objects if is_moved is None else is_moved
        prepared = prepare_loader(
            loader,
            shard=self._strategy.data_shard,
            config=self.loading,
            device=self._runtime.device if should_move else None,
            collectives=self._strategy.data_group,
            everyone=self._strategy.everyone,
            events=self.events,
            seed=self._derive_seed(),
            rng_types=self.rng_types,
            stream=self.loader_rng,
            rules=self.behavior.loading_rules,
        )
        other_rngs = [name for name in self.rng_types if name != "generator"]  # loaders share the generator themselves
        if other_rngs:
            synchronize_rng_states(other_rngs)
        self._prepared.add_loader(prepared)
        for listener in self.events.prepare_hooks:
            listener(prepared)
        if self.global_batch_size is not None and len(self.loaders) == 1:
            self._windows.set_num_steps(self._derive_num_steps(prepared, self.global_batch_size))
        return prepared

    def _derive_seed(self) -> int:
        """Return the seed for the next loader, derived from rank 0's seed. Each loader gets a different seed.

        This is a collective, because rank 0 broadcasts its seed.
        """
        own_seed = torch.initial_seed() if self.loading.data_seed is None else self.loading.data_seed
        seed = self._strategy.everyone.broadcast_object(own_seed)
        # torch's initial seed is an unsigned number of 64 bits.
        return mix_seed(seed & ((1 << 63) - 1), len(self.loaders) + self._prepared.num_absent_loaders)

    def _derive_num_steps(self, loader: PreparedLoader, global_batch_size: int) -> int:
        """Return the number of micro-batches per update for a global batch size.

        If the run has lost machines, and the global batch size is not a multiple of what the remaining ranks read at
        once, the loader is configured to return micro-batches of different sizes.

        Args:
            loader: Prepared loader that yields the micro-batches.
            global_batch_size: Samples per update over all ranks.

        Raises:
            ConfigError: If the ranks' batches cannot add up to `global_batch_size`.
        """
        num_shards, samples_per_step = self._strategy.data_shard.count, loader.total_batch_size
        if samples_per_step and global_batch_size % samples_per_step == 0:
            num_steps = global_batch_size // samples_per_step
            log.info("global batch %d = %d per process x %d processes x %d accumulation steps",
                     global_batch_size, samples_per_step // num_shards, num_shards, num_steps)  # fmt: skip
            return num_steps
        if samples_per_step and find_launched_ranks(self._strategy.everyone.world_size) is not None:
            fewest_steps = -(-global_batch_size // samples_per_step)
            for num_steps in range(fewest_steps, _MAX_STEPS_FACTOR * fewest_steps + 1):
                if loader.can_fit_update(global_batch_size, num_steps):
                    loader.request_update_size(global_batch_size, num_steps, samples_per_step)
                    log.warning_once(
                        "the global batch of %d samples is split unevenly among the ranks", global_batch_size
                    )
                    return num_steps
        raise ConfigError(
            f"global_batch_size={global_batch_size} is not a multiple of what all ranks read at once ({samples_per_step} "
            "samples); choose a multiple, or another batch size for the loader"
        )

    def set_loading(self, loading: DataLoaderConfiguration) -> None:
        """Set the options for splitting, padding and moving batches, for loaders that are prepared later."""
        self.loading = loading.freeze_copy()

    def set_evenness(self, even_batches: bool) -> None:
        """Set whether map-style loaders fill up the last batches of an epoch with repeated samples.

        This also changes loaders that are already prepared, in this and later epochs.
        """
        self.set_loading(replace(self.loading, even_batches=even_batches))
        for loader in self.loaders:
            loader.even_batches = even_batches

    @contextmanager
    def use_evenness(self, even_batches: bool) -> Iterator[None]:
        """Return a context that sets whether map-style loaders fill up the last batches with repeated samples.

        It also changes loaders that are already prepared. The earlier setting is restored when the context ends.
        """
        previous = self.loading.even_batches
        self.set_evenness(even_batches)
        try:
            yield
        finally:
            self.set_evenness(previous)

    # ---------------------------------------------------------------- schedulers

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Wrap a scheduler and connect it to its prepared optimizer, or return the existing wrapper.

        Log once how many steps it makes per update, and warn if its length was probably counted wrongly.

        Raises:
            PrepareError: If the scheduler's optimizer is not prepared, although it advances only with updates.
        """
        rule = self.rule
        if isinstance(scheduler, SchedulerPlaceholder):
            scheduler = self._strategy.replace_placeholder(scheduler, self.tick_base.num_processes)
            rule = StepsPerUpdate()  # the schedule's length was converted to updates
        for wrapper in self.schedulers:
            if scheduler is wrapper or scheduler is wrapper.scheduler:
                return cast(PreparedScheduler, wrapper)
        own = getattr(scheduler, "optimizer", None)  # a scheduler without this attribute follows all optimizers
        optimizers = [each for each in self.optimizers if own is None or own is each or own is each.optimizer]
        if not optimizers and self.follows_optimizer and self.behavior.scheduler.needs_optimizer:
            raise PrepareError(
                f"{type(scheduler).__name__} follows an optimizer that is not prepared; prepare that optimizer before it or in the "
                "same call, or pass step_scheduler_with_optimizer=False"
            )
        wrapped = self.behavior.scheduler(
            scheduler, optimizers, rule=rule, follows_optimizer=self.follows_optimizer, step=self.step
        )
        self.schedulers.append(wrapped)
        if self.follows_optimizer and rule is self.rule:
            self._log_rule(wrapped)
            wrapped.has_length_warning = warn_if_prepared_length_is_doubtful(
                wrapped.scheduler, rule, self.tick_base.num_processes, self._windows.num_steps, self.loaders
            )
        return wrapped

    def _log_rule(self, scheduler: PreparedScheduler) -> None:
        """Log how many steps a scheduler makes per update, and when it ends if its length is known."""
        name, rule = type(scheduler.scheduler).__name__, self.rule
        length, end = get_schedule_length(scheduler.scheduler), ""
        if length is not None:
            num_updates = -(-length // max(1, rule.ticks(self._windows.num_steps)))
            end = f"; it ends after {length} ticks, {num_updates} updates from now"
        log.info_once(f"{name} is {rule.reason}{end}")

    @property
    def tick_base(self) -> TickBase:
        """Pair of numbers from which scheduler steps per update are computed.

        In a resumed run, it can be the pair of the earlier run.
        """
        if self._resumed_tick_base is not None:
            return self._resumed_tick_base
        num_parts = 1 if self.loading.split_batches else self._strategy.data_shard.count
        if self.global_batch_size is not None:  # an update has equally many samples on any number of processes
            return TickBase(1, num_parts * self._windows.num_steps)
        return TickBase(num_parts, self._windows.num_steps)

    def keep_tick_base(self, num_processes: int, num_steps: int) -> None:
        """Keep the number of scheduler steps per update that the resumed run used before it was interrupted.

        This has no effect on schedules whose steps do not depend on the number of processes, such as one step per
        update.

        Args:
            num_processes: `tick_base.num_processes` before the interruption.
            num_steps: `tick_base.num_steps` before the interruption.
        """
        if self.tick_base == (num_processes, num_steps):
            return
        self._resumed_tick_base = TickBase(num_processes, num_steps)
        previous_rule = self.rule
        if isinstance(self.rule, StepsPerProcess):
            self.rule = StepsPerProcess(num_processes)
        elif isinstance(self.rule, StepsPerMicroBatch | KeptSteps):
            self.rule = KeptSteps(num_processes * num_steps, self._windows.num_steps)
        for scheduler in self.schedulers:
            if scheduler.rule is previous_rule:  # schedules that an engine's configuration defines count updates
                scheduler.set_rule(self.rule)

    # ---------------------------------------------------------------- failed attempts of a batch-size search, and the end

    def list_prepared_objects(self) -> dict[int, str]:
        """Return a dict from the `id()` of each prepared object to its name in messages."""
        names = {id(model): type(model).__name__ for model in self.models}
        names.update((id(each), type(each.optimizer).__name__) for each in self.optimizers)
        names.update((id(each), f"loader of {type(each.dataset).__name__}") for each in self.loaders)
        names.update((id(each), type(each.scheduler).__name__) for each in self.schedulers)
        return names

    def read_progress(self) -> dict[str, Any]:
        """Return the counts of updates, samples and tokens, for `restore_progress`."""
        run = self.step.run
        return {"clock": run.clock.snapshot(), "seen": run.seen.read_counts()}

    def restore_progress(self, progress: dict[str, Any]) -> None:
        """Restore the counts of updates, samples and tokens, because a batch-size search calls its function again.

        Args:
            progress: Counts, as `read_progress` returns them.
        """
        run = self.step.run
        run.clock.restore(progress["clock"])
        run.seen.restore_counts(progress["seen"])

    def release(self, kept_ids: Container[int] = ()) -> None:
        """Remove prepared objects from the registry, and drop all accumulation windows.

        The models get their original class back. With `Behavior.keeps_precision`, they still run under autocast.

        Args:
            kept_ids: IDs of objects that stay. By default, all objects are removed.
        """
        for model in self.models:
            if id(model) not in kept_ids:
                prepared_model.detach_engine(model)
                if self.behavior.keeps_precision:
                    prepared_model.attach_engine(model, None, self._strategy.forward_context(self.step.precision))
                if kept_ids:
                    self._strategy.release_model(model)
        self._prepared.remove_objects(kept_ids)
        if not self.loaders:
            self.loader_rng.load_state(None)
        self._evaluated_ids &= {id(model) for model in self.models}
        self._packing_checked_ids &= {id(model) for model in self.models}
        self.step.forget_windows()
        if not self.models:
            self._strategy.release_model()


def _as_prepared(optimizer: OptimizerEntry) -> PreparedOptimizer:
    """Return an optimizer from the registry, typed as `PreparedOptimizer`.

    The registry contains no other optimizers, because only `Preparation` adds them.
    """
    return cast("PreparedOptimizer", optimizer)


def _report_unknown(objects: Sequence[Any], is_strict: bool) -> None:
    """Warn once that objects of these types are returned unchanged, or raise `PrepareError` if `is_strict` is set."""
    kinds = [f"{type(obj).__module__}.{type(obj).__qualname__}" for obj in objects]
    text = (
        f"prepare() got {', '.join(dict.fromkeys(kinds))}, which is not a model (nn.Module), optimizer, DataLoader or schedule (an "
        "object with step, state_dict and load_state_dict). Wrap data in a torch DataLoader; leave other objects out"
    )
    if is_strict:
        raise PrepareError(text)
    log.warning_once("%s. prepare() returns it unchanged; with strict=True, this is an error", text)
