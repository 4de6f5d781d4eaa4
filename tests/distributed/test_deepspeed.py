"""DeepSpeed ZeRO compared with a plain loop on one process: losses, norms and weights."""

import traceback
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, DummyOptim, DummyScheduler
from headway.common.optional import is_available
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not is_available("deepspeed"), reason="deepspeed is not installed: pip install deepspeed"
)

WORDS, LENGTH, WIDTH = 23, 12, 16
ROWS, BATCH, STEPS, EPOCHS = 37, 4, 2, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH),
        )
        self.up, self.down, self.norm2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, tied: bool = True, frozen: bool = True) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.places.weight.requires_grad_(not frozen)
        nn.init.normal_(self.words.weight, std=0.3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Bare(LlamaForCausalLM):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids=ids, use_cache=False).logits

    return Bare(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=True, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    strategy: str = "zero2"
    config: Any = None
    precision: str = "no"
    model: str = "gpt"
    epochs: int = EPOCHS
    scheduler: bool = True
    seed_by_rank: bool = False
    by_json: bool = False
    like: str = ""  # name of the row to compare with, instead of plain PyTorch
    tolerance: float = 2e-6


def make_schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + 0.1 * n))


def make_parts(recipe: Recipe, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any, torch.Tensor]:
    torch.manual_seed(seed)
    model = llama() if recipe.model == "llama" else GPT()
    learns = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learns if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in learns if p.ndim < 2], "weight_decay": 0.0, "lr": 5e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = make_schedule(optimizer) if recipe.scheduler else None
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WORDS, (ROWS, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=generator)
    ids[torch.arange(LENGTH)[None] >= lengths] = 0  # padding, which has no weight in the loss
    return model, optimizer, schedule, ids


def compute_token_loss(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    targets = ids[:, 1:].flatten()
    losses = cross_entropy(model(ids)[:, :-1].flatten(0, 1).float(), targets, reduction="none")
    real = targets != 0
    return losses[real].sum(), int(real.sum())


def train_by_hand(recipe: Recipe) -> dict[str, Any]:
    model, optimizer, schedule, ids = make_parts(recipe)
    losses, norms = [], []
    for _ in range(recipe.epochs):
        for start in range(0, ROWS, BATCH * STEPS):
            total, count = compute_token_loss(model, ids[start : start + BATCH * STEPS])
            (total / count).backward()
            losses.append(total.item() / count)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
    return {"losses": losses, "norms": norms, "weights": {n: p.detach().clone() for n, p in model.named_parameters()}}


def train_with_deepspeed(recipe: Recipe) -> dict[str, Any]:
    plugin = None if recipe.config is None else DeepSpeedPlugin(hf_ds_config=recipe.config)
    accelerator = Accelerator(
        cpu=True, strategy=None if plugin else recipe.strategy, deepspeed_plugin=plugin, gradient_accumulation_steps=STEPS,
        mixed_precision=recipe.precision, dataloader_config=DataLoaderConfiguration(even_batches=False),
        scheduler_ticks="updates",
    )  # fmt: skip
    if recipe.precision == "fp16":
        from deepspeed import get_accelerator

        # DeepSpeed rejects float16 on CPUs because it is slow there, but computes the same.
        get_accelerator().is_fp16_supported = lambda: True
    model, optimizer, schedule, ids = make_parts(recipe, accelerator.process_index if recipe.seed_by_rank else 0)
    loader = DataLoader(TensorDataset(ids), batch_size=BATCH // accelerator.num_processes)
    given = model
    if recipe.by_json:
        optimizer = DummyOptim(optimizer.param_groups)
        schedule = DummyScheduler(optimizer, lr_scheduler_callable=make_schedule)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    assert model is given
    losses, norms, part = [], [], [0.0, 0.0]
    for _ in range(recipe.epochs):
        for (batch,) in loader:
            with accelerator.accumulate(model):
                rows = batch if loader.mask is None else batch[loader.mask]
                if len(rows):
                    total, count = compute_token_loss(model, rows)
                else:
                    total, count = compute_token_loss(model, batch)[0] * 0, 0
                accelerator.backward(total, weight=count, reduction="sum")
                part = [part[0] + total.item(), part[1] + count]
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                    losses.append(float(accelerator.reduce_mean(*part)))
                    part = [0.0, 0.0]
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                optimizer.zero_grad()
    assert accelerator.num_updates == len(losses)
    weights = accelerator.get_state_dict(model)
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    accelerator.free_memory()
    return {"losses": losses, "norms": norms, "weights": weights}


def measure_differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    assert len(found["losses"]) == len(expected["losses"])
    return {
        "losses": max(abs(a - b) for a, b in zip(found["losses"], expected["losses"])),
        "norms": max(abs(a - b) for a, b in zip(found["norms"], expected["norms"])),
        # Only rank 0 has whole weights.
        "weights": max(
            (float((found["weights"][n] - w).abs().max()) for n, w in expected["weights"].items() if found["weights"]),
            default=0.0,
        ),
    }


OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
OFFLOAD_TORCH = {**OFFLOAD, "zero_force_ds_cpu_optimizer": False}
OFFLOAD_ALL = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
                          "stage3_param_persistence_threshold": 0},
}  # fmt: skip
SMALL_BUCKETS = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 300, "stage3_prefetch_bucket_size": 200,
                                       "stage3_param_persistence_threshold": 20}}  # fmt: skip
