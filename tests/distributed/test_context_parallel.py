"""Context parallelism compared with plain PyTorch on one process: training, masks, dropout, generation, checkpoints and errors."""

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
from tests.distributed.cut_losses import (
    GPTWithLoss,
    check_custom_losses,
    check_release,
    compare_gradients,
    open_accelerator,
)
from tests.distributed.layouts import (
    LENGTH,
    MODELS,
    PADDING,
    ROWS,
    VOCABULARY,
    Curve,
    Task,
    build_seeded,
    gather_weights,
    gpt,
    iterate_windows,
    llama,
    make_optimizer,
    make_rows,
    make_tokens,
    measure_differences,
    run_each,
    train_by_hand,
    train_prepared,
)
from tests.distributed.ranks import run_ranks

MODELS["llama, four heads"] = lambda: cut_models.llama(vocab_size=VOCABULARY, use_cache=False)
CLOSE = {"losses": 3e-6, "norms": 3e-6, "weights": 2e-3}
"""Tolerances. AdamW divides by gradient magnitudes, so rounding errors in tiny gradients change weights noticeably."""
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
    return {name: train_prepared(task, layout) for name, (layout, count, task) in TABLE.items() if count == num_ranks}


# ---------------------------------------------------------------- losses that the model computes


class FailingOnPart(GPTWithLoss):
    """Runs out of memory if its sequences are split."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        if targets.shape[1] < ids.shape[1]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(ids, targets)


def train_llama_by_hand(updates: int = 4, clip: float = 0.5) -> Curve:
    """Train Llama on labels of ragged length in plain PyTorch, with whole windows of 8 rows as batches."""
    model = build_seeded(0, llama)
    optimizer = make_optimizer(Task(), model)
    losses, norms = [], []
    for (ids, targets), _ in zip(iterate_windows(8), range(updates)):
        labels = ids.masked_fill(targets == PADDING, PADDING)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": gather_weights(model)}


def train_llama(layout: str, updates: int = 4, clip: float = 0.5) -> Curve:
    """Train Llama with the Accelerator: two micro-batches per window, and losses as means or with `num_items_in_batch`."""
    accelerator = Accelerator(
        cpu=True, strategy=layout, gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(even_batches=False),
    )  # fmt: skip
    model = build_seeded(0, llama)
    optimizer = make_optimizer(Task(), model)
    ids, targets = make_rows()
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
    curve = {"losses": losses, "norms": norms, "weights": gather_weights(model)}
    accelerator.end_training()
    return curve


def check_model_loss() -> None:
    """Check a mean and a sum loss and their gradients, with labels of which one rank has none."""
    ids, targets = make_tokens(2), make_tokens(3)
    targets[:, : LENGTH // 4] = PADDING
    targets[:, -(LENGTH // 4) :] = PADDING  # the sequence's first and last quarter belong to rank 0
    for reduction in ("mean", "sum"):
        whole = build_seeded(0, lambda reduction=reduction: GPTWithLoss(reduction))
        loss = whole(ids, targets)[1]
        loss.backward()
        with open_accelerator() as accelerator:
            model = accelerator.prepare(build_seeded(0, lambda reduction=reduction: GPTWithLoss(reduction)))
            logits, mine = model(ids, targets)
            assert abs(mine.item() - loss.item()) < 1e-5 * loss.item()
            with pytest.raises(UnsupportedError, match=rf"each rank has {LENGTH // 2} of {LENGTH} tokens"):
                logits.argmax(-1)
            with pytest.raises(UnsupportedError, match="call the model without labels"):
                logits[0]
            accelerator.backward(mine)
            compare_gradients(model, whole, 1e-5)


class PositionalOnly(GPTWithLoss):
    """Model whose inputs can be passed by position only. Labels are optional."""

    def forward(self, ids: torch.Tensor, /, targets: torch.Tensor | None = None) -> Any:
        return self.gpt(ids) if targets is None else super().forward(ids, targets)


class ExtraPositional(GPTWithLoss):
    """Model with `*args` before the labels, which can be passed by name only."""

    def forward(self, ids: torch.Tensor, *scales: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        logits = self.gpt(ids)
        for scale in scales:
            logits = logits * scale.unsqueeze(-1)
        if targets is None:
            return logits
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING)


class LabelsBeforeExtra(ExtraPositional):
    """Model with labels by position, followed by `*args`."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, *scales: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(ids, *scales, targets=targets)


