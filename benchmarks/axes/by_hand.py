"""Training steps under each parallel layout, written by hand with torch alone."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu, scaled_dot_product_attention

from benchmarks.axes.models import NUM_MICROBATCHES, Batch, LabelledGPT, build_llama, build_mixtral, compute_loss

Step = Callable[[], float | None]
"""Runs one update and returns the loss, or None if this rank does not know it."""


def compute_squared_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the square of the gradients' 2-norm. Either all gradients are DTensors, or none is."""
    norm: Any = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()


def clip_gradients(parameters: Iterable[torch.Tensor], squared: torch.Tensor) -> None:
    """Scale the gradients to a 2-norm of at most 1, given the square of their norm."""
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    torch._foreach_mul_(grads, (1.0 / (squared.sqrt() + 1e-6)).clamp(max=1.0))


def make_attention_plan() -> dict[str, Any]:
    """Return a torch plan that splits attention and the head."""
    plan: dict[str, Any] = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    return plan | {
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }


def build_tp_step(batch: Batch) -> Step:
    """Build the step of a Llama with split matrices (tensor parallelism)."""
    model, mesh = build_llama(), init_device_mesh("cpu", (dist.get_world_size(),))
    plan = make_attention_plan()
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    plan["model.layers.*.mlp.down_proj"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    # torch's foreach functions take either DTensors or plain tensors, not a mixture.
    groups = [[p for p in model.parameters() if isinstance(p, DTensor) == is_cut] for is_cut in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group_parameters} for group_parameters in groups], lr=1e-4)

    def step() -> float:
        loss = compute_loss(model(batch.ids).logits, batch.labels)
        loss.backward()
        total = compute_squared_norm(groups[0]) + compute_squared_norm(groups[1])
        for group_parameters in groups:
            clip_gradients(group_parameters, total)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


# ------------------------------------------------------------------ context parallelism


def take_zigzag_pieces(x: torch.Tensor, size: int, rank: int, dim: int) -> torch.Tensor:
    """Return this rank's two pieces of `x` along `dim`: one counted from the start, one from the end."""
    pieces = x.chunk(2 * size, dim)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], dim)


