"""Context parallelism: each rank computes a part of every sequence, from a model's first block to its loss.

The model is called with whole sequences, alike on all ranks of the axis. Embeddings and positions are computed whole; the first
block's input is cut (`zigzag`), and so is what the model gives to its blocks beside it: rotary embeddings, position ids, rows of
masks. Within blocks attention goes through `WholeSequenceAttention`; everything else is done token by token. Where the model is
given labels, they are cut too, its loss is the sum of the ranks' shares, and logits stay where they are; without labels its
outputs are joined. Models that compute otherwise after their blocks (a pooled token, a reshape to the whole length) get the last
block's output joined. In each way a rank has the gradient of its part of the loss: a term of a sum over the ranks.
In a pipeline the first stage cuts, and parts travel between stages; each stage cuts what its blocks get beside them.

The first call is a dry run on a few tokens (`sequences.py`), whole and cut: that finds which way is right, and makes a model
that mixes tokens past that function an error and not another result.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any

import torch

from headway.config.parallelism import TorchContextParallelConfig
from headway.errors import DataError, PrepareError, UnsupportedError
from headway.log import get_logger
from headway.memory.oom import is_out_of_memory
from headway.runtime.collectives import tree
from headway.runtime.collectives.checked import Collectives
from headway.strategies.context import attention, sequences
from headway.strategies.context.attention import RING_STEP, WholeSequenceAttention, put_in, take_out
from headway.strategies.context.sequences import LabelledCall, SplitLabels
from headway.strategies.fully_sharded import fsdp_state as gathered
from headway.strategies.parts import find_blocks
from headway.strategies.tensor import crossings
from headway.strategies.tensor.crossings import SplitAxis, SplitRNG

log = get_logger(__name__)


class CallPhase(Enum):
    """What a block's call is part of."""

    NONE = "no call of the prepared model"
    WHOLE = "a call with whole sequences"
    CUT = "a call whose sequences are cut"
    BACKWARD = "backward, in which blocks may be computed again"


class SplitRegion(Enum):
    """How far a model computes on parts."""

    MEANS = "to its outputs, or to a loss that is a mean over labels"
    SUMS = "to its outputs, or to a loss that is a sum over labels"
    BLOCKS = "to the end of its last block"


class Rehearsed(BaseException):
    """The model was called, and how it is cut is known; what called it is left. No error."""


