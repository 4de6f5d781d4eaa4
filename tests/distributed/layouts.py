"""Models, a hand-written training loop and a prepared one. Tests of layouts compare the two loops."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DataLoaderConfiguration
from headway.verify.sharded_tensors import gather_full_tensor
from tests.devices import ON_CPU

VOCABULARY, LENGTH, ROWS = 50, 12, 37
PADDING = -100


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.attention(self.first(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(rows, length, width)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.second(x)))))


class GPT(nn.Module):
    """Small GPT whose head is tied to its embedding by default."""

    def __init__(self, width: int = 16, num_blocks: int = 2, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def gpt() -> nn.Module:
    return GPT()


def gpt_frozen() -> nn.Module:
    """Return a GPT with one frozen block, one partly frozen block and frozen positions."""
    model = GPT(num_blocks=3, tied=False)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)  # type: ignore[union-attr]
    model.positions.requires_grad_(False)
    return model


class ScaledBlock(Block):
    """Block with a learned scalar that scales what the block adds."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, 0.0)
        self.gain = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * (super().forward(x) - x)


def gpt_scaled() -> nn.Module:
    """Return a GPT whose blocks and last norm have parameters without dimensions, one of which is frozen."""
    model: Any = GPT()
    model.blocks = nn.ModuleList(ScaledBlock(16, 2) for _ in range(3))
    model.blocks[0].gain.requires_grad_(False)
    return scale_norm(model)


def scale_norm(model: Any) -> nn.Module:
    """Scale the output of a GPT's last norm by a parameter without dimensions."""
    model.norm.temperature = nn.Parameter(torch.tensor(0.3))
    model.norm.register_forward_hook(lambda norm, args, output: output * norm.temperature.exp())
    scaled: nn.Module = model
    return scaled


def llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, max_position_embeddings=32, tie_word_embeddings=tied, use_cache=False, **sizes
        )
    )


def gemma() -> nn.Module:
    """Return a small Gemma 3. Its embedding is tied to the head and scaled by a buffer."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    return Gemma3ForCausalLM(
        Gemma3TextConfig(vocab_size=VOCABULARY, num_key_value_heads=1, pad_token_id=0, use_cache=False, **sizes)
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt, "gpt, dropout": lambda: GPT(dropout=0.3), "gpt, frozen": gpt_frozen, "gpt, scaled": gpt_scaled,
    "llama": llama, "llama, tied": lambda: llama(tied=True), "gpt2": gpt2, "gemma": gemma,
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """Training run that the hand-written loop and the prepared loop both execute.

    Attributes:
        model: Key of `MODELS`.
        optimizer: "adamw" in two groups, "fused" (the same with fused=True), or "sgd".
        updates: Number of updates.
        steps: Micro-batches per update.
        window: Rows per update.
        clip: Maximum gradient norm.
        precision: `mixed_precision` of the Accelerator.
        seed_by_rank: Whether each rank builds the model from its own seed.
        handlers: `kwargs_handlers` of the Accelerator.
        options: Further arguments of the Accelerator.
    """

    model: str = "gpt"
    optimizer: str = "adamw"
    updates: int = 8
    steps: int = 2
    window: int = 8
    clip: float = 0.5
    precision: str = "no"
    seed_by_rank: bool = False
    handlers: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def build_model(task: Task, rank: int = 0) -> nn.Module:
    torch.manual_seed(rank if task.seed_by_rank else 0)
    return MODELS[task.model]()


def make_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD, or AdamW in two groups: matrices have weight decay, vectors have none."""
    learning = [p for p in model.parameters() if p.requires_grad]
    if task.optimizer == "sgd":
        return torch.optim.SGD(learning, lr=0.1, momentum=0.9)
    groups = [
        {"params": [p for p in learning if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in learning if p.ndim < 2], "weight_decay": 0.0, "lr": 2e-3},
    ]
    return torch.optim.AdamW(groups, lr=5e-3, **({"fused": True} if task.optimizer == "fused" else {}))


