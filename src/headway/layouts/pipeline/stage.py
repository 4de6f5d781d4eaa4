"""Pipeline stage for torch's schedules that supports micro-batches of different shapes and names its transfers.

torch's own `PipelineStage` has one shape for all micro-batches, and finds it by running the stage on the meta device.
`PipelineStage` in this module supports micro-batches of different shapes. The shapes of the tensors that stages
exchange are known from a micro-batch that was run before the schedule (`runner.py`). Each micro-batch has its own
buffers. torch determines the order of computation and transfers. Backward is torch's, too, including its split into two
halves for zero-bubble schedules.

While a rank waits for a transfer between two stages, its heartbeat file, which the hang watch reads, contains the name
of the transfer. Transfers are not collectives, because ranks make different numbers of them. So Headway's count of
collectives does not include them. If a backend such as NCCL combines several transfers in one launch, the host does not
wait, and nothing is recorded.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.stage import _PipelineStageBase

from headway.core.runtime import heartbeat_file
from headway.core.runtime.collectives.tree import Tree, list_tensors, map_leaves
from headway.errors import UnsupportedError
from headway.layouts.pipeline.stage_forward import describe_call


class StageTransfer(dist.P2POp):
    """Point-to-point operation whose transfer has a name for reports of hangs.

    Args:
        op: `dist.isend` or `dist.irecv`.
        tensor: Tensor to send, or buffer to receive into.
        peer: Global rank of the other process.
        group: Process group of the pipeline.
        name: Name of the transfer, such as "receive from stage 2".
    """

    def __init__(self, op: Any, tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None, name: str) -> None:
        super().__init__(op, tensor, peer, group)
        self.op: Any = _NamedTransfer(op, name)

    def __new__(cls, op: Any, tensor: torch.Tensor, peer: int, group: Any, name: str) -> "StageTransfer":
        """Create the operation. The base class's `__new__` does not accept a name, so the name is not passed on."""
        transfer: StageTransfer = super().__new__(cls, op, tensor, peer, group)
        return transfer


class _NamedTransfer:
    """Wrapper of torch's `isend` or `irecv` that has a name for reports of hangs.

    It compares equal to the wrapped function, because torch's schedules check whether an operation is a send or a
    receive.
    """

    def __init__(self, op: Any, name: str) -> None:
        self._op = op
        self._name = name
        self.__name__ = op.__name__

    def __call__(
        self, tensor: torch.Tensor, *, group: Any, tag: int, group_dst: int | None = None, group_src: int | None = None
    ) -> Any:
        peer = group_src if group_dst is None else group_dst
        key = "group_dst" if self._op is dist.isend else "group_src"
        work = self._op(tensor, group=group, tag=tag, **{key: peer})
        return None if work is None else _TransferHandle(work, self._name)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._op or (isinstance(other, _NamedTransfer) and other._op is self._op)

    def __hash__(self) -> int:
        return hash(self._op)


class _TransferHandle:
    """Handle of a running transfer. Reports of hangs can name the transfer while a rank waits for it.

    Args:
        work: torch's handle of the transfer.
        name: Name of the transfer.
    """

    def __init__(self, work: dist.Work, name: str) -> None:
        self._work = work
        self._name = name

    def wait(self) -> Any:
        """Wait for the transfer.

        Meanwhile, this rank's heartbeat file, which the hang watch reads, contains the name of the transfer.
        """
        own_file = heartbeat_file.get_own_file()
        own_file.set_transfer(self._name)
        try:
            return self._work.wait()
        finally:
            own_file.set_transfer("")


@dataclass(frozen=True)
class TensorSlot:
    """Placeholder for a tensor in a tree whose structure and tensors are sent separately.

    Attributes:
        index: Index of the tensor among the tensors of the tree.
    """

    index: int