def gather_keys_and_values(blocks: Iterable[Any], mesh: DeviceMesh) -> None:
    """Replace the forward of each block: a rank holds a part of each sequence, and gathers the others' keys and values."""
    size, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    order = [piece for owner in range(size) for piece in (owner, 2 * size - 1 - owner)]
    positions = [order.index(piece) for piece in range(2 * size)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        gathered = all_gather_tensor_autograd(torch.cat([k, v], -1), 2, group)
        pieces = gathered.chunk(2 * size, 2)
        key, value = torch.cat([pieces[position] for position in positions], 2).chunk(2, -1)
        length, outputs = q.shape[2] // 2, []
        for query, piece in zip(q.chunk(2, 2), (rank, 2 * size - 1 - rank), strict=True):
            end = (piece + 1) * length
            mask = torch.arange(end) <= torch.arange(piece * length, end)[:, None]
            outputs.append(scaled_dot_product_attention(query, key[:, :, :end], value[:, :, :end], attn_mask=mask))
        return torch.cat(outputs, 2)

    def forward(block: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (projected.unsqueeze(1) for projected in block.attention(block.first(x)).chunk(3, -1))
        x = x + block.out(attend(q, k, v).squeeze(1))
        return x + block.down(gelu(block.up(block.second(x))))

    for block in blocks:
        block.forward = forward.__get__(block)


def build_cp_step(batch: Batch) -> Step:
    """Build the step of a GPT with split sequences (context parallelism) and sharded parameters."""
    model, mesh = LabelledGPT(), init_device_mesh("cpu", (dist.get_world_size(),))
    size, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    gather_keys_and_values(model.blocks, mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        loss = model(*(take_zigzag_pieces(tokens, size, rank, 1) for tokens in (batch.ids, batch.labels)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total, group=group)
        return total.item() / size

    return step


# ------------------------------------------------------------------ expert parallelism


def route_to_experts(module: Any, mesh: DeviceMesh) -> None:
    """Keep this rank's part of the experts, and send rows to the ranks of their experts and back."""
    size, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    for name, parameter in list(module._parameters.items()):
        setattr(module, name, nn.Parameter(parameter.detach().chunk(size)[rank].clone()))
    module.num_experts //= size
    num_local, compute = module.num_experts, module.forward

    def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        experts = index.flatten()
        order = experts.argsort(stable=True)
        counts = torch.bincount(experts, minlength=size * num_local)
        received_counts = torch.empty_like(counts)
        dist.all_to_all_single(received_counts, counts, group=group)
        sent, received = (number.view(size, num_local).sum(1).tolist() for number in (counts, received_counts))
        rows = all_to_all_single_autograd(hidden[order // index.shape[1]], received, sent, group)
        owners = torch.arange(num_local).repeat(size).repeat_interleave(received_counts)
        outputs = compute(rows, owners[:, None], torch.ones(len(rows), 1))
        returned = all_to_all_single_autograd(outputs, sent, received, group)
        return (returned[order.argsort()].view(*index.shape, -1) * weights[..., None]).sum(1)

    module.forward = forward


def build_ep_step(batch: Batch) -> Step:
    """Build the step of a Mixtral whose experts are split over pairs of ranks; all other parameters are sharded over all ranks."""
    model, world = build_mixtral(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "ep"))
    world_mesh = init_device_mesh("cpu", (world,))
    experts: set[nn.Parameter] = set()
    for layer in model.model.layers:
        route_to_experts(layer.mlp.experts, mesh["ep"])
        if world > 2:
            fully_shard(layer.mlp.experts, mesh=mesh["shard"])
        experts |= set(layer.mlp.experts.parameters())
    for layer in model.model.layers:
        fully_shard(layer, mesh=world_mesh, ignored_params=experts)
    fully_shard(model, mesh=world_mesh, ignored_params=experts)
    experts = {p for layer in model.model.layers for p in layer.mlp.experts.parameters()}
    others = [p for p in model.parameters() if p not in experts]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": list(experts)}], lr=1e-4)

    def step() -> float:
        loss = compute_loss(model(batch.ids).logits, batch.labels)
        loss.backward()
        for parameter in experts:  # FSDP averages the other gradients over all ranks; these are sums over a pair
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        total = compute_squared_norm(experts)
        dist.all_reduce(total, group=mesh["ep"].get_group())
        total = total + compute_squared_norm(others)
        clip_gradients([*others, *experts], total)
        optimizer.step()
        optimizer.zero_grad()
        total_loss = loss.detach()
        dist.all_reduce(total_loss)
        return total_loss.item() / world

    return step


class EnterSplitMatrices(torch.autograd.Function):
    """Identity in the forward; sums the gradient over the ranks that share the split matrices in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        """Return `x` unchanged."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Sum the gradient over the group."""
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumPartialOutputs(torch.autograd.Function):
    """Sums the partial outputs of the ranks that share the split matrices; the backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        """Sum `x` over the group."""
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Return the gradient unchanged."""
        return grad, None


def split_experts(module: Any, mesh: DeviceMesh) -> None:
    """Keep this rank's part of every expert's inner width."""
    size, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    halves = [half.chunk(size, 1)[rank] for half in module.gate_up_proj.detach().chunk(2, 1)]
    module.gate_up_proj = nn.Parameter(torch.cat(halves, 1))
    module.down_proj = nn.Parameter(module.down_proj.detach().chunk(size, 2)[rank].clone())
    compute = module.forward

    def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        partial_output = compute(
            EnterSplitMatrices.apply(hidden, group), index, EnterSplitMatrices.apply(weights, group)
        )
        output: torch.Tensor = SumPartialOutputs.apply(partial_output, group)
        return output

    module.forward = forward


def build_ep_tp_step(batch: Batch) -> Step:
    """Build the step of a Mixtral with experts over two ranks, split matrices over two, and all other parameters sharded."""
    model = build_mixtral()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    parallelize_module(model, mesh["tp"], make_attention_plan())
    for layer in model.model.layers:
        route_to_experts(layer.mlp.experts, mesh["ep"])
        split_experts(layer.mlp.experts, mesh["tp"])
    experts = [p for layer in model.model.layers for p in layer.mlp.experts.parameters()]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["ep"], ignored_params=set(experts))
    fully_shard(model, mesh=mesh["ep"], ignored_params=set(experts))
    others = [p for p in model.parameters() if isinstance(p, DTensor)]
    groups = [[p for p in others if p.device_mesh.ndim == 2], [p for p in others if p.device_mesh.ndim == 1], experts]
    optimizer = torch.optim.AdamW([{"params": group_parameters} for group_parameters in groups], lr=1e-4)

    def step() -> float:
        loss = compute_loss(model(batch.ids).logits, batch.labels)
        loss.backward()
        for parameter in experts:  # FSDP averages the other gradients over the ranks with different rows
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        total = compute_squared_norm(experts)
        dist.all_reduce(total)
        total = total + compute_squared_norm(groups[0]) + compute_squared_norm(groups[1])
        for group_parameters in groups:
            clip_gradients(group_parameters, total)
        optimizer.step()
        optimizer.zero_grad()
        total_loss = loss.detach()
        dist.all_reduce(total_loss)
        return total_loss.item() / dist.get_world_size()

    return step


# ------------------------------------------------------------------ pipeline parallelism


class Stage(nn.Module):
    """One of the two pipeline stages of a GPT: half of its blocks, with the embedding or the head."""

    def __init__(self, model: LabelledGPT, number: int) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.tokens = model.tokens if number == 0 else None
        self.blocks = model.blocks[:half] if number == 0 else model.blocks[half:]
        self.norm, self.head = (None, None) if number == 0 else (model.norm, model.head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the hidden states for the next stage, or the logits in the last stage."""
        x = x if self.tokens is None else self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def build_pp_step(batch: Batch, splits_sequences: bool = False) -> Step:
    """Build the step of a GPT with two pipeline stages in torch's 1F1B; ranks of one stage share parameters or sequences."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "shard"))
    number, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    module = Stage(LabelledGPT(), number)
    ids, labels = batch.ids, batch.labels
    if splits_sequences:
        gather_keys_and_values(module.blocks, mesh["shard"])
        ids, labels = (
            take_zigzag_pieces(tokens, world // 2, mesh["shard"].get_local_rank(), 1) for tokens in (ids, labels)
        )
    if world > 2:
        for block in module.blocks:
            fully_shard(block, mesh=mesh["shard"], reshard_after_forward=False)
        fully_shard(module, mesh=mesh["shard"], reshard_after_forward=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=compute_loss)

    def step() -> float | None:
        losses: list[torch.Tensor] = []
        if number == 0:
            schedule.step(ids)
        else:
            schedule.step(target=labels, losses=losses)
        total = compute_squared_norm(module.parameters())
        dist.all_reduce(total, group=group)
        clip_gradients(module.parameters(), total)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(mean)  # Headway also returns the loss on all ranks, so this work belongs to the step
        return mean.item() / (world // 2)

    return step