def check_signatures() -> None:
    """Check models whose arguments cannot all be passed by name."""
    ids, targets = make_tokens(2), make_tokens(3)
    scale = torch.linspace(0.5, 1.5, ids.shape[1]).expand(ids.shape)
    calls: list[tuple[type[nn.Module], tuple[Any, ...], dict[str, Any]]] = [
        (PositionalOnly, (ids, targets), {}),
        (PositionalOnly, (ids,), {"targets": targets}),
        (ExtraPositional, (ids,), {"targets": targets}),
        (LabelsBeforeExtra, (ids, targets), {}),
        (PositionalOnly, (ids,), {}),
        (ExtraPositional, (ids, scale), {}),
    ]
    for kind, args, kwargs in calls:
        whole = build_seeded(0, kind)
        expected = whole(*args, **kwargs)
        with open_accelerator() as accelerator:
            found = accelerator.prepare(build_seeded(0, kind))(*args, **kwargs)
            if isinstance(expected, tuple):
                assert abs(found[1].item() - expected[1].item()) < 1e-5 * expected[1].item()
            else:
                assert torch.allclose(found, expected, atol=1e-5)


def train_penalized_by_hand(updates: int = 3) -> Curve:
    """Train in plain PyTorch with a penalty on all weights added to each window's loss."""
    model = build_seeded(0, gpt)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (ids, targets), _ in zip(iterate_windows(8), range(updates)):
        (mean_loss(model(ids), targets) + weight_penalty(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": gather_weights(model)}


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten())


def weight_penalty(model: nn.Module) -> torch.Tensor:
    return 0.01 * sum(p.square().sum() for p in model.parameters())


def train_penalized(layout: str, updates: int = 3) -> Curve:
    """Train with the Accelerator. The penalty has its own backward call in each of two micro-batches."""
    accelerator = Accelerator(cpu=True, strategy=layout, gradient_accumulation_steps=2)
    model = build_seeded(0, gpt)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*make_rows()), batch_size=4 // accelerator.strategy.data_shard.count)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for ids, targets in loader:
        if accelerator.num_updates == updates:
            break
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model(ids), targets))
            accelerator.backward(weight_penalty(model))
            optimizer.step()
            optimizer.zero_grad()
    curve = {"weights": gather_weights(model)}
    accelerator.end_training()
    return curve


# ---------------------------------------------------------------- evaluation, masks, dropout


def check_evaluation_and_generation() -> None:
    """Check that evaluation returns whole logits for each sample once, and generation the tokens of one process.

    The sequence length is not divisible by the number of ranks.
    """
    ids = make_tokens(4, rows=5)[:, : LENGTH - 1]
    whole = build_seeded(0, llama).eval()
    with open_accelerator() as accelerator:
        model, loader = accelerator.prepare(build_seeded(0, llama), DataLoader(TensorDataset(ids), batch_size=2))
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


def check_masks() -> None:
    """Check left padding, through transformers' attention mask, and eager attention, which Headway replaces by sdpa."""
    from transformers import set_seed  # noqa: F401 - shows that transformers is installed

    ids = make_tokens(5, rows=3)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[1, :2] = 0
    labels = ids.masked_fill(mask == 0, PADDING)
    whole = build_seeded(0, llama)
    loss = whole(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    with open_accelerator() as accelerator:
        model = build_seeded(0, llama)
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


def check_dropout() -> None:
    """Check that dropout differs between ranks, and is the same when blocks are recomputed in backward."""
    from tests.distributed.layouts import GPT

    gradients = []
    for handlers in ([], [ActivationCheckpointing()]):
        with open_accelerator(kwargs_handlers=handlers) as accelerator:
            model = accelerator.prepare(build_seeded(0, lambda: GPT(dropout=0.5)))
            seen: list[torch.Tensor] = []
            model.blocks[0].dropout.register_forward_hook(lambda *given, seen=seen: seen.append(given[2] == 0))
            torch.manual_seed(7)
            accelerator.backward(model(make_tokens(6)).square().mean())
            both = accelerator.gather(seen[-1][None])  # the first calls are those of the dry run
            assert not torch.equal(both[0], both[1])
            after = accelerator.gather(torch.rand(1))
            assert after[0] == after[1]
            gradients.append([p.grad.full_tensor() for p in model.parameters()])
    for one, other in zip(*gradients):
        assert torch.equal(one, other)


# ---------------------------------------------------------------- checkpoints


def check_checkpoints(folder: str) -> None:
    """Check that checkpoints load from context parallelism into DDP and back."""
    ids = make_tokens(8)

    def train(strategy: str, load: str | None, save: str | None) -> float:
        accelerator = Accelerator(cpu=True, strategy=strategy)
        model = build_seeded(0 if load is None else 5, gpt)
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
    model = build_seeded(0, gpt)
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


class ManualAttention(nn.Module):
    """Block with attention by matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        scores = (q @ q.transpose(1, 2)).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
        return x + self.out(scores.softmax(-1) @ x)


class PositionBlock(ManualAttention):
    """Block that computes positions from the sequence length that it sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x) * torch.arange(x.shape[1])[:, None].cos()
        return x + self.out(
            functional.scaled_dot_product_attention(q[:, None], q[:, None], x[:, None], is_causal=True)[:, 0]
        )