BY_JSON = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999]}},
    "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
}


def fp16(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "fp16": {"enabled": "auto", "initial_scale_power": 7}}


TABLE = {
    "zero1": Recipe(strategy="zero1"),
    "zero2": Recipe(strategy="zero2"),
    "zero3": Recipe(strategy="zero3"),
    "zero3, small buckets": Recipe(config=SMALL_BUCKETS),
    "zero3, llama": Recipe(strategy="zero3", model="llama"),
    "zero2, other seeds": Recipe(seed_by_rank=True),
    "zero2, offload by DeepSpeed's Adam": Recipe(config=OFFLOAD, tolerance=5e-5),  # DeepSpeed's own kernel
    "zero2, offload by torch's": Recipe(config=OFFLOAD_TORCH),
    "zero2, all by its JSON": Recipe(config=BY_JSON, by_json=True),
    "ddp, bf16": Recipe(strategy="ddp", precision="bf16", tolerance=5e-2),
    "zero1, bf16": Recipe(strategy="zero1", precision="bf16", like="ddp, bf16", tolerance=2e-2),
    "zero2, bf16": Recipe(strategy="zero2", precision="bf16", like="ddp, bf16", tolerance=1e-2),
    "zero3, bf16": Recipe(strategy="zero3", precision="bf16", like="ddp, bf16", tolerance=1e-2),
    "zero2, fp16": Recipe(config=fp16(2), precision="fp16", epochs=1, tolerance=1e-2),
    "zero3, fp16": Recipe(config=fp16(3), precision="fp16", epochs=1, tolerance=1e-2),
    "zero3, all offloaded": Recipe(config=OFFLOAD_ALL, tolerance=5e-5),
}


def train_each(recipes: list[Recipe]) -> list[Any]:
    found = []
    for recipe in recipes:
        try:
            found.append(train_with_deepspeed(recipe))
        except Exception:
            found.append(traceback.format_exc())
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    """Return the results of each rank by row name. DeepSpeed starts slowly, so all rows share one pair of processes."""
    by_rank = run_ranks(train_each, 2, list(TABLE.values()), timeout=500)
    return {name: [found[i] for found in by_rank] for i, name in enumerate(TABLE)}


@pytest.mark.parametrize("name", TABLE)
def test_training_matches_the_plain_loop(name: str, results: dict[str, list[Any]]) -> None:
    expected = results[TABLE[name].like][0] if TABLE[name].like else train_by_hand(TABLE[name])
    assert results[name][0]["weights"].keys() >= expected["weights"].keys()  # tied weights have both names
    for found in results[name]:
        assert isinstance(found, dict), found
        differences = measure_differences(found, expected)
        print(name, differences)
        assert max(differences["losses"], differences["norms"]) < TABLE[name].tolerance, differences
        if TABLE[name].precision == "no":
            assert differences["weights"] < 1e-5, differences
