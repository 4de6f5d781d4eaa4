"""The prepared model: the user's own object, whose class gains a call through the engine and autocast.

The object stays what it was - isinstance, attributes, state_dict keys - because only its class is exchanged for a
subclass of it, as torch's fully_shard does. `forward` is never replaced. The engine (e.g. a DDP instance) lives
beside the module tree; it calls the module again, and a guard lets that inner call through.

On several processes scripts expect what DistributedDataParallel has: `model.module`, which is the model itself, and
`model.no_sync()`. A class, attribute or submodule of the user's with one of these names wins.
"""

import copyreg
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.stateless import _functional_call

from headway.common.callsite import is_called_by, is_users, stack
from headway.errors import PrepareError, StateError, UnsupportedError
from headway.log import get_logger
from headway.runtime.control_plane.attendance import RankConditionalCallCheck
from headway.strategies.base import Engine
from headway.strategies.fully_sharded.dtensors import cut_like

log = get_logger(__name__)

_KEY = "_headway_call"
_MOST_OPENED = 100_000
_PARTS = (
    "state_dict() of %s holds this rank's part of each tensor, so a file of it lacks the other ranks' parts. Whole weights: "
    "accelerator.save_model(model, folder), or accelerator.get_state_dict(model), on every rank"
)

KeepLocal = Callable[[torch.nn.Module], AbstractContextManager[Any]]
"""From a model to a block whose backwards keep their gradients on this process."""
Look = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None]
"""Told that a model is called, and with what."""


@dataclass(slots=True, eq=False)
class _Call:
    """How calls of one prepared model run."""

    bare_class: type
    engine: Engine | None
    autocast: Callable[[], AbstractContextManager[Any]] | None
    keep_local: KeepLocal | None
    shards: str | None
    looks: Sequence[Look]
    lone: RankConditionalCallCheck | None
    serves_all: bool
    is_inside: bool = False
    num_opened: int = 0


class PreparedModel:
    """Mixed in before the user's class; it overrides the call and how copies are made."""

    _is_accelerate_prepared = True  # which libraries ask for

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The user's forward, under autocast, through the engine where gradients are wanted."""
        call: _Call = self.__dict__[_KEY]
        bare = super().__call__  # type: ignore[misc]
        if call.is_inside:
            return bare(*args, **kwargs)
        for look in call.looks:
            look(self, args, kwargs)  # type: ignore[arg-type]
        is_served = call.engine is not None and (call.serves_all or torch.is_grad_enabled()) and not _is_transformed()
        run: Any = call.engine if is_served else bare
        call.is_inside = True
        call.num_opened = 0
        try:
            if call.autocast is None:
                return run(*args, **kwargs)
            with call.autocast():
                return run(*args, **kwargs)
        finally:
            call.is_inside = False

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """What is behind to(), double(), half() and the like.

        Raises:
            StateError: parameters of a replica have another dtype now, which its engine reduces no gradients of.
        """
        before = [parameter.dtype for parameter in self.parameters()]  # type: ignore[attr-defined]
        moved = super()._apply(*args, **kwargs)  # type: ignore[misc]
        after = [parameter.dtype for parameter in self.parameters()]  # type: ignore[attr-defined]
        if after != before and self.__dict__[_KEY].engine is not None:
            name = self.__dict__[_KEY].bare_class.__name__
            raise StateError(
                f"the dtype of {name}'s parameters was changed after prepare(), which leaves their gradients unreduced; change it "
                "before prepare(), or use mixed_precision="
            )
        return moved

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deepcopy give the bare class, without an engine.

        Raises:
            UnsupportedError: this process holds a part of the model, which a copy could not train.
        """
        refuse_copies(self)
        return reduce_to_bare(self, super().__reduce_ex__(protocol), self.__dict__[_KEY].bare_class, (_KEY,))


class PreparedPart(PreparedModel):
    """Mixed in where this process holds a part of the model."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As above.

        Raises:
            UnsupportedError: torch.func calls it, with parameters in place of those that the layout gathers.
        """
        # TorchDynamo cannot read frames.
        if (not torch.compiler.is_compiling() and is_called_by(_functional_call.__code__)) or _is_transformed():
            call: _Call = self.__dict__[_KEY]
            raise UnsupportedError(
                f"torch.func cannot be used on {call.bare_class.__name__} under the {call.shards} strategy, where each process "
                "holds a part of its parameters. Use the layout ddp"
            )
        return super().__call__(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> None:
        """Refused: torch's own refusal would come before `__reduce_ex__`."""
        refuse_copies(self)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's part of each tensor, as torch's sharded models have it.

        Raises:
            UnsupportedError: the conditions around the call keep other ranks away, and their parts would be missing.
        """
        name = self.__dict__[_KEY].bare_class.__name__
        self._look(
            f"the state_dict() of {name} is asked for",
            "putting whole weights together (accelerator.get_state_dict(model))",
        )
        _, caller, *_ = stack()
        if is_users(caller.f_code.co_filename):
            log.warning_once(_PARTS, name)
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Take up parts, or this rank's part of whole tensors.

        Raises:
            UnsupportedError: as for `state_dict`.
        """
        self._look(f"the load_state_dict() of {self.__dict__[_KEY].bare_class.__name__} is called", "loading weights")
        own = super().state_dict()  # type: ignore[misc]
        fits = {
            name: cut_like(value, own[name]) if name in own and value.shape == own[name].shape else value
            for name, value in state_dict.items()
        }
        return super().load_state_dict(fits, *args, **kwargs)  # type: ignore[misc]

    def _look(self, call: str, action: str) -> None:
        lone: RankConditionalCallCheck | None = self.__dict__[_KEY].lone
        if lone is not None:
            lone.check(call, action)


