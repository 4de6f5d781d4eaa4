"""Run a model's own forward on every pipeline stage, and skip the blocks of other stages.

The classes of the model, its blocks and the modules outside of them are replaced by subclasses whose calls go
through a `ModuleRouter`. While a stage runs, a `StageForward` determines what each call returns. Blocks of earlier
stages return placeholders, except the last of them, which returns the tree received from the previous stage. After the
stage's own last block, an exception ends the forward and the code that called it. So everything that a model's forward
computes around its blocks (masks, positions) exists on each stage. Model code needs neither changes nor tracing.

A placeholder has the right shape but no values. Anything computed from one is a placeholder, too. If one reaches a
block or a result, an error is raised.

`CallCache` stores results by the shapes and values of a call's arguments, and evicts the least recently used result.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from headway.core.runtime.collectives.tree import Tree, describe_structure, list_leaves, list_tensors, map_tensors
from headway.core.strategies.blocks import extend_class
from headway.errors import PrepareError, UnsupportedError
from headway.layouts.context.context_parallel import ContextParallel
from headway.layouts.pipeline._torch import is_fake
from headway.layouts.pipeline.stages import StageSplit
from headway.log import get_logger

log = get_logger(__name__)

CAPACITY = 256
"""Maximum number of entries in a `CallCache`."""

Signature = tuple[str, ...]
"""Structure of a tree of containers as text, followed by a text for each leaf."""
Value = TypeVar("Value")


class CallCache(Generic[Value]):
    """Least-recently-used cache with at most 256 entries, for results that depend on the shapes of a call's arguments.

    The key of an entry is a pair: the signature of the call, and a hashable value that the caller adds.

    Args:
        what: Description of the work that each new entry costs, for the warning about too many entries.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._of: dict[tuple[Signature, Any], Value] = {}
        self._is_told = False

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: tuple[Signature, Any]) -> bool:
        return key in self._of

    def get(self, key: tuple[Signature, Any]) -> Value | None:
        """Return the value of a key, or None if it is not in the cache."""
        value = self._of.pop(key, None)
        if value is not None:
            self._of[key] = value  # most recently used
        return value

    def put(self, key: tuple[Signature, Any], value: Value) -> None:
        """Store a value, and evict the least recently used one if the cache is full. Warn about the first eviction."""
        if len(self._of) == CAPACITY:
            if not self._is_told:
                self._is_told = True
                self._warn_of_full_cache()
            del self._of[next(iter(self._of))]
        self._of[key] = value

    def _warn_of_full_cache(self) -> None:
        log.warning(
            "%d different batches have been seen, by shapes of tensors and values of numbers and text, and more are coming: %s. "
            "What changes most: %s. Give numbers that change as tensors, leave text out of the batch, and pad to fewer shapes",
            CAPACITY,
            self._what,
            _describe_changing([signature for signature, _ in self._of]),
        )


def _describe_changing(signatures: list[Signature]) -> str:
    """Return a description of the argument that varies most between calls, such as "an int (entry 2 of 3)".

    Args:
        signatures: Signatures of calls. Only those with the most common structure are compared.
    """
    ((commonest, _),) = Counter(each[0] for each in signatures).most_common(1)
    columns = list(zip(*(each[1:] for each in signatures if each[0] == commonest)))
    counts = [len(set(column)) for column in columns]
    if not counts or max(counts) == 1:
        return "how the batch is nested, or whether its gradients are wanted"
    number = counts.index(max(counts))
    return f"{columns[number][0].partition(' ')[0]} (entry {number + 1} of {len(columns)} in {commonest})"


def describe_call(tree: Tree) -> Signature:
    """Return the structure of a tree, with the shape and dtype of each tensor and the value of each other leaf."""
    return describe_structure(tree), *map(_describe_leaf, list_leaves(tree))


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"shape {leaf.dtype}{tuple(leaf.shape)}"
    name = type(leaf).__name__
    return f"{name} {leaf!r}" if isinstance(leaf, int | float | str | bool | None) else name


