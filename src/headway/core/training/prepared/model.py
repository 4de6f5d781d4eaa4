"""Prepared model: the user's own object, with a subclass of its class that routes calls through autocast and DDP.

The object keeps its isinstance relations, attributes and state_dict keys, because only its class is replaced by a
subclass of it, as torch's fully_shard does. `forward` is never replaced. The engine (for example a DDP instance) is
kept outside the module tree. It calls the module a second time, and a flag lets that inner call run the user's forward.

In a run on several processes, scripts expect two attributes of DistributedDataParallel: `model.module` and
`model.no_sync()`. A prepared model has both, and its `module` is the model itself. An attribute or submodule of the
same name in the user's class takes precedence.
"""

import copyreg
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from headway.common.callsite import is_called_by, is_user_file, walk_stack
from headway.core.runtime.control_plane.conditional_calls import RankConditionalCallCheck
from headway.core.strategies.base import Engine
from headway.core.strategies.blocks import EXTENDED_CLASS, get_class_name
from headway.core.strategies.fully_sharded.dtensors import shard_like
from headway.core.training._torch import functional_call, peek_interpreter_stack
from headway.core.weights.compiled import rename_bare_items
from headway.errors import PrepareError, StateError, UnsupportedError
from headway.log import get_logger

log = get_logger(__name__)

_KEY = "_headway_call"
"""Key in a prepared model's `__dict__` for its `_CallState`. It is set there directly, past `Module.__setattr__`."""
_MAX_MODULE_READS = 100_000
"""Number of reads of `model.module` without a forward in between, after which the attribute counts as missing."""
_SHARDS_IN_STATE_DICT = (
    "state_dict() of %s has this rank's shard of each tensor, so a file of it lacks the other ranks' shards. For full weights: "
    "accelerator.save_model(model, folder), or accelerator.get_state_dict(model), on every rank"
)

NoSyncFactory = Callable[[torch.nn.Module], AbstractContextManager[Any]]
"""Function that returns a context for a model, in which backward does not reduce gradients over processes."""
ForwardHook = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None]
"""Function that is called before a prepared model's outermost forward, with the model and the call's arguments."""


def attach_engine(
    model: torch.nn.Module,
    engine: Engine | None,
    autocast: Callable[[], AbstractContextManager[Any]] | None,
    make_no_sync_context: NoSyncFactory | None = None,
    sharding_strategy: str | None = None,
    forward_hooks: Sequence[ForwardHook] = (),
    rank_check: RankConditionalCallCheck | None = None,
    methods: Mapping[str, Any] | None = None,
) -> None:
    """Route calls to `model` through `engine` and `autocast`, by a subclass that replaces the class of the object.

    Leave the object unchanged if `forward_hooks` is empty, and `engine`, `autocast`, `make_no_sync_context` and
    `sharding_strategy` are None.

    Args:
        model: User's model.
        engine: Engine, such as a DDP instance, that runs forward passes with gradients. If its attribute
            `serves_evaluation` is true, it also runs all other forward passes. None: they run directly.
        autocast: Function that creates the autocast context of a forward. None: forwards run without autocast.
        make_no_sync_context: Function that creates the context of `no_sync()`. None on a single process: the model then gets
            neither `no_sync()` nor `module`.
        sharding_strategy: Name of the strategy that sharded the model. A sharded model cannot be copied. None: the model
            is not sharded.
        forward_hooks: Functions that are called before each outermost forward.
        rank_check: Check that raises an error if only some ranks request the state dict of a sharded model, which needs
            all ranks. None: no check.
        methods: Methods that replace those of the user's class, by name. By default, no method is replaced.

    Raises:
        PrepareError: If the class cannot be extended, because it defines __slots__ or forbids subclasses.
    """
    if not forward_hooks and all(each is None for each in (engine, autocast, make_no_sync_context, sharding_strategy)):
        return
    class_name = get_class_name(model)
    bare_class: Any = type(model)
    added: dict[str, Any] = {
        "__module__": bare_class.__module__, "__doc__": bare_class.__doc__, EXTENDED_CLASS: bare_class
    }  # fmt: skip
    if make_no_sync_context is not None:
        ddp_attributes: dict[str, Any] = {"module": property(_get_module), "no_sync": _no_sync}
        added.update({name: value for name, value in ddp_attributes.items() if not hasattr(model, name)})
    added |= methods or {}
    mixin = PreparedModel if sharding_strategy is None else PreparedShard
    try:
        # Keep the class name, because repr, wrapping by class name and configuration files refer to it.
        model.__class__ = type(class_name, (mixin, bare_class), added)
    except TypeError as error:
        raise PrepareError(
            f"the class {bare_class.__qualname__} cannot be prepared, because it cannot be extended: {error}"
        ) from error
    model.__dict__[_KEY] = _CallState(
        bare_class=bare_class,
        class_name=class_name,
        engine=engine,
        autocast=autocast,
        make_no_sync_context=make_no_sync_context,
        sharding_strategy=sharding_strategy,
        forward_hooks=forward_hooks,
        rank_check=rank_check,
        handles_evaluation=bool(getattr(engine, "serves_evaluation", False)),
        expose_output=getattr(engine, "expose_output", None),
    )


