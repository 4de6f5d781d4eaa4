"""Sequences in parts beside plain PyTorch on one process: losses, norms and weights; masks, dropout, generation, wrong use."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from headway import (
    Accelerator,
    ActivationCheckpointing,
    DataLoaderConfiguration,
    Float8Options,
    TensorParallelOptions,
    TorchContextParallelConfig,
    TorchDynamoPlugin,
)
from headway.errors import ConfigError, PrepareError, UnsupportedError
from tests.distributed import cut_models
from tests.distributed.cut_losses import Judge, compare_gradients, losses_of_other_kinds, nothing_stays, running
from tests.distributed.layouts import (
    LENGTH,
    MODELS,
    PADDING,
    ROWS,
    VOCABULARY,
    Curve,
    Task,
    by_hand,
    difference,
    each,
    gpt,
    llama,
    optimizer_of,
    prepared,
    rows,
    seeded,
    text,
    whole_weights,
    windows,
)
from tests.distributed.ranks import run_ranks

MODELS["llama, four heads"] = lambda: cut_models.llama(vocab_size=VOCABULARY, use_cache=False)
CLOSE = {"losses": 3e-6, "norms": 3e-6, "weights": 2e-3}
"""AdamW divides by the size of gradients, so that tiny ones differ by what they were rounded to."""
TABLE = {
    "gpt on two": ("cp", 2, Task("gpt", updates=5)),
    "gpt2, joined after its blocks": ("cp", 2, Task("gpt2", updates=5)),
    "gpt on four, padded and recomputed": (
        "fsdp=2+cp=2",
        4,
        Task("gpt", handlers=(ActivationCheckpointing(),), updates=4),
    ),
    "llama on four parts": ("cp", 4, Task("llama, tied", updates=4)),
    "llama, matrices cut too": ("cp=2+tp=2", 4, Task("llama, four heads", updates=4)),
}


def curves(num_ranks: int) -> dict[str, Curve]:
    return {name: prepared(task, layout) for name, (layout, count, task) in TABLE.items() if count == num_ranks}


# ---------------------------------------------------------------- losses that the model computes


class Greedy(Judge):
    """Runs out of memory where its sequences are cut."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        if targets.shape[1] < ids.shape[1]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(ids, targets)


def judged_by_hand(updates: int = 4, clip: float = 0.5) -> Curve:
    """Llama with labels of ragged length, whole windows of 8 rows at once."""
    model = seeded(0, llama)
    optimizer = optimizer_of(Task(), model)
    losses, norms = [], []
    for (ids, targets), _ in zip(windows(8), range(updates)):
        labels = ids.masked_fill(targets == PADDING, PADDING)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": whole_weights(model)}