class ContextParallel:
    """A model whose sequences are cut; called in its place.

    Args:
        model: a decoder or encoder with one stack of blocks.
        mesh: a DeviceMesh of one dimension: the ranks.
        everyone: all ranks of the run.
        options: how.
        is_exact: the model computes in float32 throughout.

    Attributes:
        serves_evaluation: forwards without gradients go through it, too.
        is_in_stage: does a stage of a pipeline call the model, which other stages do at other times?

    Raises:
        PrepareError: a model that cannot be cut.
    """

    serves_evaluation = True

    def __init__(
        self,
        model: torch.nn.Module,
        mesh: Any,
        everyone: Collectives,
        options: TorchContextParallelConfig,
        is_exact: bool = True,
    ) -> None:
        self._model, self._everyone, self._options, self._is_exact = model, everyone, options, is_exact
        self._axis = SplitAxis.of(mesh)
        blocks = _stack(model, options)
        self._eager = attention.use_sdpa(model)
        self._parameters = _positional(model)
        self._labels = SplitLabels(model, self._parameters, options, self._axis, everyone)
        self._ring = attention.find(
            mesh, options.cp_comm_strategy or "allgather", everyone.runtime.scope.own(attention.RingDispatcher)
        )
        ring = None if self._ring is None else self._ring.attend
        self._attention = WholeSequenceAttention(self._axis, ring, options.cp_style)
        self._rng_states = SplitRNG(self._axis)
        self._phase, self._length = CallPhase.NONE, 0
        self._recomputes = self._is_rehearsal = False
        self.is_in_stage: Callable[[], bool] = bool
        self._ways: dict[tuple[bool, bool], SplitRegion] = {}
        self._with_loss: set[tuple[bool, bool]] = set()
        self._way = SplitRegion.MEANS
        self._blocks, self._hooks = blocks, list[Any]()
        try:
            for block in blocks:
                put_in(block, self._attention)
                self._hooks.append(block.register_forward_pre_hook(self._before_block, with_kwargs=True))
                self._hooks.append(block.register_forward_hook(self._after_any_block, always_call=True))
        except PrepareError:
            self.release()
            raise
        self._hooks.append(blocks[-1].register_forward_hook(self._after_last_block))

    def release(self) -> None:
        """Leave the model alone."""
        for hook in self._hooks:
            hook.remove()
        for block in self._blocks:
            take_out(block)
        if self._ring is not None:
            self._ring.release()
        if self._eager is not None:
            self._eager()

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """A backward: blocks that are computed again see their part, as in forward."""
        with self._in(CallPhase.BACKWARD):
            self._recomputes = True
            self._attention.open(True)
            try:
                yield
            finally:
                self._recomputes = False
                self._attention.open(False)

    @contextmanager
    def _in(self, phase: CallPhase) -> Iterator[None]:
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    # ---------------------------------------------------------------- stages of a pipeline

    @property
    def mode(self) -> tuple[CallPhase, SplitRegion]:
        """What decides about the shapes between blocks beside the inputs' own."""
        return self._phase, self._way

    def enter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The first block is called, here or on another stage: sequences are as long as in its input."""
        if self._phase is CallPhase.CUT:
            self._note_length(self._input(args, kwargs))

    def rehearse(self, call: Callable[[], object]) -> None:
        """Find how the call of the model that `call` makes is cut; it goes no further. On all ranks.

        Raises:
            PrepareError: it cannot be.
        """
        self._is_rehearsal = True
        try:
            with suppress(Rehearsed):
                call()
        finally:
            self._is_rehearsal = False

    # ---------------------------------------------------------------- calls of the model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on whole sequences: the loss of all, and outputs that are whole or withheld.

        Raises:
            PrepareError: the model does not compute the same when it is cut.
            UnsupportedError: a call that cannot be cut.
        """
        if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
            if torch.is_grad_enabled():
                raise UnsupportedError(
                    "context parallelism cuts sequences, and a cache of keys would hold this rank's part alone; leave out "
                    "use_cache and past_key_values while training (generation under torch.no_grad() computes whole sequences)"
                )
            return self._run(CallPhase.WHOLE, args, kwargs)
        if "use_cache" in self._parameters:
            kwargs = {**kwargs, "use_cache": False}
        kind = self._kind(args, kwargs)
        if kind not in self._ways:
            if self.is_in_stage():
                raise UnsupportedError(
                    f"{type(self._model).__name__} now receives labels or num_items_in_batch, but did not when the same function was "
                    "called for this micro-batch before; with context and pipeline parallelism, it must do the same each time"
                )
            self._ways[kind] = self._dry_run(args, kwargs)
        if self._is_rehearsal:
            raise Rehearsed
        way = self._ways[kind]
        call = self._read(args, kwargs, way)
        out = self._run(CallPhase.CUT, call.args, call.kwargs, way)
        if kind not in self._with_loss and _has_loss(call, out):
            raise PrepareError(
                f"{type(self._model).__name__} computes a loss from labels while training, but not in eval() mode, in which context "
                "parallelism compares it with its whole; compute it in both, or outside of the model"
            )
        return self._finish(call, out, way, is_training=torch.is_grad_enabled())

    def _run(
        self, phase: CallPhase, args: tuple[Any, ...], kwargs: dict[str, Any], way: SplitRegion = SplitRegion.MEANS
    ) -> Any:
        self._length, self._way = 0, way
        with self._in(phase):
            out = self._model(*args, **kwargs)
        if phase is CallPhase.CUT and not self._length:
            raise PrepareError(
                f"{type(self._model).__name__} did not call its first block, where sequences are cut; use fsdp or tp"
            )
        return out

    def _kind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, bool]:
        """What is tried once for each of: are there labels, and does the loss divide by a number that is given?"""
        return bool(self._labels.within(args, kwargs)), kwargs.get("num_items_in_batch") is not None

    def _read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], way: SplitRegion) -> LabelledCall:
        """Cut the labels among what the model is given."""
        if way is SplitRegion.BLOCKS:
            return LabelledCall(args, dict(kwargs))
        return self._labels.cut(args, kwargs, self.is_in_stage())

    def _finish(self, call: LabelledCall, out: Any, way: SplitRegion, is_training: bool) -> Any:
        """What the caller gets: whole."""
        has_loss = _has_loss(call, out)
        part = sequences.padded(self._length, self._axis) // self._axis.size

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if way is SplitRegion.BLOCKS:
                return sequences.one_of(leaf, self._axis)
            if _is_loss(leaf):
                return self._total(leaf, call, way) if has_loss else leaf
            if leaf.dim() < 2 or leaf.shape[1] != part:
                return leaf
            if has_loss and is_training:
                return PartialOutput(leaf.shape, self._length)
            return sequences.join(leaf, self._axis, 1, self._length)

        return tree.map_leaves(whole, out)

    def _total(self, loss: torch.Tensor, call: LabelledCall, way: SplitRegion) -> torch.Tensor:
        """The loss of all parts: a sum, or a mean over the labels that count."""
        if way is SplitRegion.SUMS or call.num_labels is None:
            return crossings.total(loss, self._axis)
        every, mine = call.num_labels
        # A mean over no label is 0 / 0, on this rank alone.
        share = torch.where(mine > 0, loss * (mine / every), torch.zeros_like(loss))
        found = crossings.total(share, self._axis)
        return torch.where(every > 0, found, torch.full_like(found, torch.nan))

    # ---------------------------------------------------------------- the first call

    def _dry_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitRegion:
        """Compute a few tokens, whole and cut, and compare: which way gives the same?

        Raises:
            PrepareError: none; on all ranks.
            UnsupportedError: compiled code, into which attention cannot be reached.
        """
        if any(getattr(module, "_compiled_call_impl", None) is not None for module in self._model.modules()):
            raise UnsupportedError(
                f"{type(self._model).__name__} is compiled, which context parallelism does not support yet; leave torch.compile "
                "(dynamo_backend) out, or use fsdp or tp"
            )
        kwargs = {**dict(zip(self._parameters, args)), **kwargs}
        args = args[len(self._parameters) :]
        given = self._labels.within(args, kwargs)
        args, kwargs = sequences.few(args, kwargs, RING_STEP * self._axis.size, self._options.labels)
        told = ""
        with sequences.at_rest(self._model):
            if given:
                with self._labels.watching():
                    self._run(CallPhase.WHOLE, args, kwargs)
                ignored = self._labels.for_dry_run(given)
                kwargs = sequences.ignore_some(kwargs, list(given), ignored)
            whole = self._run(CallPhase.WHOLE, args, kwargs)
            for ways in ((SplitRegion.MEANS, SplitRegion.SUMS), (SplitRegion.BLOCKS,)):
                found = self._try(ways, args, kwargs, whole)
                rows = self._everyone.gather_numbers(
                    [float(isinstance(found, SplitRegion)), float(found is SplitRegion.SUMS)]
                )
                if all(row == rows[0] for row in rows) and isinstance(found, SplitRegion):
                    if found is SplitRegion.BLOCKS:
                        log.info_once(
                            "context parallelism: what follows the blocks of %s needs whole sequences, so their output is joined, "
                            "and each rank computes the head and the loss for all tokens",
                            type(self._model).__name__,
                        )
                    return found
                told = str(found)
        raise PrepareError(
            f"{type(self._model).__name__} cannot be cut along its sequences (context parallelism): {told}. {sequences.ADVICE}"
        )

    def _try(
        self, ways: tuple[SplitRegion, ...], args: tuple[Any, ...], kwargs: dict[str, Any], whole: Any
    ) -> SplitRegion | str:
        """Which of the ways gives the same as the whole; else what differs, in words."""
        self._attention.forget_calls()
        found = ""
        try:
            call = self._read(args, kwargs, ways[0])
            out = self._run(CallPhase.CUT, call.args, call.kwargs, ways[0])
            if not self._attention.num_calls:
                return "its blocks never call torch.nn.functional.scaled_dot_product_attention"
            for way in ways:
                cut = self._finish(call, out, way, is_training=False)
                is_joined = way is not SplitRegion.BLOCKS
                told = sequences.difference(whole, cut, self._is_exact, is_loss_joined=is_joined)
                if not told:
                    if _has_loss(call, out):
                        self._with_loss.add(self._kind(args, kwargs))
                    return way
                found = found or told
        except Exception as error:  # of the model's own code, at tensors that are shorter than it thought
            gathered.reshard(self._model)
            if isinstance(error, DataError) or is_out_of_memory(error):  # of this batch, whatever the model is
                raise
            log.debug("dry run of context parallelism", exc_info=True)
            found = f"{type(error).__name__}: {error}"
        return found

    # ---------------------------------------------------------------- calls of blocks

    def _before_block(self, block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._phase is CallPhase.WHOLE or (self._phase is CallPhase.NONE and not torch.is_grad_enabled()):
            return None
        if self._phase is CallPhase.NONE:
            raise UnsupportedError(
                f"a part of {type(self._model).__name__} was called by itself while training; under context parallelism call the "
                "prepared model, which cuts the sequences that its blocks get"
            )
        x = self._input(args, kwargs)
        is_first = block is self._blocks[0]
        if is_first and self._phase is CallPhase.CUT:
            self._note_length(x)
        part = sequences.part_of(x, self._axis, 1) if is_first else x
        total = part.shape[1] * self._axis.size
        if self._phase is CallPhase.CUT and sequences.padded(self._length, self._axis) != total:
            raise PrepareError(
                f"between its blocks {type(self._model).__name__} changes the length of its sequences, which are cut"
            )

        def other(leaf: Any) -> Any:
            return self._cut_beside(leaf, total) if isinstance(leaf, torch.Tensor) and leaf is not x else leaf

        args = tuple(part if value is x else tree.map_leaves(other, value) for value in args)
        kwargs = {key: part if value is x else tree.map_leaves(other, value) for key, value in kwargs.items()}
        if block.training:
            self._rng_states.part()
        if self._phase is CallPhase.CUT:
            self._attention.open(True)
        return args, kwargs

    def _input(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """The sequences among what a block is given.

        Raises:
            PrepareError: there are none.
        """
        x = args[0] if args else next((value for value in kwargs.values() if isinstance(value, torch.Tensor)), None)
        if not isinstance(x, torch.Tensor) or x.dim() < 3:
            raise PrepareError(
                f"the first argument of the blocks of {type(self._model).__name__} must be (rows, tokens, width), to be split "
                f"along the sequence, but one got {tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__}"
            )
        return x

    def _note_length(self, x: torch.Tensor) -> None:
        self._length = x.shape[1]
        self._attention.note_length(self._length)

    def _after_any_block(self, *_: Any) -> None:
        """However the block has ended."""
        self._rng_states.join()
        self._attention.open(self._recomputes)

    def _after_last_block(self, block: torch.nn.Module, args: Any, output: Any) -> Any:
        if self._phase is not CallPhase.CUT or self._way is not SplitRegion.BLOCKS:
            return None

        def joined(part: torch.Tensor) -> torch.Tensor:
            return sequences.join(part, self._axis, 1, self._length, times=self._axis.size)

        return (joined(output[0]), *output[1:]) if isinstance(output, tuple) else joined(output)

    def _cut_beside(self, tensor: torch.Tensor, total: int) -> torch.Tensor:
        """What a block gets beside its input: cut along the dimension that is as long as the sequence, if any."""

        def is_long(dim: int) -> bool:
            if tensor.dim() < -dim:
                return False
            if self._phase is CallPhase.CUT:
                return tensor.shape[dim] == self._length
            # In backward another call may have come since.
            return sequences.padded(tensor.shape[dim], self._axis) == total

        is_number = not tensor.is_floating_point() and tensor.dtype != torch.bool
        if is_number and is_long(-1):
            return sequences.part_of(tensor, self._axis, -1)
        if is_long(-2):  # rows of a mask, or a vector for each token
            return sequences.part_of(tensor, self._axis, -2, filler=tensor.dtype == torch.bool)
        if tensor.dim() < 3 and is_long(-1):
            return sequences.part_of(tensor, self._axis, -1)
        return tensor


class PartialOutput:
    """What stands for an output of which this rank has a part, after the model has computed the loss itself."""

    def __init__(self, shape: torch.Size, length: int) -> None:
        self._shape, self._length = tuple(shape), length

    def _refuse(self, *_: Any) -> Any:
        raise UnsupportedError(
            f"this output of the model is cut along the sequence: each rank has {self._shape[1]} of {self._length} tokens. To use it "
            "while training, call the model without labels; under torch.no_grad() it comes whole with labels, too"
        )

    def __getattr__(self, name: str) -> Any:
        """Refuse.

        Raises:
            UnsupportedError: always; AttributeError for Python's own names.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    __getitem__ = __iter__ = __len__ = __add__ = __mul__ = __truediv__ = __sub__ = __float__ = _refuse


def _positional(model: torch.nn.Module) -> list[str]:
    """Names of what may be given to forward by its place."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, one in inspect.signature(model.forward).parameters.items() if one.kind in kinds]


def _is_loss(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.is_floating_point()


def _has_loss(call: LabelledCall, out: Any) -> bool:
    """Has the model computed a loss from labels that were cut?"""
    return call.num_labels is not None and any(_is_loss(each) for each in tree.tensors(out))


def _stack(model: torch.nn.Module, options: TorchContextParallelConfig) -> list[torch.nn.Module]:
    blocks = find_blocks(model, options.blocks)
    inside = [m for m in model.modules() if any(child is block for child in m.children() for block in blocks[:1])]
    if not inside or any(all(child is not block for child in inside[0].children()) for block in blocks):
        found = ", ".join(sorted({type(block).__name__ for block in blocks})) or "none"
        raise PrepareError(
            f"context parallelism needs one stack of blocks, through which the whole sequence goes; {type(model).__name__} has "
            f"these repeated blocks, which do not lie in one ModuleList: {found}. Name the stack's own: "
            "TorchContextParallelConfig(blocks=('DecoderLayer',)); models with an encoder and a decoder are not supported"
        )
    return blocks
