"""Compiled models under DDP and FSDP match plain PyTorch with various options, and share checkpoints with uncompiled models."""

import copy
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway import (
    Accelerator,
    ActivationCheckpointing,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    TorchDynamoPlugin,
)
from tests.distributed.ranks import run_ranks


class Block(torch.nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.wide, self.norm = torch.nn.Linear(width, width), torch.nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.wide(x)))


class Net(torch.nn.Module):
    def __init__(self, has_unused: bool = False) -> None:
        super().__init__()
        self.start, self.head = torch.nn.Linear(4, 16), torch.nn.Linear(16, 1)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.register_buffer("seen", torch.zeros(()))
        if has_unused:
            self.unused = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


STEPS, SIZE = 2, 4
RAGGED = 37
"""Number of rows. The last window has four rows on one rank and one on the other."""


def make_data(num_rows: int) -> TensorDataset:
    torch.manual_seed(5)
    return TensorDataset(torch.randn(num_rows, 4), torch.randn(num_rows, 1))


def train_by_hand(num_rows: int, has_unused: bool = False) -> tuple[list[float], list[torch.Tensor]]:
    """Train in one process, with each window of all ranks' rows as one batch and clipped gradients. Return norms and weights."""
    torch.manual_seed(0)
    net = Net(has_unused)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    x, y = make_data(num_rows).tensors
    norms = []
    for begin in range(0, num_rows, STEPS * SIZE * 2):
        rows = slice(begin, begin + STEPS * SIZE * 2)
        mse_loss(net(x[rows]), y[rows]).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, [p.detach().clone() for p in net.parameters()]


def train_compiled(plugin: TorchDynamoPlugin, num_rows: int, has_unused: bool = False, **options: Any) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    loading = DataLoaderConfiguration(
        even_batches=False
    )  # the last window has four rows on one rank and one on the other
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=STEPS, dynamo_plugin=plugin, dataloader_config=loading, **options
    )
    torch.manual_seed(0)
    net = Net(has_unused)
    names = list(net.state_dict())
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), 1e-2), DataLoader(make_data(num_rows), batch_size=SIZE)
    )
    assert model is net
    norms = []
    for x, y in loader:
        if options.get("microbatching"):
            accelerator.forward_backward((x, y), lambda piece: mse_loss(model(piece[0]), piece[1]))
        else:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y))
        if accelerator.sync_gradients:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(torch.zeros(SIZE, 4))
    held = list(accelerator.get_state_dict(model))  # for a sharded model, only rank 0 has the state
    assert held == (names if "strategy" not in options or accelerator.is_main_process else [])
    is_sharded = "strategy" in options
    if not is_sharded:
        assert type(copy.deepcopy(model)) is Net
    found = (
        norms,
        [] if is_sharded else [p.detach().clone() for p in model.parameters()],
        torch._dynamo.utils.counters["stats"]["unique_graphs"],
    )
    accelerator.free_memory()
    return found


KINDS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "static graph": {"kwargs_handlers": [DistributedDataParallelKwargs(static_graph=True)]},
    "unused": {"has_unused": True, "kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]},
    "views": {"kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]},
    "checkpointed": {"kwargs_handlers": [ActivationCheckpointing()]},
    "in pieces": {"microbatching": "auto"},
}


def count_rows(name: str) -> int:
    """Return the number of rows for a kind. Only one kind uses ragged windows, because they need another slow compilation."""
    return RAGGED if name == "as it is" else 32


def train_all_kinds(regional: bool) -> dict[str, Any]:
    plugin = TorchDynamoPlugin("aot_eager", use_regional_compilation=regional)
    return {name: train_compiled(plugin, count_rows(name), **options) for name, options in KINDS.items()}


@pytest.mark.parametrize("regional", [True, False])
def test_compiled_models_match_plain_pytorch_on_two_ranks(regional: bool) -> None:
    for by_kind in run_ranks(train_all_kinds, 2, regional, timeout=300):
        for name, (norms, weights, num_graphs) in by_kind.items():
            expected_norms, expected = train_by_hand(count_rows(name), has_unused=name == "unused")
            assert norms == pytest.approx(expected_norms, rel=5e-7, abs=2e-6), name
            for one, other in zip(weights, expected):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6, msg=name)
            # Compilations: whole batches, dynamic sizes, evaluation, and a last batch of one row.
            assert 1 <= num_graphs <= 4, (name, num_graphs)