@dataclass(frozen=True)
class StageActivation:
    """Description of the tree of tensors that a stage sends to the next one.

    Attributes:
        tree: Tree with a `TensorSlot` in place of each tensor.
        metas: Tuple of (shape, dtype, whether a gradient is required) for each tensor.
    """

    tree: Tree
    metas: tuple[tuple[torch.Size, torch.dtype, bool], ...]

    def fill_slots(self, values: Sequence[torch.Tensor]) -> Tree:
        """Return the tree with each `TensorSlot` replaced by its tensor.

        Args:
            values: Tensors in the order of the slots.
        """
        return map_leaves(
            lambda leaf: values[leaf.index] if isinstance(leaf, TensorSlot) else leaf,
            self.tree,
            lambda leaf: isinstance(leaf, TensorSlot),
        )

    def describe(self) -> tuple[Any, ...]:
        """Return everything that a stage must know to receive the tree: its structure, its numbers, and its tensors."""
        return (*describe_call(self.tree), *self.metas)

    def allocate_buffers(self, device: torch.device) -> list[torch.Tensor]:
        """Return uninitialized tensors into which the tensors of the tree can be received."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in self.metas]


def describe_tree(tree: Tree) -> tuple[StageActivation, list[torch.Tensor]]:
    """Return a tree's description, in which slots replace the tensors, and a list of these tensors."""
    tensors = list(list_tensors(tree))
    indices = iter(range(len(tensors)))
    structure = map_leaves(lambda leaf: TensorSlot(next(indices)) if isinstance(leaf, torch.Tensor) else leaf, tree)
    metas = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors)
    return StageActivation(structure, metas), tensors