def judged(layout: str, updates: int = 4, clip: float = 0.5) -> Curve:
    """The same through the Accelerator: two micro-batches a window, each loss a sum over a given number of tokens or a mean."""
    accelerator = Accelerator(
        cpu=True, strategy=layout, gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(even_batches=False),
    )  # fmt: skip
    model = seeded(0, llama)
    optimizer = optimizer_of(Task(), model)
    ids, targets = rows()
    data = TensorDataset(ids, ids.masked_fill(targets == PADDING, PADDING))
    loader = DataLoader(data, batch_size=4 // accelerator.strategy.data_shard.count)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    norms: list[float] = []
    total = weight = 0.0
    while len(losses) < updates:
        for ids, labels in loader:
            if len(losses) == updates:
                break
            if loader.mask is not None:
                labels = labels.masked_fill(~loader.mask[:, None], PADDING)
            with accelerator.accumulate(model):
                count = int((labels[:, 1:] != PADDING).sum())
                if len(losses) % 2:
                    sums = model(
                        input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(float(max(1, count)))
                    ).loss
                else:
                    sums = model(input_ids=ids, labels=labels).loss
                accelerator.backward(sums, weight=count)
                total, weight = total + sums.nan_to_num().item() * count, weight + count
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
                    losses.append(float(accelerator.reduce_mean(total, weight)))
                    total = weight = 0.0
                optimizer.step()
                optimizer.zero_grad()
    curve = {"losses": losses, "norms": norms, "weights": whole_weights(model)}
    accelerator.end_training()
    return curve


def the_models_own_loss() -> None:
    """A mean and a sum; a rank whose part has no label; the gradients of both."""
    ids, targets = text(2), text(3)
    targets[:, : LENGTH // 4] = PADDING
    targets[:, -(LENGTH // 4) :] = PADDING  # what rank 0 has of it
    for reduction in ("mean", "sum"):
        whole = seeded(0, lambda reduction=reduction: Judge(reduction))
        loss = whole(ids, targets)[1]
        loss.backward()
        with running() as accelerator:
            model = accelerator.prepare(seeded(0, lambda reduction=reduction: Judge(reduction)))
            logits, mine = model(ids, targets)
            assert abs(mine.item() - loss.item()) < 1e-5 * loss.item()
            with pytest.raises(UnsupportedError, match=rf"each rank has {LENGTH // 2} of {LENGTH} tokens"):
                logits.argmax(-1)
            with pytest.raises(UnsupportedError, match="call the model without labels"):
                logits[0]
            accelerator.backward(mine)
            compare_gradients(model, whole, 1e-5)


def penalty_by_hand(updates: int = 3) -> Curve:
    """Windows of 8 rows, and a penalty on all weights beside each window's loss."""
    model = seeded(0, gpt)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (ids, targets), _ in zip(windows(8), range(updates)):
        (mean_loss(model(ids), targets) + weight_penalty(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": whole_weights(model)}


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten())


def weight_penalty(model: nn.Module) -> torch.Tensor:
    return 0.01 * sum(p.square().sum() for p in model.parameters())


def penalised(layout: str, updates: int = 3) -> Curve:
    """The same through the Accelerator: the penalty has a backward of its own in each of two micro-batches."""
    accelerator = Accelerator(cpu=True, strategy=layout, gradient_accumulation_steps=2)
    model = seeded(0, gpt)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*rows()), batch_size=4 // accelerator.strategy.data_shard.count)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for ids, targets in loader:
        if accelerator.num_updates == updates:
            break
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model(ids), targets))
            accelerator.backward(weight_penalty(model))
            optimizer.step()
            optimizer.zero_grad()
    curve = {"weights": whole_weights(model)}
    accelerator.end_training()
    return curve


# ---------------------------------------------------------------- evaluation, masks, dropout


def evaluation_and_generation() -> None:
    """Whole outputs, each sample once, the tokens of one process; a length that cannot be divided."""
    ids = text(4, rows=5)[:, : LENGTH - 1]
    whole = seeded(0, llama).eval()
    with running() as accelerator:
        model, loader = accelerator.prepare(seeded(0, llama), DataLoader(TensorDataset(ids), batch_size=2))
        model.eval()
        found = []
        with torch.no_grad():
            for (part,) in loader:
                out = model(input_ids=part, labels=part)
                assert out.logits.shape == (len(part), LENGTH - 1, VOCABULARY)
                assert abs(out.loss - whole(input_ids=part, labels=part).loss) < 1e-6
                found.append(accelerator.gather_for_metrics(out.logits))
            off = (torch.cat(found) - whole(input_ids=ids).logits).abs().max()
        assert off < 1e-6
        given = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        assert torch.equal(model.generate(ids[:2], **given), whole.generate(ids[:2], **given))


def masks() -> None:
    """Padding on the left, in the mask that transformers makes of it, and eager attention, which becomes sdpa."""
    from transformers import set_seed  # noqa: F401  the package is there

    ids = text(5, rows=3)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[1, :2] = 0
    labels = ids.masked_fill(mask == 0, PADDING)
    whole = seeded(0, llama)
    loss = whole(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    with running() as accelerator:
        model = seeded(0, llama)
        model.set_attn_implementation("eager")
        model = accelerator.prepare(model)
        mine = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        assert abs(mine.item() - loss.item()) < 2e-6
        accelerator.backward(mine)
        compare_gradients(model, whole, 1e-5)
        with accelerator.maybe_context_parallel(buffers=[ids, mask], buffer_seq_dims=[1, 1], no_restore_buffers={mask}):
            assert ids.shape[1] == LENGTH
        with pytest.raises(ConfigError, match="does not give a dimension for each buffer"):
            with accelerator.maybe_context_parallel(buffers=[ids], buffer_seq_dims=[2]):
                pass


def dropout() -> None:
    """Blocks drop other tokens on each rank; computed again in backward, the same ones."""
    from tests.distributed.layouts import GPT

    gradients = []
    for handlers in ([], [ActivationCheckpointing()]):
        with running(kwargs_handlers=handlers) as accelerator:
            model = accelerator.prepare(seeded(0, lambda: GPT(dropout=0.5)))
            seen: list[torch.Tensor] = []
            model.blocks[0].dropout.register_forward_hook(lambda *given, seen=seen: seen.append(given[2] == 0))
            torch.manual_seed(7)
            accelerator.backward(model(text(6)).square().mean())
            both = accelerator.gather(seen[-1][None])  # the first ones are the dry run's
            assert not torch.equal(both[0], both[1])
            after = accelerator.gather(torch.rand(1))
            assert after[0] == after[1]
            gradients.append([p.grad.full_tensor() for p in model.parameters()])
    for one, other in zip(*gradients):
        assert torch.equal(one, other)


# ---------------------------------------------------------------- checkpoints


def checkpoints(folder: str) -> None:
    """Saved with sequences in parts, loaded with whole models, and back."""
    ids = text(8)

    def train(strategy: str, load: str | None, save: str | None) -> float:
        accelerator = Accelerator(cpu=True, strategy=strategy)
        model = seeded(0 if load is None else 5, gpt)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
        if load is not None:
            accelerator.load_state(f"{folder}/{load}")
        loss = model(ids).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if save is not None:
            accelerator.save_state(f"{folder}/{save}")
        accelerator.end_training()
        return loss.item()

    first = [train("cp", None, "cut"), train("ddp", "cut", "whole"), train("cp", "whole", None)]
    accelerator = Accelerator(cpu=True, strategy="ddp")
    model = seeded(0, gpt)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    plain = []
    for _ in range(3):
        loss = model(ids).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        plain.append(loss.item())
    accelerator.end_training()
    assert max(abs(a - b) for a, b in zip(first, plain)) < 1e-5, (first, plain)


# ---------------------------------------------------------------- wrong use


class ByHand(nn.Module):
    """Attention by matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        scores = (q @ q.transpose(1, 2)).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
        return x + self.out(scores.softmax(-1) @ x)


class Places(ByHand):
    """Positions that a block makes itself, from the length that it sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x) * torch.arange(x.shape[1])[:, None].cos()
        return x + self.out(
            functional.scaled_dot_product_attention(q[:, None], q[:, None], x[:, None], is_causal=True)[:, 0]
        )


class Shy(Judge):
    """A loss while training only, which no comparison has seen."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        return super().forward(ids, targets) if self.training else self.gpt(ids)


class Small(nn.Module):
    def __init__(self, kind: type[nn.Module], num_stacks: int = 1) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.stacks = nn.ModuleDict({f"s{i}": nn.ModuleList([kind(), kind()]) for i in range(num_stacks)})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for stack in self.stacks.values():
            for block in stack:  # type: ignore[attr-defined]
                x = block(x)
        return self.head(x)


def wrong_use() -> None:
    ids = text(9)
    with running() as accelerator:
        with pytest.raises(
            PrepareError, match=r"blocks never call torch.nn.functional.scaled_dot_product_attention.*else use fsdp"
        ):
            accelerator.prepare(seeded(0, lambda: Small(ByHand)))(ids)
    with running() as accelerator:
        with pytest.raises(
            PrepareError, match=r"Small cannot be cut.*an output of the shape .* differs by .*positions"
        ):
            accelerator.prepare(seeded(0, lambda: Small(Places)))(ids)
    with running() as accelerator:
        with pytest.raises(PrepareError, match=r"needs one stack of blocks.*are not in one ModuleList: ByHand"):
            accelerator.prepare(seeded(0, lambda: Small(ByHand, 2)))
    with running() as accelerator:
        model = accelerator.prepare(seeded(0, llama))
        with pytest.raises(UnsupportedError, match=r"a part of .*Llama.* was called by itself while training"):
            model.model.layers[0](torch.zeros(1, LENGTH, 16), position_embeddings=(torch.zeros(1), torch.zeros(1)))
        with pytest.raises(UnsupportedError, match="leave out use_cache and past_key_values while training"):
            model(input_ids=ids, use_cache=True)
    with running(dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=True)) as accelerator:
        with pytest.raises(UnsupportedError, match="is compiled, which context parallelism does not support yet"):
            accelerator.prepare(seeded(0, gpt))(ids)
    with running() as accelerator:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            accelerator.prepare(seeded(0, Greedy))(ids, ids)
    with running() as accelerator:
        model = accelerator.prepare(seeded(0, Shy))
        with pytest.raises(PrepareError, match=r"computes a loss from labels while training, but not in eval\(\) mode"):
            model(ids, ids)
    with running(
        kwargs_handlers=[TorchContextParallelConfig(cp_comm_strategy="alltoall", blocks=("Nothing",))]
    ) as accelerator:
        with pytest.raises(ConfigError, match="blocks names 'Nothing'"):
            accelerator.prepare(seeded(0, llama))


def scenarios(folder: str) -> list[str]:
    return each(
        [
            the_models_own_loss,
            losses_of_other_kinds,
            nothing_stays,
            evaluation_and_generation,
            masks,
            dropout,
            lambda: checkpoints(folder),
            wrong_use,
        ]
    )


def on_two(folder: str) -> tuple[list[str], dict[str, Curve], Curve, Curve]:
    return scenarios(folder), curves(2), judged("cp"), penalised("cp")


def on_four() -> tuple[dict[str, Curve], Curve, Curve]:
    found = curves(4), judged("fsdp+cp=2"), penalised("fsdp+cp=2")
    combinations_that_cannot()
    return found


def combinations_that_cannot() -> None:
    with pytest.raises(UnsupportedError, match=r"drop loss_parallel, or cp"):
        Accelerator(cpu=True, strategy="cp=2+tp=2", kwargs_handlers=[TensorParallelOptions(loss_parallel=True)])
    with pytest.raises(UnsupportedError, match=r"'fp8' does not support context parallelism"):
        Accelerator(cpu=True, strategy="cp", mixed_precision="fp8", kwargs_handlers=[Float8Options(emulate=True)])


def compare(found: dict[str, Curve], own: Curve, held: Curve) -> None:
    for name, curve in found.items():
        off = difference(curve, by_hand(TABLE[name][2]))
        assert all(off[kind] < least for kind, least in CLOSE.items()), (name, off)
    off = difference(own, judged_by_hand())
    assert all(off[kind] < least for kind, least in CLOSE.items()), off
    for name, weight in penalty_by_hand()["weights"].items():
        torch.testing.assert_close(held["weights"][name], weight, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_two_parts_are_the_whole(tmp_path: Any) -> None:
    for wrong, *rank_curves in run_ranks(on_two, 2, str(tmp_path), timeout=400):
        assert not wrong, wrong
    compare(*rank_curves)
    assert ROWS % 8, "windows end ragged"


@pytest.mark.slow
def test_four_ranks_in_products_of_layouts_are_the_whole() -> None:
    compare(*run_ranks(on_four, 4, timeout=400)[0])