_KEY = "_headway_route"
_ASKED = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Arguments of transformers' models that request outputs of all blocks."""

Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Function that replaces a module's `__call__`. Its arguments are the original `__call__`, args and kwargs."""


class PlaceholderTensor(torch.Tensor):
    """Tensor with a shape but without meaningful values. Results of operations on it are placeholders, too."""


def make_placeholder(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a placeholder with the shape and dtype of `like`. It takes no memory.

    In a forecast on fake tensors, tensors have no values anyway, so a plain fake tensor is returned.

    Args:
        like: Tensor to imitate.
        device: Device of the placeholder.
    """
    found = torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)
    return found if is_fake(found) else found.as_subclass(PlaceholderTensor)


class StageDone(BaseException):
    """Raised to end a forward after the stage's last block. It is not an error, and model code must not catch it.

    Args:
        running: Stage's forward that has ended.
        output: Output of the stage's last block.
    """

    def __init__(self, running: "StageForward", output: Tree) -> None:
        super().__init__("the stage is done; this leaves the forward, and is not an error")
        self.running = running
        self.output = output


class StageForward:
    """State of one forward of a model on one stage.

    Args:
        route: Router of the model's calls.
        stage: Index of the stage.
        received: Tree from the previous stage. None on the first stage.
        goes_on: Whether the forward continues after the stage's last block, instead of ending with `StageDone`.
        is_tail: Whether all blocks have run, so that only the computation after them is needed. Default: False.
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

    def count_model_call(self) -> None:
        """Count a call of the model in this forward, and raise an error on the second one.

        Raises:
            UnsupportedError: If it is the second call.
        """
        self._num_calls += 1
        if self._num_calls > 1:
            raise UnsupportedError(
                f"{self._route.kind} was called twice for one batch, but under pipeline parallelism a loss may call the model only "
                "once. Join the inputs (torch.cat), or use another strategy"
            )

    def call_block(self, index: int, bare: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block of this stage, or return a replacement for the output of another stage's block.

        For the last block of the previous stage, the replacement is the tree received from that stage. For other
        blocks it consists of placeholders.

        Args:
            index: Index of the block.
            bare: Original `__call__` of the block.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Raises:
            StageDone: After the stage's last block, unless the forward continues.
            UnsupportedError: If blocks are called out of order, gradients are turned off around a trainable block, or
                an argument was computed by other stages.
        """
        names = self._route.stages.names
        if index != self._next:
            expected = names[self._next] if self._next < len(names) else "no block"
            raise UnsupportedError(
                f"{self._route.kind} called block {names[index]}, but {expected} is next in the module tree. A pipeline needs "
                "blocks that each run once, in order. Name them with PipelineOptions(blocks=[...]), or use another strategy"
            )
        self._next += 1
        if index < self._begin:
            if index == self._begin - 1:
                self._check_gradients(index, self._received)
                return self._received
            return map_tensors(lambda tensor: make_placeholder(tensor, tensor.device), self._received)
        self._check_no_placeholder(f"block {names[index]}", (args, kwargs))
        self._check_gradients(index, (args, kwargs, list(self._route.stages.blocks[index].parameters())))
        output = bare(*args, **kwargs)
        if index == self._end - 1 and not self._goes_on:
            raise StageDone(self, output)
        return output

    def record_absent(self, name: str) -> None:
        """Record the name of a skipped module that belongs to another stage, for error messages."""
        self._absent.append(name)

    def check_result(self, result: Tree) -> None:
        """Raise an error if the return value of a forward cannot be computed on this stage.

        Args:
            result: Return value of the forward.

        Raises:
            UnsupportedError: If not all blocks were called, or the result depends on values of other stages.
        """
        if self._next < len(self._route.stages.blocks):
            name = self._route.stages.names[self._next]
            raise UnsupportedError(
                f"the loss was computed without block {name} of {self._route.kind}; it must call the model once, with all blocks"
            )
        self._check_no_placeholder("the result", result)

    def _check_gradients(self, index: int, used: Tree) -> None:
        """Raise an error if gradients are turned off around a trainable block.

        Reentrant activation checkpointing turns them off. `StageDone` would leave the checkpointed function before
        checkpointing has built its autograd graph.

        Raises:
            UnsupportedError: If gradients are turned off, but were enabled when the forward began.
        """
        if (
            not self._learns
            or torch.is_grad_enabled()
            or not any(tensor.requires_grad for tensor in list_tensors(used))
        ):
            return
        raise UnsupportedError(
            f"{self._route.kind} called block {self._route.stages.names[index]} with gradients turned off, but the block has "
            "trainable parameters. A pipeline supports neither reentrant checkpointing nor torch.no_grad() around trainable "
            "blocks. Use checkpoint(..., use_reentrant=False) or ActivationCheckpointing. Freeze blocks that should not train "
            "with requires_grad_(False)"
        )

    def _check_no_placeholder(self, where: str, tree: Tree) -> None:
        if any(isinstance(tensor, PlaceholderTensor) for tensor in list_tensors(tree)):
            passed = f" ({', '.join(dict.fromkeys(self._absent))})" if self._absent else ""
            raise UnsupportedError(
                f"{where} of {self._route.kind} on stage {self.stage} needs values that only other stages have{passed}. A pipeline "
                "passes on only what a block returns. Place such a module with PipelineOptions(first=[...], last=[...]), or use "
                "another strategy"
            )


class ModuleRouter:
    """Router that decides for each call of a model or its modules whether to run it or to return placeholders.

    Args:
        model: User's model.
        stages: Stages of the model.
        local: Stages of this process.
        device: Device on which the model computes.

    Attributes:
        running: Forward of the stage that is running, or None.
        whole: Function that runs all stages, for calls of the model outside of a stage.
        leave: Function that completes the model's forward after a stage has ended it early. It takes the output of the
            stage's last block, and returns the stage's output. None: nothing remains to be done.
        context: Context parallelism of the model. None: sequences are not sharded.
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
        self._has_cache_argument = _has_parameter(model, "use_cache")
        self._config = getattr(model, "config", None)
        for number, block in enumerate(stages.blocks):
            _install_call(block, partial(self._call_block, number))
        for name, on in stages.sides.items():
            side = model.get_submodule(name)
            _install_call(side, partial(self._call_side, name, side, on))
        _install_call(model, self._call_model)

    def run(
        self, stage: int, received: Tree, forward: Callable[[], Any], goes_on: bool = False, is_tail: bool = False
    ) -> Any:
        """Run a forward of the model as one stage.

        Args:
            stage: Index of the stage.
            received: Tree from the previous stage. None on the first stage.
            forward: Function that calls the model.
            goes_on: Whether the forward continues after the stage's last block. Default: False.
            is_tail: Whether to skip all blocks and run only the computation after them. Default: False.

        Returns:
            Output of the stage's last block, completed by `leave`, if the forward ended there. Otherwise the return
                value of `forward`.
        """
        before, self.running = self.running, StageForward(self, stage, received, goes_on, is_tail)
        mine = self.running
        try:
            result = forward()
            mine.check_result(result)
            return result
        except StageDone as arrived:
            if arrived.running is not mine:
                raise
            return arrived.output if self.leave is None else self.leave(arrived.output)
        finally:
            self.running = before

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a call, with `use_cache=False` added if the model has this argument.

        Raises:
            UnsupportedError: If the call uses a key-value cache, or requests outputs of all blocks.
        """
        if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
            raise UnsupportedError(
                f"{self.kind} was called with a cache (use_cache, past_key_values), of which each stage would have a part; pass "
                "use_cache=False, also to generate()"
            )
        for name in _ASKED:
            if kwargs.get(name) or (kwargs.get(name) is None and getattr(self._config, name, False)):
                raise UnsupportedError(
                    f"{name}=True asks for values of all blocks of {self.kind}, which are on different stages; turn it off"
                )
        return {**kwargs, "use_cache": False} if self._has_cache_argument else kwargs

    def make_outputs(
        self,
        name: str,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tree:
        """Return placeholders for the output of a module on another stage.

        The module is run on the meta device, once for each combination of tensor shapes and values of other arguments.

        Args:
            name: Name of the module.
            module: Module to run.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Raises:
            PrepareError: If the module's forward fails with meta tensors, because it needs values.
        """
        key = describe_call((args, kwargs)), (name, torch.is_grad_enabled())
        found = self._shapes.get(key)
        if found is None:
            given, named = map_tensors(_shape_of, (args, kwargs))
            try:
                with torch.no_grad(), _without_values(module):
                    found = module.forward(*given, **named)  # skips its hooks, which may run collectives
            except Exception as error:
                raise PrepareError(
                    f"the module {name} of {self.kind} is on another stage, and the shape of its result could not be found without "
                    f"its values ({type(error).__name__}: {error}). Put it on both stages with PipelineOptions(first=[{name!r}], "
                    f"last=[{name!r}])"
                ) from error
            self._shapes.put(key, found)
        return map_tensors(lambda tensor: make_placeholder(tensor, self._device), found)

    # ---------------------------------------------------------------- calls of its modules

    def _call_block(self, number: int, bare: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.running is not None:
            if not number and self.context is not None:
                self.context.record_length(args, kwargs)
            return self.running.call_block(number, bare, args, kwargs)
        if self.stages.find_stage(number) not in self.local:
            self._raise_elsewhere(self.stages.names[number])
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
                self._raise_elsewhere(name)
            return bare(*args, **kwargs)
        self.running.record_absent(name)
        if not is_here:
            return self.make_outputs(name, module, args, kwargs)
        with torch.no_grad():  # the module belongs to another stage of this process
            found = bare(*args, **kwargs)
        return map_tensors(lambda tensor: make_placeholder(tensor, tensor.device), found)

    def _call_model(self, bare: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.running is not None:
            self.running.count_model_call()
            return bare(*args, **self.check_arguments(args, kwargs))
        if self.whole is None:
            raise UnsupportedError(
                f"{self.kind} was released, and this process has only some of its stages; prepare it again"
            )
        return self.whole(bare, args, self.check_arguments(args, kwargs))

    def _raise_elsewhere(self, name: str) -> None:
        raise UnsupportedError(
            f"{name} of {self.kind} was called outside of the model's forward, but it is on another stage of the pipeline"
        )


@contextmanager
def _without_values(module: torch.nn.Module) -> Iterator[None]:
    """Return a context in which all parameters and buffers of a module are replaced by meta tensors.

    All of them are replaced, because a module of another stage can have only some of its tensors on this rank. An
    example is a tied embedding whose weight is on this rank but whose scale is not.
    """
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
    """Return a meta tensor with the shape and dtype of a tensor. For a DTensor, it has the full shape."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def is_routed(model: torch.nn.Module) -> bool:
    """Whether the model is already split into stages."""
    return _KEY in model.__dict__


class RoutedModule:
    """Mixin for a module's class that passes each call to a `ModuleRouter`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pass the arguments, and the module's original `__call__`, to the router."""
        return self.__dict__[_KEY](super().__call__, args, kwargs)  # type: ignore[misc]


def _install_call(module: torch.nn.Module, call: Call) -> None:
    if _KEY not in module.__dict__:
        extend_class(module, RoutedModule)
    module.__dict__[_KEY] = call


def _has_parameter(model: torch.nn.Module, name: str) -> bool:
    try:
        return name in inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return False
