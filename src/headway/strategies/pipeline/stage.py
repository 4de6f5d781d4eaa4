"""One stage of a pipeline as torch's schedules drive it.

torch's own `PipelineStage` has one shape for all micro-batches, and finds it by running the stage on the meta device. Here
micro-batches may differ in shape: what travels is known from a micro-batch that has gone ahead (`runner.py`), and each has buffers of
its own. The order of all computing and sending is torch's; so is backward, split in two for zero bubble.

What stages of a pipeline send each other, one rank to one other: while a rank waits for it, its pulse says so.

These are no collectives: ranks make different numbers of them, so they are not numbered with the ledger's. Where an engine takes
several transfers in one launch (NCCL), the host does not wait, and nothing is noted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.stage import _PipelineStageBase

from headway.runtime import pulse
from headway.runtime.collectives.tree import Tree, map_leaves, tensors


class StageTransfer(dist.P2POp):
    """torch's operation between two ranks, with a name.

    Args:
        op: `dist.isend` or `dist.irecv`.
        tensor: what travels, or where it arrives.
        peer: the other rank, of all.
        group: of the pipeline.
        name: for a report of a hang, as "receive from stage 2".
    """

    def __init__(self, op: Any, tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None, name: str) -> None:
        super().__init__(op, tensor, peer, group)
        self.op: Any = _NamedTransfer(op, name)

    def __new__(cls, op: Any, tensor: torch.Tensor, peer: int, group: Any, name: str) -> "StageTransfer":
        """torch checks its arguments where the object is made."""
        made: StageTransfer = super().__new__(cls, op, tensor, peer, group)
        return made


class _NamedTransfer:
    """In the place of torch's function, which schedules compare it with."""

    def __init__(self, op: Any, name: str) -> None:
        self._op, self._name = op, name
        self.__name__ = op.__name__

    def __call__(
        self, tensor: torch.Tensor, *, group: Any, tag: int, group_dst: int | None = None, group_src: int | None = None
    ) -> Any:
        peer = group_src if group_dst is None else group_dst
        key = "group_dst" if self._op is dist.isend else "group_src"
        work = self._op(tensor, group=group, tag=tag, **{key: peer})
        return None if work is None else _Awaited(work, self._name)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._op or (isinstance(other, _NamedTransfer) and other._op is self._op)

    def __hash__(self) -> int:
        return hash(self._op)


class _Awaited:
    """A transfer on its way."""

    def __init__(self, work: dist.Work, name: str) -> None:
        self._work, self._name = work, name

    def wait(self) -> Any:
        """Until it is done; meanwhile the pulse says what this rank waits for."""
        own = pulse.own()
        own.set_transfer(self._name)
        try:
            return self._work.wait()
        finally:
            own.set_transfer("")


@dataclass(frozen=True)
class TensorSlot:
    """Where a tensor stands in a tree that travels without its tensors."""

    number: int