def train_or_resume(
    plugin: TorchDynamoPlugin | None, save_to: str | None = None, load_from: str | None = None
) -> list[float]:
    torch._dynamo.reset()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS, dynamo_plugin=plugin)
    torch.manual_seed(0)
    net = Net()
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), 1e-2), DataLoader(make_data(32), batch_size=SIZE, shuffle=True)
    )
    if load_from is not None:
        accelerator.load_state(load_from)
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if save_to is not None and len(losses) == 2:
            accelerator.save_state(save_to)
    accelerator.free_memory()
    return losses


def run_all(folder: str) -> list[list[float]]:
    """Return losses of an uncompiled run, of two compiled runs, and of a compiled and an uncompiled run from a checkpoint."""
    regional, whole = TorchDynamoPlugin("aot_eager", use_regional_compilation=True), TorchDynamoPlugin("aot_eager")
    straight = [train_or_resume(None), train_or_resume(regional, save_to=folder), train_or_resume(whole)]
    return [*straight, train_or_resume(regional, load_from=folder), train_or_resume(None, load_from=folder)]


def test_compiled_run_resumes_bit_for_bit_and_uncompiled_run_continues_it(tmp_path: Any) -> None:
    for uncompiled, regional, whole, resumed, resumed_uncompiled in run_ranks(
        run_all, 2, str(tmp_path / "saved"), timeout=300
    ):
        assert regional == pytest.approx(uncompiled, abs=2e-6)
        assert whole == pytest.approx(uncompiled, abs=2e-6)
        assert resumed == regional[2:]
        assert resumed_uncompiled == pytest.approx(regional[2:], abs=2e-6)


def train_sharded() -> dict[str, Any]:
    """Train with each way of compiling under FSDP2. Return the norms and the number of graphs."""
    regional = TorchDynamoPlugin("aot_eager", use_regional_compilation=True)
    whole = TorchDynamoPlugin("aot_eager", use_regional_compilation=True, fullgraph=True)
    checkpointing: dict[str, Any] = {"kwargs_handlers": [ActivationCheckpointing()]}
    return {
        "by regions": train_compiled(regional, 32, strategy="fsdp"),
        "one graph each": train_compiled(whole, 32, strategy="fsdp"),
        "checkpointed": train_compiled(whole, 32, strategy="fsdp", **checkpointing),
        "whole": train_compiled(TorchDynamoPlugin("aot_eager"), 32, strategy="fsdp"),
        "bf16": train_compiled(regional, 32, strategy="fsdp", mixed_precision="bf16"),
        "bf16, not compiled": train_compiled(TorchDynamoPlugin(), 32, strategy="fsdp", mixed_precision="bf16"),
    }


def test_sharded_models_compile_block_by_block() -> None:
    for found in run_ranks(train_sharded, 2, timeout=300):
        expected, _ = train_by_hand(32)
        for name in ("by regions", "one graph each", "checkpointed", "whole"):
            norms, _, num_graphs = found[name]
            assert norms == pytest.approx(expected, rel=5e-7, abs=2e-6), name
            assert num_graphs == 2, name  # one for training, one for evaluation
        assert found["bf16"][0] == pytest.approx(found["bf16, not compiled"][0], abs=2e-2)
        assert found["bf16"][2] > 0
        assert found["bf16, not compiled"][2] == 0


def make_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes))  # type: ignore[arg-type]


def train_split() -> list[float]:
    """Train a compiled Llama under tensor parallelism, and raise an error at the limit of recompilations. Return the losses."""
    import torch._dynamo  # not part of `import torch`

    torch._dynamo.config.fail_on_recompile_limit_hit = True
    accelerator = Accelerator(cpu=True, strategy="tp")
    model = make_llama()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.compile(backend="aot_eager")
    losses = []
    for _ in range(3):
        with accelerator.accumulate(model):
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


TOKENS = torch.arange(32).reshape(2, 16)


def test_split_model_does_not_reach_the_limit_of_recompilations() -> None:
    model = make_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    for losses in run_ranks(train_split, 2, timeout=300):
        assert losses == pytest.approx(expected, rel=1e-5)