class TrainOnlyLoss(GPTWithLoss):
    """Model that computes a loss only in training mode, so that the comparison in evaluation mode cannot see it."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        return super().forward(ids, targets) if self.training else self.gpt(ids)


class SmallModel(nn.Module):
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


def check_wrong_use() -> None:
    ids = make_tokens(9)
    with open_accelerator() as accelerator:
        with pytest.raises(
            PrepareError, match=r"blocks never call torch.nn.functional.scaled_dot_product_attention.*else use fsdp"
        ):
            accelerator.prepare(build_seeded(0, lambda: SmallModel(ManualAttention)))(ids)
    with open_accelerator() as accelerator:
        with pytest.raises(
            PrepareError, match=r"SmallModel cannot shard.*an output of the shape .* differs by .*positions"
        ):
            accelerator.prepare(build_seeded(0, lambda: SmallModel(PositionBlock)))(ids)
    with open_accelerator() as accelerator:
        with pytest.raises(
            PrepareError,
            match=r"needs one stack of blocks.*are not in one ModuleList: ManualAttention\. .*are not supported: use fsdp or tp",
        ):
            accelerator.prepare(build_seeded(0, lambda: SmallModel(ManualAttention, 2)))
    with open_accelerator() as accelerator:
        model = accelerator.prepare(build_seeded(0, llama))
        with pytest.raises(
            UnsupportedError, match=r"does not support pixel_values together with input_ids.*Use fsdp or tp"
        ):
            model(input_ids=ids, pixel_values=torch.zeros(1))
        with pytest.raises(UnsupportedError, match=r"a part of .*Llama.* was called by itself while training"):
            model.model.layers[0](torch.zeros(1, LENGTH, 16), position_embeddings=(torch.zeros(1), torch.zeros(1)))
        with pytest.raises(UnsupportedError, match="leave out use_cache and past_key_values while training"):
            model(input_ids=ids, use_cache=True)
    with open_accelerator(
        dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    ) as accelerator:
        with pytest.raises(UnsupportedError, match="is compiled, which context parallelism does not support"):
            accelerator.prepare(build_seeded(0, gpt))(ids)
    with open_accelerator() as accelerator:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            accelerator.prepare(build_seeded(0, FailingOnPart))(ids, ids)
    with open_accelerator() as accelerator:
        model = accelerator.prepare(build_seeded(0, TrainOnlyLoss))
        with pytest.raises(PrepareError, match=r"computes a loss from labels while training, but not in eval\(\) mode"):
            model(ids, ids)
    with open_accelerator(
        kwargs_handlers=[TorchContextParallelConfig(cp_comm_strategy="alltoall", blocks=("Nothing",))]
    ) as accelerator:
        with pytest.raises(ConfigError, match="blocks names 'Nothing'"):
            accelerator.prepare(build_seeded(0, llama))


def run_scenarios(folder: str) -> list[str]:
    return run_each(
        [
            check_model_loss,
            check_signatures,
            check_custom_losses,
            check_release,
            check_evaluation_and_generation,
            check_masks,
            check_dropout,
            lambda: check_checkpoints(folder),
            check_wrong_use,
        ]
    )


def run_on_two(folder: str) -> tuple[list[str], dict[str, Curve], Curve, Curve]:
    return run_scenarios(folder), curves(2), train_llama("cp"), train_penalized("cp")


def run_on_four() -> tuple[dict[str, Curve], Curve, Curve]:
    found = curves(4), train_llama("fsdp+cp=2"), train_penalized("fsdp+cp=2")
    check_rejected_combinations()
    return found


def check_rejected_combinations() -> None:
    with pytest.raises(UnsupportedError, match=r"drop loss_parallel, or cp"):
        Accelerator(cpu=True, strategy="cp=2+tp=2", kwargs_handlers=[TensorParallelOptions(loss_parallel=True)])
    with pytest.raises(UnsupportedError, match=r"'fp8' does not support context parallelism"):
        Accelerator(cpu=True, strategy="cp", mixed_precision="fp8", kwargs_handlers=[Float8Options(emulate=True)])


def compare(found: dict[str, Curve], own: Curve, penalized: Curve) -> None:
    for name, curve in found.items():
        off = measure_differences(curve, train_by_hand(TABLE[name][2]))
        assert all(off[kind] < least for kind, least in CLOSE.items()), (name, off)
    off = measure_differences(own, train_llama_by_hand())
    assert all(off[kind] < least for kind, least in CLOSE.items()), off
    for name, weight in train_penalized_by_hand()["weights"].items():
        torch.testing.assert_close(penalized["weights"][name], weight, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_two_parts_match_one_process(tmp_path: Any) -> None:
    for wrong, *rank_curves in run_ranks(run_on_two, 2, str(tmp_path), timeout=400):
        assert not wrong, wrong
    compare(*rank_curves)
    assert ROWS % 8, "the last window must be short"


@pytest.mark.slow
def test_combined_layouts_on_four_ranks_match_one_process() -> None:
    compare(*run_ranks(run_on_four, 4, timeout=400)[0])