@dataclass(frozen=True)
class StageActivation:
    """What travels from a stage to the next one.

    Attributes:
        tree: with slots for tensors.
        metas: (shape, dtype, does it need a gradient?) of each.
    """

    tree: Tree
    metas: tuple[tuple[torch.Size, torch.dtype, bool], ...]

    def open(self, values: Sequence[torch.Tensor]) -> Tree:
        """The tree with its tensors."""
        return map_leaves(
            lambda leaf: values[leaf.number] if isinstance(leaf, TensorSlot) else leaf,
            self.tree,
            lambda leaf: isinstance(leaf, TensorSlot),
        )

    def buffers(self, device: torch.device) -> list[torch.Tensor]:
        """Memory for its tensors."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in self.metas]


def wrap(tree: Tree) -> tuple[StageActivation, list[torch.Tensor]]:
    """A tree as an activation, and its tensors."""
    found = list(tensors(tree))
    numbers = iter(range(len(found)))
    empty = map_leaves(lambda leaf: TensorSlot(next(numbers)) if isinstance(leaf, torch.Tensor) else leaf, tree)
    return StageActivation(empty, tuple((t.shape, t.dtype, t.requires_grad) for t in found)), found


class PipelineStage(_PipelineStageBase):
    """A stage of one batch.

    Args:
        stage: its number.
        num_stages: of the pipeline.
        device: where it computes.
        group: the ranks along the pipeline.
        owners: the rank of each stage.
        learning: gives the parameters that learn in this stage, as autograd sees them.
        compute: from (micro-batch, what the stage before has sent) to what its last block returns, or to a loss.
    """

    def __init__(
        self,
        stage: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        owners: Sequence[int],
        learning: Callable[[], Sequence[Any]],
        compute: Callable[[int, Tree], Tree],
    ) -> None:
        super().__init__(torch.nn.Identity(), stage, num_stages, device, group)  # schedules free what FSDP has gathered
        self.stage_index_to_group_rank = dict(enumerate(owners))
        self._parameters = learning
        self._compute = compute
        self.arriving: dict[int, StageActivation] = {}
        self.ahead: set[int] = set()
        self.weightless: set[int] = set()
        self.inputs: dict[int, list[torch.Tensor]] = {}
        self.outputs: dict[int, list[torch.Tensor]] = {}
        self.activations: dict[int, StageActivation] = {}
        self.gradients: dict[int, list[torch.Tensor]] = {}
        self._back: dict[int, list[torch.Tensor]] = {}
        self._halves: dict[int, Any] = {}
        # What torch's checks look for: nothing that skips a stage.
        self.args_recv_info, self.act_send_info = {0: ()}, {}

    # ---------------------------------------------------------------- what torch prepares, and does not need here

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        self.chunks = num_microbatches
        return ()

    _prepare_backward_infra = _prepare_forward_infra

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def clear_runtime_states(self) -> None:
        """Nothing: a chunk lives for one batch."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: losses come scaled, and the window reduces."""

    # ---------------------------------------------------------------- sending and receiving

    def _ops(self, kind: Any, found: Sequence[torch.Tensor], stage: int) -> list[dist.P2POp]:
        rank = self.stage_index_to_group_rank[stage]
        peer = rank if self.group is None else dist.get_global_rank(self.group, rank)
        name = f"{'send to' if kind is dist.isend else 'receive from'} stage {stage}"
        return [StageTransfer(kind, tensor, peer, self.group, name) for tensor in found]

    def receive_ops(self, number: int) -> list[dist.P2POp]:
        """Receive a micro-batch's input into memory that is made here."""
        self.inputs[number] = self.arriving[number].buffers(self.device)
        return self._ops(dist.irecv, self.inputs[number], self.stage_index - 1)

    def send_ops(self, number: int) -> list[dist.P2POp]:
        """Send its output on."""
        found = [tensor.detach().contiguous() for tensor in self.outputs[number]]
        return self._ops(dist.isend, found, self.stage_index + 1)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Of what has not gone ahead."""
        return [] if self.is_first or fwd_chunk_id in self.ahead else self.receive_ops(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Of what has not gone ahead."""
        return [] if self.is_last or fwd_chunk_id in self.ahead else self.send_ops(fwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """The stage before is on this rank, too."""
        if mb_index not in self.ahead:
            self.inputs[mb_index] = [tensor.detach() for tensor in prev_stage_outputs]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradients of its outputs."""
        if not self.has_backward or self.is_last:
            return []
        found = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in self._learning(bwd_chunk_id)]
        self.gradients[bwd_chunk_id] = found
        return self._ops(dist.irecv, found, self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradients of its inputs back."""
        if not self.has_backward or self.is_first:
            return []
        return self._ops(dist.isend, self._back.pop(bwd_chunk_id), self.stage_index - 1)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """The gradients of its inputs, for the stage before on this rank."""
        return tuple(self._back.pop(mb_index, ()))

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """The gradients of its outputs, from the next stage on this rank."""
        self.gradients[mb_index] = list(next_stage_bwd_outputs)

    def _learning(self, number: int) -> list[torch.Tensor]:
        return [tensor for tensor in self.outputs[number] if tensor.requires_grad]

    # ---------------------------------------------------------------- computing

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """A micro-batch's forward; on the last stage its loss."""
        if fwd_chunk_id not in self.ahead:
            self.compute(fwd_chunk_id)
        found = self.outputs[fwd_chunk_id]
        return found[0] if self.is_last else tuple(found)

    def compute(self, number: int) -> None:
        """Run the stage, on what has been received."""
        received: Tree = None
        if not self.is_first:
            known = self.arriving[number]
            for tensor, (_, _, is_learning) in zip(self.inputs[number], known.metas):
                tensor.requires_grad_(is_learning and torch.is_grad_enabled())
            received = known.open(self.inputs[number])
        else:
            self.inputs[number] = []
        self.activations[number], found = wrap(self._compute(number, received))
        # Zero bubble detaches outputs where they are, which views do not allow; and a block may hand on what it got.
        own = {id(tensor) for tensor in self.inputs[number]}
        self.outputs[number] = [t.clone() if t._is_view() or id(t) in own else t for t in found]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """A micro-batch's backward, or the half of it that the stage before waits for."""
        if not self.has_backward:
            return
        outputs, inputs = self._learning(bwd_chunk_id), self.inputs.pop(bwd_chunk_id)
        grads = self.gradients.pop(bwd_chunk_id, None)
        del self.outputs[bwd_chunk_id]
        found: Sequence[torch.Tensor | None] = [None] * len(inputs)
        is_used = bool(outputs) and bwd_chunk_id not in self.weightless
        if full_backward:
            if is_used:
                found = self._backward(outputs, grads, inputs)
        elif is_used and any(tensor.requires_grad for tensor in inputs):
            found, groups = stage_backward_input(outputs, grads, inputs, iter(self._parameters()))
            self._halves[bwd_chunk_id] = lambda: stage_backward_weight(iter(self._parameters()), groups)
        elif is_used:
            self._halves[bwd_chunk_id] = lambda: self._backward(outputs, grads, inputs)
        self._back[bwd_chunk_id] = [
            torch.zeros_like(tensor) if grad is None else grad.contiguous()
            for tensor, grad in zip(inputs, found)
            if tensor.requires_grad
        ]

    @staticmethod
    def _backward(
        outputs: list[torch.Tensor], grads: list[torch.Tensor] | None, inputs: list[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        if grads is None:  # a loss
            return stage_backward(outputs[0], None, inputs)
        return stage_backward(tuple(outputs), tuple(grads), inputs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The other half."""
        half = self._halves.pop(bwd_chunk_id, None)
        if half is not None:
            half()