class PipelineStage(_PipelineStageBase):
    """Pipeline stage for one batch, with the methods that torch's schedules call.

    Args:
        stage: Index of the stage.
        num_stages: Number of stages of the pipeline.
        device: Device on which the stage computes.
        group: Process group of the pipeline ranks.
        rank_of_stage: Pipeline rank of each stage, by stage index.
        list_parameters: Function that returns the stage's trainable parameters: under FSDP, the all-gathered ones that
            autograd uses.
        compute: Function of (index of the micro-batch, tree received from the previous stage). Returns the output of
            the stage's last block or, on the last stage, the loss.

    Attributes:
        expected_inputs: Description of the input of each micro-batch, by index. Empty on the first stage.
        expected_outputs: Description of the output of each micro-batch that the other ranks expect, by index.
        precomputed: Indices of the micro-batches whose forward was run before the schedule.
        weightless: Indices of the micro-batches whose loss has weight 0.
        silence_gradients: Function that returns a context in which backward produces zero gradients, for the backward
            of weightless micro-batches. Other ranks can need this backward for their tokens. None: it is skipped.
        inputs: Received tensors of each micro-batch, by index.
        outputs: Output tensors of each micro-batch, by index. On the last stage, the first one is the loss.
        activations: Description of the output of each micro-batch, by index.
        output_grads: Gradients of those outputs that require one, by the index of the micro-batch.
    """

    def __init__(
        self,
        stage: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        rank_of_stage: Sequence[int],
        list_parameters: Callable[[], Sequence[Any]],
        compute: Callable[[int, Tree], Tree],
    ) -> None:
        # The model itself is not passed, because schedules would reshard it if it is an FSDP module.
        super().__init__(torch.nn.Identity(), stage, num_stages, device, group)
        self.stage_index_to_group_rank = dict(enumerate(rank_of_stage))
        self._list_parameters = list_parameters
        self._compute = compute
        self.expected_inputs: dict[int, StageActivation] = {}
        self.expected_outputs: dict[int, StageActivation] = {}
        self.precomputed: set[int] = set()
        self.weightless: set[int] = set()
        self.silence_gradients: Callable[[], AbstractContextManager[Any]] | None = None
        self.inputs: dict[int, list[torch.Tensor]] = {}
        self.outputs: dict[int, list[torch.Tensor]] = {}
        self.activations: dict[int, StageActivation] = {}
        self.output_grads: dict[int, list[torch.Tensor]] = {}
        # By index of the micro-batch: gradients of its inputs that require one, and the second half of its backward.
        self._input_grads: dict[int, list[torch.Tensor]] = {}
        self._weight_backwards: dict[int, Callable[[], Any]] = {}
        # torch looks for transfers that skip a stage in these attributes. There are none.
        self.args_recv_info = {0: ()}
        self.act_send_info = {}

    # ---------------------------------------------------------------- preparations of torch that are not needed here

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        """Set torch's attribute `chunks`, and return no descriptions of outputs, because micro-batches have their own."""
        self.chunks = num_microbatches  # torch's attribute: number of micro-batches
        return ()

    _prepare_backward_infra = _prepare_forward_infra

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        """Return no buffers, because `get_bwd_recv_ops` allocates them for each micro-batch."""
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return no transfers. The first real transfers set up the connections."""
        return []

    def clear_runtime_states(self) -> None:
        """Do nothing, because each batch has a new stage object."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: losses are already scaled, and gradients are reduced at the end of the accumulation window."""

    # ---------------------------------------------------------------- sending and receiving

    def _make_transfers(self, operation: Any, tensors: Sequence[torch.Tensor], stage: int) -> list[dist.P2POp]:
        """Return the point-to-point operations that exchange tensors with another stage.

        Args:
            operation: `dist.isend` or `dist.irecv`.
            tensors: Tensors to send, or buffers to receive into.
            stage: Index of the other stage.
        """
        rank = self.stage_index_to_group_rank[stage]
        peer = rank if self.group is None else dist.get_global_rank(self.group, rank)
        name = f"{'send to' if operation is dist.isend else 'receive from'} stage {stage}"
        return [StageTransfer(operation, tensor, peer, self.group, name) for tensor in tensors]

    def make_receives(self, number: int) -> list[dist.P2POp]:
        """Return the operations that receive a micro-batch's input into new buffers."""
        self.inputs[number] = self.expected_inputs[number].allocate_buffers(self.device)
        return self._make_transfers(dist.irecv, self.inputs[number], self.stage_index - 1)

    def make_sends(self, number: int) -> list[dist.P2POp]:
        """Return the operations that send a micro-batch's output to the next stage."""
        tensors = [tensor.detach().contiguous() for tensor in self.outputs[number]]
        return self._make_transfers(dist.isend, tensors, self.stage_index + 1)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive a micro-batch's input.

        The list is empty on the first stage, and if the micro-batch's forward was run before the schedule.
        """
        return [] if self.is_first or fwd_chunk_id in self.precomputed else self.make_receives(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send a micro-batch's output.

        The list is empty on the last stage, and if the micro-batch's forward was run before the schedule.
        """
        return [] if self.is_last or fwd_chunk_id in self.precomputed else self.make_sends(fwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Set a micro-batch's input if the previous stage is on this rank, so that nothing has to be received.

        Do nothing if the micro-batch's forward was run before the schedule.
        """
        if mb_index not in self.precomputed:
            self.inputs[mb_index] = [tensor.detach() for tensor in prev_stage_outputs]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive the gradients of a micro-batch's outputs.

        The list is empty on the last stage and without backward.
        """
        if not self.has_backward or self.is_last:
            return []
        buffers = [
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in self._list_differentiable(bwd_chunk_id)
        ]
        self.output_grads[bwd_chunk_id] = buffers
        return self._make_transfers(dist.irecv, buffers, self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send the gradients of a micro-batch's inputs.

        The list is empty on the first stage and without backward.
        """
        if not self.has_backward or self.is_first:
            return []
        return self._make_transfers(dist.isend, self._input_grads.pop(bwd_chunk_id), self.stage_index - 1)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradients of a micro-batch's inputs, for a previous stage on this rank."""
        return tuple(self._input_grads.pop(mb_index, ()))

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Set the gradients of a micro-batch's outputs if the next stage is on this rank.

        In this case, no gradients have to be received.
        """
        self.output_grads[mb_index] = list(next_stage_bwd_outputs)

    def _list_differentiable(self, number: int) -> list[torch.Tensor]:
        """Return those outputs of a micro-batch that require gradients."""
        return [tensor for tensor in self.outputs[number] if tensor.requires_grad]

    # ---------------------------------------------------------------- computing

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """Run a micro-batch's forward and return its outputs as a tuple. On the last stage, return the loss.

        If the forward was run before the schedule, return the outputs of that run. Only `fwd_chunk_id`, the index of
        the micro-batch, is used.
        """
        if fwd_chunk_id not in self.precomputed:
            self.compute(fwd_chunk_id)
        outputs = self.outputs[fwd_chunk_id]
        return outputs[0] if self.is_last else tuple(outputs)

    def compute(self, number: int) -> None:
        """Run the stage on the input of micro-batch `number`, and store the outputs.

        Raises:
            UnsupportedError: If the output differs in structure, shape or dtype from what the other ranks expect.
        """
        received: Tree = None
        if not self.is_first:
            description = self.expected_inputs[number]
            for tensor, (_, _, requires_grad) in zip(self.inputs[number], description.metas):
                tensor.requires_grad_(requires_grad and torch.is_grad_enabled())
            received = description.fill_slots(self.inputs[number])
        else:
            self.inputs[number] = []
        activation, outputs = describe_tree(self._compute(number, received))
        self._check_expected(number, activation)
        self.activations[number] = activation
        # Zero-bubble schedules detach outputs in place, which views do not allow. A block might also return its input unchanged.
        input_ids = {id(tensor) for tensor in self.inputs[number]}
        self.outputs[number] = [t.clone() if t._is_view() or id(t) in input_ids else t for t in outputs]

    def _check_expected(self, number: int, activation: StageActivation) -> None:
        """Raise `UnsupportedError` if an output does not fit the buffers that the next stage allocates for it."""
        expected = self.expected_outputs.get(number)  # None while the shapes are not known yet
        if expected is None or activation.describe() == expected.describe():
            return
        shapes = [tuple(shape) for shape, _, _ in activation.metas]
        expected_shapes = [tuple(shape) for shape, _, _ in expected.metas]
        if shapes != expected_shapes:
            difference = f"tensors of shapes {shapes} instead of {expected_shapes}"
        else:
            difference = "other numbers or dtypes"
        raise UnsupportedError(
            f"stage {self.stage_index} of the pipeline returned {difference}: the other ranks expect what it returned for an earlier "
            "batch with the same shapes and numbers. If the loss function uses a number from outside of the batch, such as a length, "
            "put it into the batch. Let blocks return changing numbers as tensors"
        )

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run a micro-batch's backward, and store the gradients of the stage's inputs for the previous stage.

        Do nothing if the batch has no backward. Input gradients are zero if no output requires a gradient. They are
        also zero if the micro-batch's loss has weight 0, so that its backward is skipped (see `silence_gradients`).

        Args:
            bwd_chunk_id: Index of the micro-batch.
            loss: Ignored, because the last stage's output is the loss.
            full_backward: Whether to compute the gradients of inputs and weights. False: compute only those of the
                inputs, and leave the others to `backward_weight_one_chunk`. Default: True.
            last_backward: Ignored, because gradients are reduced at the end of the accumulation window.
        """
        if not self.has_backward:
            return
        outputs, inputs = self._list_differentiable(bwd_chunk_id), self.inputs.pop(bwd_chunk_id)
        grads = self.output_grads.pop(bwd_chunk_id, None)
        del self.outputs[bwd_chunk_id]
        input_grads: Sequence[torch.Tensor | None] = [None] * len(inputs)
        is_weightless = bwd_chunk_id in self.weightless
        if not outputs or (is_weightless and self.silence_gradients is None):
            pass  # there is no gradient to compute
        elif full_backward:
            # Only layouts with experts set `silence_gradients`, and their schedules do not split backward.
            silence = self.silence_gradients if is_weightless else None
            with nullcontext() if silence is None else silence():
                input_grads = self._backward(outputs, grads, inputs)
        elif any(tensor.requires_grad for tensor in inputs):
            input_grads, groups = stage_backward_input(outputs, grads, inputs, iter(self._list_parameters()))
            self._weight_backwards[bwd_chunk_id] = lambda: stage_backward_weight(iter(self._list_parameters()), groups)
        else:  # without input gradients, the first half is empty
            self._weight_backwards[bwd_chunk_id] = lambda: self._backward(outputs, grads, inputs)
        self._input_grads[bwd_chunk_id] = [
            torch.zeros_like(tensor) if grad is None else grad.contiguous()
            for tensor, grad in zip(inputs, input_grads)
            if tensor.requires_grad
        ]

    @staticmethod
    def _backward(
        outputs: list[torch.Tensor], grads: list[torch.Tensor] | None, inputs: list[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """Compute the gradients of a stage's weights and inputs, and return those of the inputs.

        Args:
            outputs: Outputs of the stage that require gradients.
            grads: Gradients of these outputs. None: the first output is the loss.
            inputs: Inputs of the stage.
        """
        if grads is None:  # the last stage's output is a loss
            return stage_backward(outputs[0], None, inputs)
        return stage_backward(tuple(outputs), tuple(grads), inputs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute a micro-batch's weight gradients, the second half of a split backward.

        Do nothing if the first half left nothing to compute. `last_backward` is ignored.
        """
        run_weight_backward = self._weight_backwards.pop(bwd_chunk_id, None)
        if run_weight_backward is not None:
            run_weight_backward()
