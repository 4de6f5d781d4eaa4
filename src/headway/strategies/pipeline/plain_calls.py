"""A prepared model called as any other: `outputs = model(inputs)` on every rank of the pipeline, and a loss computed from them.

The blocks run in micro-batches (GPipe); what comes after them runs once, on the whole batch, on the last stage. All ranks get its
outputs, so that the script's loss is the same everywhere. The outputs are leaves of the script's graph: when its backward has run,
their gradients are what the last stage goes on with, and sends back.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from headway.errors import StateError, UnsupportedError
from headway.runtime.collectives.tree import Tree, concatenate, find_batch_size, map_tensors, tensors
from headway.strategies.pipeline.runner import PipelineBatch, PipelineRunner, again, go_on, own_generators, start, wait


class ReturnedOutputs:
    """Outputs that a script has, seen from backward.

    Attributes:
        grads: what its backward has found for each; None: it has not reached them.
    """

    grads: tuple[torch.Tensor | None, ...] | None = None


class _HandOver(torch.autograd.Function):
    """Hands outputs to the script: its graph begins here, and its backward ends here."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, returned: ReturnedOutputs, *values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.returned = returned
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.returned.grads = grads
        return (None, None, *[None] * len(grads))


@dataclass
class PendingForward:
    """A forward whose backward may come.

    Attributes:
        returned: what the script's backward leaves there; gone when the script has let go of the outputs.
        batch: the graphs of its micro-batches; None: backward has run.
        whole: on the last stage, the outputs that learn, with their graph.
        joined: there, what the blocks returned, as leaves of that graph.
    """

    returned: "weakref.ref[ReturnedOutputs]"
    batch: PipelineBatch | None
    whole: list[torch.Tensor]
    joined: list[torch.Tensor]