def detach_engine(model: torch.nn.Module) -> None:
    """Restore the model's original class. Do nothing if the model is not prepared."""
    call = model.__dict__.pop(_KEY, None)
    if call is not None:
        model.__class__ = call.bare_class


@dataclass(slots=True, eq=False)
class _CallState:
    """Call settings and call state of one prepared model. Only the last three fields change.

    Attributes:
        bare_class: Class that the model had before it was prepared; one of `fully_shard` in a sharded model.
        class_name: Name of the user's class, for messages.
        engine: Engine, such as a DDP instance, that runs forward passes with gradients; None to run them directly.
        autocast: Function that creates the autocast context of a forward; None without autocast.
        make_no_sync_context: Function that creates the context of `no_sync()`, or None.
        sharding_strategy: Name of the strategy that sharded the model; None if it is not sharded.
        forward_hooks: Functions that are called before each outermost forward.
        rank_check: Check that all ranks make a state-dict call on a sharded model, or None.
        handles_evaluation: Whether the engine also runs forward passes without gradients.
        expose_output: Attribute of this name of the engine (`core/strategies/base.py`), or None if it has none.
        is_inside: Whether the outermost call is running, so that inner calls run the user's forward.
        num_module_reads: Number of reads of the attribute `module` since the last forward began.
        is_output_exposed: Whether the next inner call is the engine's own, whose output `expose_output` must convert.
    """

    bare_class: type
    class_name: str
    engine: Engine | None
    autocast: Callable[[], AbstractContextManager[Any]] | None
    make_no_sync_context: NoSyncFactory | None
    sharding_strategy: str | None
    forward_hooks: Sequence[ForwardHook]
    rank_check: RankConditionalCallCheck | None
    handles_evaluation: bool
    expose_output: Callable[[Any], Any] | None = None
    is_inside: bool = False
    num_module_reads: int = 0
    is_output_exposed: bool = False


