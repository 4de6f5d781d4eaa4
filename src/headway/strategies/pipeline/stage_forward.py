"""A model's own forward, run on every stage: blocks of other stages are passed over, and those of this one get what was received.

The class of the model, of its blocks and of the modules around them is exchanged for a subclass whose call goes through a
`ModuleRouter`. While a stage runs, a `StageForward` says what each call does: earlier blocks give stand-ins, the last of them
what the stage before has sent; after the stage's own last block the forward, and whatever called it, is left by an exception. So
everything that a model's forward computes on its way (masks, positions) is there on each stage, and no code of the model is known
or traced.

A stand-in has the right shape and no value. Whatever is computed from one is one, too; where it would enter a block or a result,
there is an error.

What is remembered of calls with the same shapes and values: so many, the one that was not needed for longest goes first.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch._subclasses.fake_tensor import is_fake

from headway.errors import PrepareError, UnsupportedError
from headway.log import get_logger
from headway.runtime.collectives.tree import Tree, leaves, map_tensors, structure, tensors
from headway.strategies.context.context_parallel import ContextParallel
from headway.strategies.parts import extend
from headway.strategies.pipeline.stages import StageSplit

log = get_logger(__name__)

CAPACITY = 256
"""How many are remembered."""

Signature = tuple[str, ...]
Value = TypeVar("Value")


class CallCache(Generic[Value]):
    """By (signature, whatever else decides).

    Args:
        what: what is to be found out anew each time, for the warning that there are too many.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._of: dict[tuple[Signature, Any], Value] = {}
        self._is_told = False

    def __len__(self) -> int:
        return len(self._of)

    def get(self, key: tuple[Signature, Any]) -> Value | None:
        """What is known, or None."""
        value = self._of.pop(key, None)
        if value is not None:
            self._of[key] = value  # the latest now
        return value

    def put(self, key: tuple[Signature, Any], value: Value) -> None:
        """Remember it, and warn once when others have to be forgotten for it."""
        if len(self._of) == CAPACITY:
            if not self._is_told:
                self._is_told = True
                self._warn()
            del self._of[next(iter(self._of))]
        self._of[key] = value

    def _warn(self) -> None:
        log.warning(
            "%d different batches have been seen, by shapes of tensors and values of numbers and text, and more are coming: %s. "
            "What changes most: %s. Give numbers that change as tensors, leave text out of the batch, and pad to fewer shapes",
            CAPACITY,
            self._what,
            _changing([signature for signature, _ in self._of]),
        )


def _changing(signatures: list[Signature]) -> str:
    """The entry with the most values among signatures of the commonest structure, as "an int (entry 2 of 3)"."""
    ((commonest, _),) = Counter(each[0] for each in signatures).most_common(1)
    columns = list(zip(*(each[1:] for each in signatures if each[0] == commonest)))
    counts = [len(set(column)) for column in columns]
    if not counts or max(counts) == 1:
        return "how the batch is nested, or whether its gradients are wanted"
    number = counts.index(max(counts))
    return f"{columns[number][0].partition(' ')[0]} (entry {number + 1} of {len(columns)} in {commonest})"


def signature(tree: Tree) -> Signature:
    """How it is nested, then each leaf: kind, and a tensor's shape and dtype; numbers and text by value."""
    return structure(tree), *map(_leaf, leaves(tree))