def _is_transformed() -> bool:
    """Is this within vmap, grad or another transform of torch.func? Its gradients are results, which no engine reduces."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def reduce_to_bare(model: Any, reduced: Any, bare: type, keys: tuple[str, ...]) -> tuple[Any, ...]:
    """What copy and pickle need to rebuild `model` with the class it had, and without the attributes `keys`.

    Args:
        model: an object whose class was exchanged.
        reduced: what `__reduce_ex__` of that class says.
        bare: the class it had.
        keys: attributes that came with the exchange.
    """
    made = list(reduced)
    made[1] = tuple(bare if argument is type(model) else argument for argument in made[1])
    # copyreg's own constructor insists on the object's present class.
    made[0] = bare if made[0] is type(model) else _new if made[0] is copyreg.__newobj__ else made[0]  # type: ignore[attr-defined]
    if len(made) > 2 and isinstance(made[2], dict):
        made[2] = {key: value for key, value in made[2].items() if key not in keys}
    return tuple(made)


def _new(kind: type, *args: Any) -> Any:
    return kind.__new__(kind, *args)


def _module(model: Any) -> Any:
    """The model itself: there is no wrapper to open.

    Raises:
        AttributeError: it is read for ever, without a forward in between; so `while hasattr(model, "module"): model =
            model.module`, which opens one wrapper after the other, comes to its end.
    """
    call: _Call = model.__dict__[_KEY]
    call.num_opened += 1
    if call.num_opened > _MOST_OPENED:
        call.num_opened = 0
        raise AttributeError("module")
    return model


def _no_sync(model: Any) -> AbstractContextManager[Any]:
    """A block whose backwards keep their gradients on this process."""
    keep_local: KeepLocal = model.__dict__[_KEY].keep_local
    return keep_local(model)


def attach(
    model: torch.nn.Module,
    engine: Engine | None,
    autocast: Callable[[], AbstractContextManager[Any]] | None,
    keep_local: KeepLocal | None = None,
    shards: str | None = None,
    looks: Sequence[Look] = (),
    lone: RankConditionalCallCheck | None = None,
) -> None:
    """Make calls of `model` run through `engine` and `autocast`; with nothing to add, the object is left as it is.

    Args:
        model: the user's.
        engine: what a forward with gradients goes through; every forward, where it has `serves_evaluation`.
        autocast: makes the context of a forward.
        keep_local: for `no_sync()`; None: the model gets neither that nor `module`, as on one process.
        shards: the strategy that left a part of the model on this process, so that it cannot be copied; None: it can.
        looks: told of each forward that is not within another one, before it.
        lone: told before state dicts of parts, which need all ranks.

    Raises:
        PrepareError: its class cannot be extended (it defines __slots__ or forbids subclasses).
    """
    if not looks and all(each is None for each in (engine, autocast, keep_local, shards)):
        return
    bare = type(model)
    added: dict[str, Any] = {"__module__": bare.__module__, "__doc__": bare.__doc__}
    if keep_local is not None:
        expected: dict[str, Any] = {"module": property(_module), "no_sync": _no_sync}
        added.update({name: value for name, value in expected.items() if not hasattr(model, name)})
    try:
        # The same name: repr, wrapping by class name and configurations keep meaning the user's class.
        model.__class__ = type(bare.__name__, (PreparedModel if shards is None else PreparedPart, bare), added)
    except TypeError as error:
        raise PrepareError(
            f"the class {bare.__qualname__} cannot be prepared, because it cannot be extended: {error}"
        ) from error
    serves_all = bool(getattr(engine, "serves_evaluation", False))
    model.__dict__[_KEY] = _Call(bare, engine, autocast, keep_local, shards, looks, lone, serves_all)


def refuse_copies(model: Any) -> None:
    """Refuse to copy or pickle a model of which this process holds a part.

    Raises:
        UnsupportedError: it does.
    """
    call: _Call = model.__dict__[_KEY]
    if call.shards is not None:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be copied or pickled: under the {call.shards} strategy each process holds a part of it. "
            "Copy it before prepare() (for an average of weights, update that copy from accelerator.get_state_dict(model)), or "
            "save it with accelerator.save_model()"
        )


def detach(model: torch.nn.Module) -> None:
    """Give the model its own class back."""
    call = model.__dict__.pop(_KEY, None)
    if call is not None:
        model.__class__ = call.bare_class