class PreparedModel:
    """Mixin that precedes the user's class in a prepared model's class. It overrides calls and copying."""

    _is_accelerate_prepared = True  # a flag that libraries check

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward under autocast, and through the engine, such as DDP, if gradients are enabled.

        Some engines also run forwards without gradients. A forward inside a torch.func transform bypasses the engine.
        """
        call: _CallState = self.__dict__[_KEY]
        run_forward = super().__call__  # type: ignore[misc]
        if call.is_inside:  # the engine calls the model, or the user's forward calls the model itself
            if not call.is_output_exposed:
                return run_forward(*args, **kwargs)
            call.is_output_exposed = False  # the user's forward can call the model itself
            return call.expose_output(run_forward(*args, **kwargs))  # type: ignore[misc]
        for hook in call.forward_hooks:
            hook(self, args, kwargs)  # type: ignore[arg-type]
        run: Any = run_forward
        if call.engine is not None and (call.handles_evaluation or torch.is_grad_enabled()) and not _is_transformed():
            run = call.engine
            call.is_output_exposed = call.expose_output is not None
        call.is_inside = True
        call.num_module_reads = 0
        try:
            if call.autocast is None:
                return run(*args, **kwargs)
            with call.autocast():
                return run(*args, **kwargs)
        finally:
            call.is_inside = call.is_output_exposed = False

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Apply a conversion such as to(), double() or half().

        Raises:
            StateError: If the dtype of replicated parameters changed, because DDP would not reduce their gradients.
        """
        dtypes_before = [parameter.dtype for parameter in self.parameters()]  # type: ignore[attr-defined]
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        dtypes = [parameter.dtype for parameter in self.parameters()]  # type: ignore[attr-defined]
        if dtypes != dtypes_before and self.__dict__[_KEY].engine is not None:
            name = self.__dict__[_KEY].class_name
            raise StateError(
                f"the dtype of {name}'s parameters was changed after prepare(), which leaves their gradients unreduced; change it "
                "before prepare(), or use mixed_precision="
            )
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Make pickle and deepcopy create an object of the original class, without the engine.

        Raises:
            UnsupportedError: If the model is sharded over processes, because a copy could not be trained.
        """
        refuse_copies(self)
        return reduce_to_bare(self, super().__reduce_ex__(protocol), self.__dict__[_KEY].bare_class, (_KEY,))


class PreparedShard(PreparedModel):
    """Variant of `PreparedModel` for models that are sharded over processes, of which each process holds one shard.

    It forbids copies, torch.func and state-dict calls that only some ranks make.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward under autocast and through the engine.

        Raises:
            UnsupportedError: If `torch.func.functional_call` or a transform such as vmap calls the model, because it
                would use this rank's shards instead of the gathered parameters. Also if only some ranks call the model,
                which is checked once for each stack of callers.
        """
        # While torch.compile traces the call, TorchDynamo cannot read frames.
        if (not torch.compiler.is_compiling() and is_called_by(functional_call.__code__)) or _is_transformed():
            call: _CallState = self.__dict__[_KEY]
            raise UnsupportedError(
                f"torch.func cannot be used on {call.class_name} under the {call.sharding_strategy} strategy, where each "
                "process holds a part of its parameters. Use the layout ddp"
            )
        return super().__call__(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> None:
        """Raise an error, because a sharded model cannot be copied.

        Without this method, torch's own error would be raised before `__reduce_ex__` is called.

        Raises:
            UnsupportedError: Always.
        """
        refuse_copies(self)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return a state dict with this rank's shards, as torch's sharded models do. Warn once if user code calls it.

        Raises:
            UnsupportedError: If only some ranks make the call, for example under a condition, so that the other shards
                would be missing.
        """
        name = self.__dict__[_KEY].class_name
        self._check_rank_condition(
            f"the state_dict() of {name} is asked for",
            "gathering full weights (accelerator.get_state_dict(model))",
        )
        _, caller, *_ = walk_stack()
        if is_user_file(caller.f_code.co_filename):  # libraries that gather the shards also call it
            log.warning_once(_SHARDS_IN_STATE_DICT, name)
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load this rank's shards of a state dict that has full tensors or shards.

        Raises:
            UnsupportedError: If only some ranks make the call, for example under a condition.
        """
        self._check_rank_condition(
            f"the load_state_dict() of {self.__dict__[_KEY].class_name} is called", "loading weights"
        )
        own = super().state_dict()  # type: ignore[misc]
        # Names with and without the prefixes of compiled submodules are accepted.
        shards = own | dict(rename_bare_items(own.items()))
        sharded = dict(state_dict)
        for name, value in state_dict.items():
            if name in shards and value.shape == shards[name].shape:
                sharded[name] = shard_like(value, shards[name])
        return super().load_state_dict(sharded, *args, **kwargs)  # type: ignore[misc]

    def _check_rank_condition(self, call: str, action: str) -> None:
        """Raise `UnsupportedError` if only some ranks make the call, for example under `if is_main_process:`.

        Args:
            call: Call that was made, for the message.
            action: Action that needs all ranks, for the message.
        """
        rank_check: RankConditionalCallCheck | None = self.__dict__[_KEY].rank_check
        if rank_check is not None:
            rank_check.check(call, action)


def _is_transformed() -> bool:
    """Whether the call runs inside vmap, grad or another torch.func transform.

    Gradients that such a transform computes are not reduced over ranks.
    """
    return peek_interpreter_stack() is not None


def _get_module(model: Any) -> Any:
    """Return the model itself as the attribute `module`, because a prepared model has no wrapper to remove.

    Raises:
        AttributeError: If the attribute is read very often without a forward in between. This ends loops such as `while
            hasattr(model, "module"): model = model.module`, which remove nested wrappers.
    """
    call: _CallState = model.__dict__[_KEY]
    call.num_module_reads += 1
    if call.num_module_reads > _MAX_MODULE_READS:
        call.num_module_reads = 0
        raise AttributeError("module")
    return model


def _no_sync(model: Any) -> AbstractContextManager[Any]:
    """Return a context in which backward does not reduce gradients over processes."""
    make_no_sync_context: NoSyncFactory = model.__dict__[_KEY].make_no_sync_context
    return make_no_sync_context(model)


def refuse_copies(model: Any) -> None:
    """Raise an error if the model is sharded, because it cannot be copied or pickled.

    Raises:
        UnsupportedError: If this process holds only part of the model.
    """
    call: _CallState = model.__dict__[_KEY]
    if call.sharding_strategy is not None:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be copied or pickled: under the {call.sharding_strategy} strategy each process holds a "
            "part of it. For an average of its weights (AveragedModel), use headway.ExponentialMovingAverage(model). Otherwise copy "
            "it before prepare(), or save it with accelerator.save_model()"
        )


def reduce_to_bare(model: Any, reduced: Any, bare_class: type, keys: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the value for `__reduce_ex__` with which copy and pickle rebuild `model` in its original class.

    Args:
        model: Object whose class was exchanged for a subclass.
        reduced: Result of `__reduce_ex__` for `model` in its current class.
        bare_class: Original class.
        keys: Names of the attributes that were added together with the subclass. The rebuilt object lacks them.
    """
    construct, arguments, *rest = reduced  # the rest is optional: state, list items, dict items, state setter
    if construct is type(model):
        construct = bare_class
    elif construct is copyreg.__newobj__:  # type: ignore[attr-defined]
        construct = _create_uninitialized  # copyreg's own function requires the object's current class
    arguments = tuple(bare_class if argument is type(model) else argument for argument in arguments)
    if rest and isinstance(rest[0], dict):
        rest[0] = {key: value for key, value in rest[0].items() if key not in keys}
    return construct, arguments, *rest


def _create_uninitialized(kind: type, *args: Any) -> Any:
    """Return an instance of a class without calling its `__init__`. Pickle calls this."""
    return kind.__new__(kind, *args)
