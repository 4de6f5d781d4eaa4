"""The axes as they are written by hand with torch alone."""

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

from benchmarks.axes.models import NUM_MICROBATCHES, Batch, LabelledGPT, llama, loss_of, mixtral

Step = Callable[[], float | None]
"""One update; its loss, where this rank knows it."""


def squared_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Of the gradients, all of which are DTensors or none."""
    norm: Any = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()


def clip(parameters: Iterable[torch.Tensor], squared: torch.Tensor) -> None:
    """To a norm of 1, by the square of what it is."""
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    torch._foreach_mul_(grads, (1.0 / (squared.sqrt() + 1e-6)).clamp(max=1.0))


def attention_cut() -> dict[str, Any]:
    """torch's plan for attention and the head."""
    cut: dict[str, Any] = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    return cut | {
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }


def tp(batch: Batch) -> Step:
    """Matrices of a Llama, by torch's plan."""
    model, mesh = llama(), init_device_mesh("cpu", (dist.get_world_size(),))
    cut = attention_cut()
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        cut[f"model.layers.*.{name}"] = ColwiseParallel()
    cut["model.layers.*.mlp.down_proj"] = RowwiseParallel()
    parallelize_module(model, mesh, cut)
    # torch's loops over many tensors take DTensors or plain ones.
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) == is_cut] for is_cut in (True, False)]
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds], lr=1e-4)

    def step() -> float:
        loss = loss_of(model(batch.ids).logits, batch.labels)
        loss.backward()
        total = squared_norm(kinds[0]) + squared_norm(kinds[1])
        for kind in kinds:
            clip(kind, total)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


# ------------------------------------------------------------------ sequences


def zigzag(x: torch.Tensor, size: int, rank: int, dim: int) -> torch.Tensor:
    """The rank-th piece from the start and from the end."""
    pieces = x.chunk(2 * size, dim)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], dim)