def _leaf(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"shape {leaf.dtype}{tuple(leaf.shape)}"
    name = type(leaf).__name__
    return f"{name} {leaf!r}" if isinstance(leaf, int | float | str | bool | None) else name


_KEY = "_headway_route"
_ASKED = ("output_hidden_states", "output_attentions", "output_router_logits")
"""What transformers' models collect from all of their blocks."""

Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What stands around a module's own call."""


class PlaceholderTensor(torch.Tensor):
    """A tensor of a certain shape without values of its own; what is computed from it is one as well."""


def stand_in(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """One of the shape and dtype of `like`; it takes no memory. In a plan no tensor has values, and none is marked."""
    found = torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)
    return found if is_fake(found) else found.as_subclass(PlaceholderTensor)


class StageDone(BaseException):
    """The stage's last block has run. No error: what it leaves must not handle it."""

    def __init__(self, running: "StageForward", output: Tree) -> None:
        super().__init__("the stage is done; this leaves the forward, and is not an error")
        self.running = running
        self.output = output


class StageForward:
    """One run of one stage.

    Args:
        route: of the model.
        stage: its number.
        received: what the stage before has sent; for the first, nothing.
        goes_on: the last stage's forward goes on after its last block.
        is_tail: all blocks have run; only what comes after them is wanted.
    """

    def __init__(self, route: "ModuleRouter", stage: int, received: Tree, goes_on: bool, is_tail: bool = False) -> None:
        self._route = route
        self.stage = stage
        self._received = received
        stages = route.stages
        self._begin = len(stages.blocks) if is_tail else stages.bounds[stage]
        self._end = len(stages.blocks) if is_tail else stages.bounds[stage + 1]
        self._goes_on = goes_on
        self._next = 0
        self._num_calls = 0
        self._absent: list[str] = []
        self._learns = torch.is_grad_enabled()

    def model_call(self) -> None:
        """The model is called.

        Raises:
            UnsupportedError: for the second time.
        """
        self._num_calls += 1
        if self._num_calls > 1:
            raise UnsupportedError(
                f"{self._route.kind} was called twice for one batch; under pipeline parallelism a loss may call the model once. Join "
                "the inputs (torch.cat), or use another strategy"
            )

    def block(self, index: int, bare: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block is called.

        Raises:
            UnsupportedError: in another order, with gradients turned off on the way to it, or with what other stages have
                computed besides its input.
        """
        names = self._route.stages.names
        if index != self._next:
            expected = names[self._next] if self._next < len(names) else "no block"
            raise UnsupportedError(
                f"{self._route.kind} called block {names[index]} where {expected} comes in the module tree; a pipeline needs "
                "blocks that run once each, in order. Name them with PipelineOptions(blocks=[...]), or use another strategy"
            )
        self._next += 1
        if index < self._begin:
            if index == self._begin - 1:
                self._check_gradients(index, self._received)
                return self._received
            return map_tensors(lambda tensor: stand_in(tensor, tensor.device), self._received)
        self._check(f"block {names[index]}", (args, kwargs))
        self._check_gradients(index, (args, kwargs, list(self._route.stages.blocks[index].parameters())))
        output = bare(*args, **kwargs)
        if index == self._end - 1 and not self._goes_on:
            raise StageDone(self, output)
        return output

    def absent(self, name: str) -> None:
        """A module of another stage is passed over."""
        self._absent.append(name)

    def finished(self, result: Tree) -> None:
        """The forward has returned.

        Raises:
            UnsupportedError: its blocks did not run, or it computed with what is on other stages.
        """
        if self._next < len(self._route.stages.blocks):
            name = self._route.stages.names[self._next]
            raise UnsupportedError(
                f"the loss was computed without block {name} of {self._route.kind}; it must call the model once, with all blocks"
            )
        self._check("the result", result)

    def _check_gradients(self, index: int, used: Tree) -> None:
        """Is the graph of what learns lost around this block? `StageDone` leaves a reentrant checkpoint before its own is made."""
        if not self._learns or torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors(used)):
            return
        raise UnsupportedError(
            f"{self._route.kind} called block {self._route.stages.names[index]} with gradients turned off, though it learns: a "
            "pipeline takes no reentrant checkpointing, and no torch.no_grad() around blocks that learn. Use checkpoint(..., "
            "use_reentrant=False) or ActivationCheckpointing, and requires_grad_(False) for what must not learn"
        )

    def _check(self, where: str, tree: Tree) -> None:
        if any(isinstance(tensor, PlaceholderTensor) for tensor in tensors(tree)):
            passed = f" ({', '.join(dict.fromkeys(self._absent))})" if self._absent else ""
            raise UnsupportedError(
                f"{where} of {self._route.kind} on stage {self.stage} needs values that only other stages have{passed}: a pipeline "
                "hands on what a block returns, and nothing else. Say where such a module belongs with PipelineOptions(first=[...], "
                "last=[...]), or use another strategy"
            )


class ModuleRouter:
    """How calls of one model's modules run in this process.

    Args:
        model: the user's.
        stages: how it is cut.
        local: the stages that this process has.
        device: where it computes.

    Attributes:
        running: the stage that runs at the moment.
        whole: what runs the whole pipeline, when the model is called outside of a stage.
        leave: what ends the model's forward, of its output, where a stage has left it before its end.
        context: what cuts the model's sequences; None: they are whole.
    """

    def __init__(self, model: torch.nn.Module, stages: StageSplit, local: frozenset[int], device: torch.device) -> None:
        self.stages = stages
        self.kind = type(model).__name__
        self.local = local
        self.running: StageForward | None = None
        self.whole: Call | None = None
        self.leave: Callable[[Tree], Tree] | None = None
        self.context: ContextParallel | None = None
        self._device = device
        self._shapes: CallCache[Tree] = CallCache(
            "the shapes that modules of other stages return are found anew for each"
        )
        self._takes_cache = _takes(model, "use_cache")
        self._config = getattr(model, "config", None)
        for number, block in enumerate(stages.blocks):
            _exchange(block, partial(self._call_block, number))
        for name, on in stages.sides.items():
            side = model.get_submodule(name)
            _exchange(side, partial(self._call_side, name, side, on))
        _exchange(model, self._call_model)

    def run(
        self, stage: int, received: Tree, forward: Callable[[], Any], goes_on: bool = False, is_tail: bool = False
    ) -> Any:
        """Run `forward`, which calls the model, as one stage; returns what its last block did, or what `forward` does."""
        before, self.running = self.running, StageForward(self, stage, received, goes_on, is_tail)
        mine = self.running
        try:
            result = forward()
            mine.finished(result)
            return result
        except StageDone as arrived:
            if arrived.running is not mine:
                raise
            return arrived.output if self.leave is None else self.leave(arrived.output)
        finally:
            self.running = before

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a call, without a cache.

        Raises:
            UnsupportedError: it asks for a cache, or for what all blocks would have to give.
        """
        if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
            raise UnsupportedError(
                f"{self.kind} was called with a cache (use_cache, past_key_values), of which each stage would have a part; pass "
                "use_cache=False, also to generate()"
            )
        for name in _ASKED:
            if kwargs.get(name) or (kwargs.get(name) is None and getattr(self._config, name, False)):
                raise UnsupportedError(
                    f"{name}=True asks for values of all blocks of {self.kind}, which lie on different stages; turn it off"
                )
        return {**kwargs, "use_cache": False} if self._takes_cache else kwargs

    def shapes(
        self,
        name: str,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tree:
        """Stand-ins for what a module of another stage would return: it is run on the meta device, once for each shape of inputs.

        Raises:
            PrepareError: it needs values.
        """
        key = signature((args, kwargs)), (name, torch.is_grad_enabled())
        found = self._shapes.get(key)
        if found is None:
            given, named = map_tensors(_shape_of, (args, kwargs))
            try:
                with torch.no_grad(), _without_values(module):
                    found = module.forward(*given, **named)  # without its hooks, which may exchange values
            except Exception as error:
                raise PrepareError(
                    f"the module {name} of {self.kind} is on another stage, and the shape of its result could not be found "
                    f"without its values ({type(error).__name__}: {error}); have it on both with "
                    f"PipelineOptions(first=[{name!r}], last=[{name!r}])"
                ) from error
            self._shapes.put(key, found)
        return map_tensors(lambda tensor: stand_in(tensor, self._device), found)

    # ---------------------------------------------------------------- calls of its modules

    def _call_block(self, number: int, bare: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.running is not None:
            if not number and self.context is not None:
                self.context.enter(args, kwargs)
            return self.running.block(number, bare, args, kwargs)
        if self.stages.stage_of(number) not in self.local:
            self._refuse(self.stages.names[number])
        return bare(*args, **kwargs)

    def _call_side(
        self,
        name: str,
        module: torch.nn.Module,
        on: frozenset[int],
        bare: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        is_here = bool(on & self.local)
        if self.running is None or self.running.stage in on:
            if not is_here:
                self._refuse(name)
            return bare(*args, **kwargs)
        self.running.absent(name)
        if not is_here:
            return self.shapes(name, module, args, kwargs)
        with torch.no_grad():  # this process has it for another of its stages
            found = bare(*args, **kwargs)
        return map_tensors(lambda tensor: stand_in(tensor, tensor.device), found)

    def _call_model(self, bare: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.running is not None:
            self.running.model_call()
            return bare(*args, **self.inputs(args, kwargs))
        if self.whole is None:
            raise UnsupportedError(
                f"{self.kind} was released, and this process has only some of its stages; prepare it again"
            )
        return self.whole(bare, args, self.inputs(args, kwargs))

    def _refuse(self, name: str) -> None:
        raise UnsupportedError(
            f"{name} of {self.kind} was called outside of the model's forward, but it is on another stage of the pipeline"
        )


@contextmanager
def _without_values(module: torch.nn.Module) -> Iterator[None]:
    """All tensors of a module on the meta device: of a tied embedding the weight is here, and what it is scaled by is not."""
    tables: list[dict[str, Any]] = [t for each in module.modules() for t in (each._parameters, each._buffers)]
    before = [dict(table) for table in tables]
    try:
        for table in tables:
            table.update({name: _shape_of(tensor) for name, tensor in table.items() if tensor is not None})
        yield
    finally:
        for table, held in zip(tables, before):
            table.update(held)


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """Of a part, that of the whole."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def is_routed(model: torch.nn.Module) -> bool:
    """Has it been cut before?"""
    return _KEY in model.__dict__


class RoutedModule:
    """Mixed in before a module's class: its call goes through the route."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own call, or what stands for it."""
        return self.__dict__[_KEY](super().__call__, args, kwargs)  # type: ignore[misc]


def _exchange(module: torch.nn.Module, call: Call) -> None:
    if _KEY not in module.__dict__:
        extend(module, RoutedModule)
    module.__dict__[_KEY] = call


def _takes(model: torch.nn.Module, name: str) -> bool:
    try:
        return name in inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return False