class PlainCalls:
    """Of one model.

    Args:
        pipe: its pipeline.
    """

    def __init__(self, pipe: PipelineRunner) -> None:
        self._pipe = pipe
        self._pending: list[PendingForward] = []

    # ---------------------------------------------------------------- forward

    def __call__(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_shared: bool = True
    ) -> Any:
        """The outputs, on all ranks.

        Args:
            call: the model's own.
            args: of the whole batch.
            kwargs: as well.
            is_shared: False: only the last stage's rank gets them, the others None.

        Raises:
            UnsupportedError: with gradients, another schedule than GPipe.
        """
        pipe = self._pipe
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in pipe.model.parameters())
        if learns and pipe.options.schedule != "gpipe":
            raise UnsupportedError(
                f"PipelineOptions(schedule={pipe.options.schedule!r}) runs forward and backward in turn, so {pipe.route.kind} cannot "
                "be called with gradients; use accelerator.forward_backward(batch, fn), or schedule='gpipe'"
            )
        activation, found, joined, batch = self._forward(call, args, kwargs)
        if not is_shared:
            return activation.open(found) if pipe.is_last else None
        return self._outputs(activation, found, joined, batch, learns)

    def _forward(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[torch.Tensor], list[torch.Tensor], PipelineBatch]:
        pipe, last = self._pipe, self._pipe.num_stages - 1
        pieces = pipe.cut_call(args, kwargs)

        def compute(stage: int, number: int, received: Tree) -> Tree:
            given, named = pieces[number]
            told.begin(stage, number)
            return pipe.route.run(stage, received, lambda: call(*given, **named))

        failure: Exception | None = None
        result: Any = None
        joined: list[torch.Tensor] = []
        with own_generators(pipe.group.runtime.hardware) as told:
            batch = pipe.begin(pieces, compute, "plain")
            self._run(batch)
            if pipe.is_last:
                try:
                    received, joined = self._join(batch, pieces)
                    told.begin(last, batch.num)
                    result = pipe.route.run(last, received, lambda: call(*args, **kwargs), goes_on=True, is_tail=True)
                except Exception as error:
                    failure = error
        answers = pipe.group.gather_objects((told.flags, *pipe.told(result, failure)))
        go_on([max(flags) for flags in zip(*(answer[0] for answer in answers))], pipe.device)
        _, activation, problem = answers[pipe.last_rank]
        if failure is not None:  # as it was raised here
            raise failure
        if problem is not None:
            raise again(problem, last, pipe.last_rank)
        return activation, list(tensors(result)), joined, batch

    def _run(self, batch: PipelineBatch) -> None:
        """The forwards that remain."""
        if len(batch.chunks) > 1:
            self._pipe.drive(batch, has_backward=False)
            return
        (chunk,) = batch.chunks.values()
        sent: list[dist.Work] = []
        for number in range(batch.num):
            if number not in batch.ahead:
                wait(start(chunk.get_fwd_recv_ops(number)))
                chunk.compute(number)
                sent += start(chunk.get_fwd_send_ops(number))
        wait(sent)

    def _join(self, batch: PipelineBatch, pieces: Sequence[Tree]) -> tuple[Tree, list[torch.Tensor]]:
        """What the last block returned for all micro-batches, joined to what it would for the batch."""
        chunk = batch.chunks[self._pipe.num_stages - 1]
        parts = [
            chunk.activations[number].open([tensor.detach() for tensor in chunk.outputs[number]])
            for number in range(batch.num)
        ]
        for part, piece in zip(parts, pieces):
            rows = find_batch_size(piece)
            odd = next((t for t in tensors(part) if batch.num > 1 and (t.ndim == 0 or t.shape[0] != rows)), None)
            if odd is not None:
                raise UnsupportedError(
                    f"a block of {self._pipe.route.kind} returns a tensor of shape {tuple(odd.shape)} for {rows} rows, so "
                    "micro-batches cannot be joined along their rows; use accelerator.forward_backward(batch, fn), or "
                    "PipelineOptions(num_microbatches=1)"
                )
        whole = concatenate(parts) if batch.num > 1 else parts[0]
        learning = iter([t.requires_grad for t in chunk.outputs[0]])
        whole = map_tensors(lambda t: t.requires_grad_(next(learning) and torch.is_grad_enabled()), whole)
        return whole, list(tensors(whole))

    def _outputs(
        self, activation: Any, found: list[torch.Tensor], joined: list[torch.Tensor], batch: PipelineBatch, learns: bool
    ) -> Any:
        """The last stage's outputs on all ranks."""
        pipe = self._pipe
        values = [t.detach().contiguous() for t in found] if pipe.is_last else activation.buffers(pipe.device)
        pipe.group.broadcast_in_place(values, pipe.last_rank)
        learning = [number for number, meta in enumerate(activation.metas) if meta[2] and learns]
        if learning:
            self._pending = [each for each in self._pending if each.returned() is not None]
            returned, anchor = ReturnedOutputs(), torch.zeros((), device=pipe.device, requires_grad=True)
            handed = _HandOver.apply(anchor, returned, *(values[number] for number in learning))  # type: ignore[no-untyped-call]
            for number, value in zip(learning, handed):
                values[number] = value
            whole = [found[number] for number in learning] if pipe.is_last else []
            self._pending.append(PendingForward(weakref.ref(returned), batch, whole, joined))
        return activation.open(values)

    # ---------------------------------------------------------------- backward

    def held(self) -> list[tuple[PendingForward, ReturnedOutputs | None]]:
        """Forwards whose backward may be about to come."""
        return [(each, each.returned()) for each in self._pending]

    def backward(self, held: list[tuple[PendingForward, ReturnedOutputs | None]], is_kept: bool) -> None:
        """The script's backward has run: go on through the stages, for those forwards whose outputs it reached.

        Raises:
            StateError: it reached one for the second time.
        """
        for pending, returned in reversed(held):
            if returned is None or returned.grads is None:
                continue
            grads, returned.grads = returned.grads, None
            if pending.batch is None or is_kept:
                raise StateError(
                    f"backward came twice for one forward of {self._pipe.route.kind} (or with retain_graph=True); under pipeline "
                    "parallelism a forward has one backward: add the losses up, and call accelerator.backward once"
                )
            batch, pending.batch = pending.batch, None
            self._back(batch, pending, grads)
            pending.whole, pending.joined = [], []

    def _back(self, batch: PipelineBatch, pending: PendingForward, grads: Sequence[torch.Tensor | None]) -> None:
        (chunk,) = batch.chunks.values()
        chunk.has_backward, chunk.chunks = True, batch.num
        if self._pipe.is_last:
            self._share_out(chunk, batch, pending, grads)
        sent: list[dist.Work] = []
        for number in range(batch.num):
            wait(start(chunk.get_bwd_recv_ops(number)))
            chunk.backward_one_chunk(number)
            sent += start(chunk.get_bwd_send_ops(number))
        wait(sent)

    @staticmethod
    def _share_out(
        chunk: Any, batch: PipelineBatch, pending: PendingForward, grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Backward through what comes after the blocks, and the parts of each micro-batch in its result."""
        reached = [(out, grad) for out, grad in zip(pending.whole, grads) if grad is not None]
        torch.autograd.backward([out for out, _ in reached], [grad for _, grad in reached])
        learning = [tensor for tensor in pending.joined if tensor.requires_grad]
        first = 0
        for number in range(batch.num):
            own = [tensor for tensor in chunk.outputs[number] if tensor.requires_grad]
            rows = own[0].shape[0] if own and own[0].ndim else 0
            here = slice(first, first + rows) if batch.num > 1 else None
            chunk.gradients[number] = [
                torch.zeros_like(part) if (grad := tensor.grad) is None else grad if here is None else grad[here]
                for tensor, part in zip(learning, own)
            ]
            first += rows