def attend_to_all(blocks: Iterable[Any], mesh: DeviceMesh) -> None:
    """Each rank has a part of the sequences, and gathers the keys and values of the others."""
    size, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    order = [piece for each in range(size) for piece in (each, 2 * size - 1 - each)]
    back = [order.index(piece) for piece in range(2 * size)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        both = all_gather_tensor_autograd(torch.cat([k, v], -1), 2, group)
        pieces = both.chunk(2 * size, 2)
        key, value = torch.cat([pieces[number] for number in back], 2).chunk(2, -1)
        length, made = q.shape[2] // 2, []
        for part, piece in zip(q.chunk(2, 2), (rank, 2 * size - 1 - rank), strict=True):
            end = (piece + 1) * length
            mask = torch.arange(end) <= torch.arange(piece * length, end)[:, None]
            made.append(scaled_dot_product_attention(part, key[:, :, :end], value[:, :, :end], attn_mask=mask))
        return torch.cat(made, 2)

    def forward(block: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unsqueeze(1) for part in block.attention(block.first(x)).chunk(3, -1))
        x = x + block.out(attend(q, k, v).squeeze(1))
        return x + block.down(gelu(block.up(block.second(x))))

    for block in blocks:
        block.forward = forward.__get__(block)


def cp(batch: Batch) -> Step:
    """Parts of sequences; parameters are sharded."""
    model, mesh = LabelledGPT(), init_device_mesh("cpu", (dist.get_world_size(),))
    size, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    attend_to_all(model.blocks, mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        loss = model(*(zigzag(each, size, rank, 1) for each in (batch.ids, batch.labels)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
        told = loss.detach()
        dist.all_reduce(told, group=group)
        return told.item() / size

    return step


# ------------------------------------------------------------------ experts


def send_to_experts(module: Any, mesh: DeviceMesh) -> None:
    """Each rank keeps its part of the experts; rows travel to them and back."""
    size, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    for name, parameter in list(module._parameters.items()):
        setattr(module, name, nn.Parameter(parameter.detach().chunk(size)[rank].clone()))
    module.num_experts //= size
    num_local, compute = module.num_experts, module.forward

    def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen = index.flatten()
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=size * num_local)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=group)
        sent, received = (each.view(size, num_local).sum(1).tolist() for each in (counts, coming))
        rows = all_to_all_single_autograd(hidden[order // index.shape[1]], received, sent, group)
        owners = torch.arange(num_local).repeat(size).repeat_interleave(coming)
        made = compute(rows, owners[:, None], torch.ones(len(rows), 1))
        home = all_to_all_single_autograd(made, sent, received, group)
        return (home[order.argsort()].view(*index.shape, -1) * weights[..., None]).sum(1)

    module.forward = forward


def ep(batch: Batch) -> Step:
    """Experts of a Mixtral over pairs of ranks; everything else, and each pair's experts over all pairs, in shards."""
    model, world = mixtral(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "ep"))
    everyone = init_device_mesh("cpu", (world,))
    experts: set[nn.Parameter] = set()
    for layer in model.model.layers:
        send_to_experts(layer.mlp.experts, mesh["ep"])
        if world > 2:
            fully_shard(layer.mlp.experts, mesh=mesh["shard"])
        experts |= set(layer.mlp.experts.parameters())
    for layer in model.model.layers:
        fully_shard(layer, mesh=everyone, ignored_params=experts)
    fully_shard(model, mesh=everyone, ignored_params=experts)
    experts = {p for layer in model.model.layers for p in layer.mlp.experts.parameters()}
    others = [p for p in model.parameters() if p not in experts]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": list(experts)}], lr=1e-4)

    def step() -> float:
        loss = loss_of(model(batch.ids).logits, batch.labels)
        loss.backward()
        for parameter in experts:  # the others' shards are means over all ranks
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        total = squared_norm(experts)
        dist.all_reduce(total, group=mesh["ep"].get_group())
        total = total + squared_norm(others)
        clip([*others, *experts], total)
        optimizer.step()
        optimizer.zero_grad()
        told = loss.detach()
        dist.all_reduce(told)
        return told.item() / world

    return step


class ToMatrices(torch.autograd.Function):
    """What all ranks that share matrices have; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        """The tensor itself."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """The sum."""
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class FromMatrices(torch.autograd.Function):
    """The sum of what the ranks that share matrices have computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        """The sum."""
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Of each part."""
        return grad, None


def cut_experts(module: Any, mesh: DeviceMesh) -> None:
    """Each rank keeps a part of every expert's width."""
    size, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    wide = [half.chunk(size, 1)[rank] for half in module.gate_up_proj.detach().chunk(2, 1)]
    module.gate_up_proj = nn.Parameter(torch.cat(wide, 1))
    module.down_proj = nn.Parameter(module.down_proj.detach().chunk(size, 2)[rank].clone())
    compute = module.forward

    def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        part = compute(ToMatrices.apply(hidden, group), index, ToMatrices.apply(weights, group))
        whole: torch.Tensor = FromMatrices.apply(part, group)
        return whole

    module.forward = forward


def ep_tp(batch: Batch) -> Step:
    """Experts of a Mixtral over two ranks, and their matrices and attention's over two; everything else in shards."""
    model = mixtral()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    parallelize_module(model, mesh["tp"], attention_cut())
    for layer in model.model.layers:
        send_to_experts(layer.mlp.experts, mesh["ep"])
        cut_experts(layer.mlp.experts, mesh["tp"])
    experts = [p for layer in model.model.layers for p in layer.mlp.experts.parameters()]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["ep"], ignored_params=set(experts))
    fully_shard(model, mesh=mesh["ep"], ignored_params=set(experts))
    others = [p for p in model.parameters() if isinstance(p, DTensor)]
    kinds = [[p for p in others if p.device_mesh.ndim == 2], [p for p in others if p.device_mesh.ndim == 1], experts]
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds], lr=1e-4)

    def step() -> float:
        loss = loss_of(model(batch.ids).logits, batch.labels)
        loss.backward()
        for parameter in experts:  # the others' shards are means over the ranks that read different rows
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        total = squared_norm(experts)
        dist.all_reduce(total)
        total = total + squared_norm(kinds[0]) + squared_norm(kinds[1])
        for kind in kinds:
            clip(kind, total)
        optimizer.step()
        optimizer.zero_grad()
        told = loss.detach()
        dist.all_reduce(told)
        return told.item() / dist.get_world_size()

    return step


# ------------------------------------------------------------------ stages


class Stage(nn.Module):
    """One half of a GPT."""

    def __init__(self, model: LabelledGPT, number: int) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.tokens = model.tokens if number == 0 else None
        self.blocks = model.blocks[:half] if number == 0 else model.blocks[half:]
        self.norm, self.head = (None, None) if number == 0 else (model.norm, model.head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, or what the other half needs."""
        x = x if self.tokens is None else self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def pp(batch: Batch, splits_sequences: bool = False) -> Step:
    """Two stages in torch's 1F1B; the ranks of a stage share its parameters, and may share sequences."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "shard"))
    number, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    module = Stage(LabelledGPT(), number)
    ids, labels = batch.ids, batch.labels
    if splits_sequences:
        attend_to_all(module.blocks, mesh["shard"])
        ids, labels = (zigzag(each, world // 2, mesh["shard"].get_local_rank(), 1) for each in (ids, labels))
    if world > 2:
        for block in module.blocks:
            fully_shard(block, mesh=mesh["shard"], reshard_after_forward=False)
        fully_shard(module, mesh=mesh["shard"], reshard_after_forward=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=loss_of)

    def step() -> float | None:
        losses: list[torch.Tensor] = []
        if number == 0:
            schedule.step(ids)
        else:
            schedule.step(target=labels, losses=losses)
        total = squared_norm(module.parameters())
        dist.all_reduce(total, group=group)
        clip(module.parameters(), total)
        optimizer.step()
        optimizer.zero_grad()
        told = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(told)  # as Headway tells the loss on all ranks
        return told.item() / (world // 2)

    return step
