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
        work: Description of the work that each new entry costs, for the warning about too many entries.
    """

    def __init__(self, work: str) -> None:
        self._work = work
        self._entries: dict[tuple[Signature, Any], Value] = {}
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: tuple[Signature, Any]) -> bool:
        return key in self._entries

    def get(self, key: tuple[Signature, Any]) -> Value | None:
        """Return the value of a key, or None if it is not in the cache."""
        value = self._entries.pop(key, None)
        if value is not None:
            self._entries[key] = value  # at the end of the dict: most recently used
        return value

    def put(self, key: tuple[Signature, Any], value: Value) -> None:
        """Store a value, and evict the least recently used one if the cache is full. Warn about the first eviction."""
        if len(self._entries) == CAPACITY:
            if not self._has_warned:
                self._has_warned = True
                self._warn_of_full_cache()
            del self._entries[next(iter(self._entries))]
        self._entries[key] = value

    def _warn_of_full_cache(self) -> None:
        """Warn that the cache is full, and name what changes most between the calls in it."""
        log.warning(
            "%d different batches have been seen, by shapes of tensors and values of numbers and text, and more are coming: %s. "
            "What changes most: %s. Give numbers that change as tensors, leave text out of the batch, and pad to fewer shapes",
            CAPACITY,
            self._work,
            _describe_changing([signature for signature, _ in self._entries]),
        )


def _describe_changing(signatures: list[Signature]) -> str:
    """Return a description of the argument that varies most between calls, such as "an int (entry 2 of 3)".

    Args:
        signatures: Signatures of calls. Only those with the most common structure are compared.
    """
    ((structure, _),) = Counter(signature[0] for signature in signatures).most_common(1)
    # One row per leaf of the structure: the texts that describe this leaf in all calls.
    texts_by_leaf = list(zip(*(signature[1:] for signature in signatures if signature[0] == structure)))
    counts = [len(set(texts)) for texts in texts_by_leaf]
    if not counts or max(counts) == 1:
        return "how the batch is nested, or whether its gradients are wanted"
    index = counts.index(max(counts))
    kind, _, _ = texts_by_leaf[index][0].partition(" ")
    return f"{kind} (entry {index + 1} of {len(counts)} in {structure})"


def describe_call(tree: Tree) -> Signature:
    """Return the structure of a tree, with the shape and dtype of each tensor and the value of each other leaf."""
    return describe_structure(tree), *map(_describe_leaf, list_leaves(tree))


def _describe_leaf(leaf: Any) -> str:
    """Return a text for a leaf: its kind, and its shape or value. Of other objects than numbers and text, only the class."""
    if isinstance(leaf, torch.Tensor):
        return f"shape {leaf.dtype}{tuple(leaf.shape)}"
    name = type(leaf).__name__
    return f"{name} {leaf!r}" if isinstance(leaf, int | float | str | bool | None) else name


_CALL_KEY = "_headway_route"
"""Key in the `__dict__` of a routed module under which its `Call` is stored."""
_OUTPUT_ARGUMENTS = ("output_hidden_states", "output_attentions", "output_router_logits")
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
    # A single element that is expanded to all of them.
    tensor = torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)
    return tensor if is_fake(tensor) else tensor.as_subclass(PlaceholderTensor)


class StageDone(BaseException):
    """Raised to end a forward after the stage's last block. It is not an error, and model code must not catch it.

    Args:
        stage_forward: Stage's forward that has ended.
        output: Output of the stage's last block.
    """

    def __init__(self, stage_forward: "StageForward", output: Tree) -> None:
        super().__init__("the stage is done; this leaves the forward, and is not an error")
        self.stage_forward = stage_forward
        self.output = output


class StageForward:
    """State of one forward of a model on one stage.

    Args:
        router: Router of the model's calls.
        stage: Index of the stage.
        received: Tree from the previous stage. None on the first stage.
        runs_to_end: Whether the forward continues after the stage's last block, instead of ending with `StageDone`.
        is_after_blocks: Whether all blocks have run, so that only the computation after them is needed. No block runs
            in this forward. Default: False.
    """

    def __init__(
        self, router: "ModuleRouter", stage: int, received: Tree, runs_to_end: bool, is_after_blocks: bool = False
    ) -> None:
        self._router = router
        self.stage = stage
        self._received = received
        stages = router.stages
        self._first_block = len(stages.blocks) if is_after_blocks else stages.bounds[stage]
        self._end_block = len(stages.blocks) if is_after_blocks else stages.bounds[stage + 1]
        self._runs_to_end = runs_to_end
        self._next_block = 0  # index of the block that must be called next
        self._num_model_calls = 0
        self._skipped_modules: list[str] = []
        self._had_gradients_enabled = torch.is_grad_enabled()

    def count_model_call(self) -> None:
        """Count a call of the model in this forward, and raise an error on the second one.

        Raises:
            UnsupportedError: If it is the second call.
        """
        self._num_model_calls += 1
        if self._num_model_calls > 1:
            raise UnsupportedError(
                f"{self._router.kind} was called twice for one batch, but under pipeline parallelism a loss may call the model only "
                "once. Join the inputs (torch.cat), or use another strategy"
            )

    def call_block(
        self, index: int, original_call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a block of this stage, or return a replacement for the output of another stage's block.

        For the last block of the previous stage, the replacement is the tree received from that stage. For other
        blocks it consists of placeholders.

        Args:
            index: Index of the block.
            original_call: Original `__call__` of the block.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Raises:
            StageDone: After the stage's last block, unless the forward continues.
            UnsupportedError: If blocks are called out of order, gradients are turned off around a trainable block, or
                an argument was computed by other stages.
        """
        names = self._router.stages.names
        if index != self._next_block:
            expected = names[self._next_block] if self._next_block < len(names) else "no block"
            raise UnsupportedError(
                f"{self._router.kind} called block {names[index]}, but {expected} is next in the module tree. A pipeline needs "
                "blocks that each run once, in order. Name them with PipelineOptions(blocks=[...]), or use another strategy"
            )
        self._next_block += 1
        if index < self._first_block:
            if index == self._first_block - 1:
                self._check_gradients(index, self._received)
                return self._received
            return map_tensors(lambda tensor: make_placeholder(tensor, tensor.device), self._received)
        self._check_no_placeholder(f"block {names[index]}", (args, kwargs))
        self._check_gradients(index, (args, kwargs, list(self._router.stages.blocks[index].parameters())))
        output = original_call(*args, **kwargs)
        if index == self._end_block - 1 and not self._runs_to_end:
            raise StageDone(self, output)
        return output

    def record_skipped_module(self, name: str) -> None:
        """Record the name of a skipped module that belongs to another stage, for error messages."""
        self._skipped_modules.append(name)

    def check_result(self, result: Tree) -> None:
        """Raise an error if the return value of a forward cannot be computed on this stage.

        Args:
            result: Return value of the forward.

        Raises:
            UnsupportedError: If not all blocks were called, or the result depends on values of other stages.
        """
        if self._next_block < len(self._router.stages.blocks):
            name = self._router.stages.names[self._next_block]
            raise UnsupportedError(
                f"the loss was computed without block {name} of {self._router.kind}; it must call the model once, with all blocks"
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
            not self._had_gradients_enabled
            or torch.is_grad_enabled()
            or not any(tensor.requires_grad for tensor in list_tensors(used))
        ):
            return
        raise UnsupportedError(
            f"{self._router.kind} called block {self._router.stages.names[index]} with gradients turned off, but the block has "
            "trainable parameters. A pipeline supports neither reentrant checkpointing nor torch.no_grad() around trainable "
            "blocks. Use checkpoint(..., use_reentrant=False) or ActivationCheckpointing. Freeze blocks that should not train "
            "with requires_grad_(False)"
        )

    def _check_no_placeholder(self, where: str, tree: Tree) -> None:
        """Raise `UnsupportedError` if a tree contains a placeholder. `where` describes the tree in the message."""
        if any(isinstance(tensor, PlaceholderTensor) for tensor in list_tensors(tree)):
            names = f" ({', '.join(dict.fromkeys(self._skipped_modules))})" if self._skipped_modules else ""
            raise UnsupportedError(
                f"{where} of {self._router.kind} on stage {self.stage} needs values that only other stages have{names}. A pipeline "
                "passes on only what a block returns. Place such a module with PipelineOptions(first=[...], last=[...]), or use "
                "another strategy"
            )