def make_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and targets of shape (ROWS, LENGTH). Targets of each row end at a random position, followed by padding."""
    chooser = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=chooser)
    targets = ids.roll(-1, 1)
    lengths = torch.randint(2, LENGTH, (ROWS, 1), generator=chooser)
    return ids, targets.masked_fill(torch.arange(LENGTH) >= lengths, PADDING)


def sum_losses(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    out = model(ids)
    logits = out if isinstance(out, torch.Tensor) else out.logits
    return functional.cross_entropy(
        logits.float().reshape(-1, VOCABULARY), targets.reshape(-1), ignore_index=PADDING, reduction="sum"
    )


def iterate_windows(size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    ids, targets = make_rows()
    while True:
        for start in range(0, ROWS, size):
            yield ids[start : start + size], targets[start : start + size]


Curve = dict[str, Any]


def train_by_hand(task: Task) -> Curve:
    """Train with plain PyTorch on one process, with each window as one batch."""
    model = build_model(task)
    optimizer = make_optimizer(task, model)
    losses, norms = [], []
    for (ids, targets), _ in zip(iterate_windows(task.window), range(task.updates)):
        loss = sum_losses(model, ids, targets) / (targets != PADDING).sum()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), task.clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": gather_weights(model)}


def train_prepared(task: Task, layout: str) -> Curve:
    """Train with the Accelerator, with each window split into micro-batches over the ranks and steps."""
    accelerator = Accelerator(
        cpu=ON_CPU, strategy=layout, gradient_accumulation_steps=task.steps, mixed_precision=task.precision,
        dataloader_config=DataLoaderConfiguration(even_batches=False), kwargs_handlers=list(task.handlers), **task.options,
    )  # fmt: skip
    model = build_model(task, accelerator.process_index)
    optimizer = make_optimizer(task, model)
    per_step = task.window // (task.steps * accelerator.strategy.data_shard.count)
    loader = DataLoader(TensorDataset(*make_rows()), batch_size=per_step)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    curve = run_loop(accelerator, task, model, optimizer, loader)
    curve["weights"] = gather_weights(model)
    accelerator.end_training()
    return curve


def run_loop(accelerator: Accelerator, task: Task, model: nn.Module, optimizer: Any, loader: Any) -> Curve:
    losses: list[float] = []
    norms: list[float] = []
    total = weight = 0.0
    while len(losses) < task.updates:
        for ids, targets in loader:
            if len(losses) == task.updates:
                break
            if loader.mask is not None:  # mask the rows that only fill a batch up
                targets = targets.masked_fill(~loader.mask[:, None], PADDING)
            with accelerator.accumulate(model):
                num_tokens = int((targets != PADDING).sum())
                loss = sum_losses(model, ids, targets)
                accelerator.backward(loss, weight=num_tokens, reduction="sum")
                total, weight = total + loss.item(), weight + num_tokens
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), task.clip).item())
                    losses.append(float(accelerator.reduce_mean(total, weight)))
                    total = weight = 0.0
                optimizer.step()
                optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def gather_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    whole = {}
    for name, tensor in model.state_dict().items():
        tensor = gather_full_tensor(tensor.detach())
        whole[name] = (tensor if tensor.is_meta else tensor.cpu()).clone()  # type: ignore[attr-defined]
    return whole


def measure_differences(one: Curve, other: Curve) -> dict[str, float]:
    """Return the largest differences of the losses, the norms and the weights."""
    assert one["weights"].keys() == other["weights"].keys()
    found = {kind: max(abs(a - b) for a, b in zip(one[kind], other[kind], strict=True)) for kind in ("losses", "norms")}
    found["weights"] = max(float((one["weights"][n] - w).abs().max()) for n, w in other["weights"].items())
    return found


def start_fsdp(**options: Any) -> Accelerator:
    return Accelerator(cpu=ON_CPU, strategy="fsdp", **options)


def make_tokens(seed: int = 1, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def build_seeded(seed: int, make: Callable[[], Any]) -> Any:
    torch.manual_seed(seed)
    return make()


def mean_square(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    device = next(p.device for p in model.parameters() if not p.is_meta)
    return model(ids.to(device)).float().square().mean()  # type: ignore[no-any-return]


def measure_norm(accelerator: Accelerator, model: nn.Module) -> float:
    return float(accelerator.clip_grad_norm_(model.parameters(), 1e9))


def run_each(functions: Sequence[Callable[[], None]], only: str = "") -> list[str]:
    """Call functions in turn in one group of processes, and return the first failure with its function's name.

    Args:
        functions: Functions to call.
        only: Substring of the names to call. Default: all.
    """
    for function in functions:
        if only in function.__name__:
            try:
                function()
            except Exception as error:  # ranks may be out of step now, so nothing else can run
                return [f"{function.__name__}: {error!r}\n{traceback.format_exc(limit=-3)}"]
    return []