class ModuleRouter:
    """Router that decides for each call of a model or its modules whether to run it or to return placeholders.

    Args:
        model: User's model.
        stages: Stages of the model.
        local: Indices of the stages of this process.
        device: Device on which the model computes.

    Attributes:
        stages: Stages of the model.
        kind: Class name of the model, for messages.
        local: Indices of the stages of this process.
        current_forward: Forward of the stage that is running, or None.
        run_model: Function that runs all stages, for calls of the model outside of a stage. None: such calls raise an
            error, because the model was released.
        finish_forward: Function that completes the model's forward after a stage has ended it early. It takes the
            output of the stage's last block, and returns the stage's output. None: nothing remains to be done.
        context_parallel: Context parallelism of the model. None: sequences are not sharded.
    """

    def __init__(self, model: torch.nn.Module, stages: StageSplit, local: frozenset[int], device: torch.device) -> None:
        self.stages = stages
        self.kind = type(model).__name__
        self.local = local
        self.current_forward: StageForward | None = None
        self.run_model: Call | None = None
        self.finish_forward: Callable[[Tree], Tree] | None = None
        self.context_parallel: ContextParallel | None = None
        self._device = device
        # Outputs of modules of other stages, on the meta device.
        self._meta_outputs: CallCache[Tree] = CallCache(
            "the shapes that modules of other stages return are found anew for each"
        )
        self._has_cache_argument = _has_parameter(model, "use_cache")
        self._config = getattr(model, "config", None)
        for index, block in enumerate(stages.blocks):
            _install_call(block, partial(self._call_block, index))
        for name, stage_indices in stages.outer_modules.items():
            module = model.get_submodule(name)
            _install_call(module, partial(self._call_outer_module, name, module, stage_indices))
        _install_call(model, self._call_model)

    def run(
        self,
        stage: int,
        received: Tree,
        forward: Callable[[], Any],
        runs_to_end: bool = False,
        is_after_blocks: bool = False,
    ) -> Any:
        """Run a forward of the model as one stage. Nested calls are allowed, for example in recomputation.

        Args:
            stage: Index of the stage.
            received: Tree from the previous stage. None on the first stage.
            forward: Function that calls the model.
            runs_to_end: Whether the forward continues after the stage's last block. Default: False.
            is_after_blocks: Whether to skip all blocks and run only the computation after them. Default: False.

        Returns:
            Output of the stage's last block, completed by `finish_forward`, if the forward ended there. Otherwise the
                return value of `forward`.
        """
        outer_forward = self.current_forward
        stage_forward = StageForward(self, stage, received, runs_to_end, is_after_blocks)
        self.current_forward = stage_forward
        try:
            result = forward()
            stage_forward.check_result(result)
            return result
        except StageDone as done:
            if done.stage_forward is not stage_forward:
                raise
            return done.output if self.finish_forward is None else self.finish_forward(done.output)
        finally:
            self.current_forward = outer_forward

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
        for name in _OUTPUT_ARGUMENTS:
            if kwargs.get(name) or (kwargs.get(name) is None and getattr(self._config, name, False)):
                raise UnsupportedError(
                    f"{name}=True asks for values of all blocks of {self.kind}, which are on different stages; turn it off"
                )
        return {**kwargs, "use_cache": False} if self._has_cache_argument else kwargs

    def make_placeholder_outputs(
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
        outputs = self._meta_outputs.get(key)
        if outputs is None:
            meta_args, meta_kwargs = map_tensors(_make_meta_tensor, (args, kwargs))
            try:
                with torch.no_grad(), _replace_values(module):
                    outputs = module.forward(*meta_args, **meta_kwargs)  # skips its hooks, which may run collectives
            except Exception as error:
                raise PrepareError(
                    f"the module {name} of {self.kind} is on another stage, and the shape of its result could not be found without "
                    f"its values ({type(error).__name__}: {error}). Put it on both stages with PipelineOptions(first=[{name!r}], "
                    f"last=[{name!r}])"
                ) from error
            self._meta_outputs.put(key, outputs)
        return map_tensors(lambda tensor: make_placeholder(tensor, self._device), outputs)

    # ---------------------------------------------------------------- calls of the model and its modules

    def _call_block(
        self, index: int, original_call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run or replace a call of a block. Outside of the model's forward, a block of this process runs as usual."""
        if self.current_forward is not None:
            if index == 0 and self.context_parallel is not None:
                self.context_parallel.record_length(args, kwargs)
            return self.current_forward.call_block(index, original_call, args, kwargs)
        if self.stages.find_stage(index) not in self.local:
            self._raise_on_other_stage(self.stages.names[index])
        return original_call(*args, **kwargs)

    def _call_outer_module(
        self,
        name: str,
        module: torch.nn.Module,
        stage_indices: frozenset[int],
        original_call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call of a module outside of the blocks, or return placeholders if another stage has the module.

        Args:
            name: Name of the module.
            module: Module.
            stage_indices: Indices of the stages that have the module.
            original_call: Original `__call__` of the module.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        is_local = bool(stage_indices & self.local)
        if self.current_forward is None or self.current_forward.stage in stage_indices:
            if not is_local:
                self._raise_on_other_stage(name)
            return original_call(*args, **kwargs)
        self.current_forward.record_skipped_module(name)
        if not is_local:
            return self.make_placeholder_outputs(name, module, args, kwargs)
        with torch.no_grad():  # the module belongs to another stage of this process
            outputs = original_call(*args, **kwargs)
        return map_tensors(lambda tensor: make_placeholder(tensor, tensor.device), outputs)

    def _call_model(self, original_call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace a call of the model: run its own forward if a stage is being executed, otherwise run all stages.

        Args:
            original_call: The model's call before it was replaced.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Raises:
            UnsupportedError: If the model was released, so that the stages of other processes cannot be run.
        """
        if self.current_forward is not None:
            self.current_forward.count_model_call()
            return original_call(*args, **self.check_arguments(args, kwargs))
        if self.run_model is None:
            raise UnsupportedError(
                f"{self.kind} was released, and this process has only some of its stages; prepare it again"
            )
        return self.run_model(original_call, args, self.check_arguments(args, kwargs))

    def _raise_on_other_stage(self, name: str) -> None:
        """Raise `UnsupportedError` for a use of the named module outside of the forward, on a rank that does not hold it."""
        raise UnsupportedError(
            f"{name} of {self.kind} was called outside of the model's forward, but it is on another stage of the pipeline"
        )


@contextmanager
def _replace_values(module: torch.nn.Module) -> Iterator[None]:
    """Return a context in which all parameters and buffers of a module are replaced by meta tensors.

    All of them are replaced, because a module of another stage can have only some of its tensors on this rank. An
    example is a tied embedding whose weight is on this rank but whose scale is not.
    """
    tables: list[dict[str, Any]] = [t for each in module.modules() for t in (each._parameters, each._buffers)]
    originals = [dict(table) for table in tables]
    try:
        for table in tables:
            table.update({name: _make_meta_tensor(tensor) for name, tensor in table.items() if tensor is not None})
        yield
    finally:
        for table, original in zip(tables, originals):
            table.update(original)


def _make_meta_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with the shape and dtype of a tensor. For a DTensor, it has the full shape."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def is_routed(model: torch.nn.Module) -> bool:
    """Whether the model is already split into stages."""
    return _CALL_KEY in model.__dict__


class RoutedModule:
    """Mixin for a module's class that passes each call to a `ModuleRouter`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pass the arguments, and the module's original `__call__`, to the router."""
        return self.__dict__[_CALL_KEY](super().__call__, args, kwargs)  # type: ignore[misc]


def _install_call(module: torch.nn.Module, call: Call) -> None:
    """Make a module pass its calls to `call`, instead of an earlier one if the module is already routed."""
    if _CALL_KEY not in module.__dict__:
        extend_class(module, RoutedModule)
    module.__dict__[_CALL_KEY] = call


def _has_parameter(model: torch.nn.Module, name: str) -> bool:
    """Whether the model's forward has a parameter of this name. False if the signature cannot be read."""
    try:
        return name in inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return False
