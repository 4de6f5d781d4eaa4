"""Checkpoints under DeepSpeed ZeRO: each rank writes its own parts, and every layout can load them."""

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator, DeepSpeedPlugin
from headway.common.optional import is_available
from headway.errors import CheckpointError
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not is_available("deepspeed"), reason="deepspeed is not installed: pip install deepspeed"
)

BEFORE, AFTER = 3, 4
LAYOUTS = ("zero1", "zero2", "zero3", "offload", "ddp")


class Net(nn.Module):
    """Model with tied weights, a frozen layer, a buffer, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 7), nn.Linear(7, 11, bias=False)
        self.head.weight = self.words.weight
        self.body, self.fixed = nn.Linear(7, 7), nn.Linear(7, 7)
        self.fixed.requires_grad_(False)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.words(x)) + self.fixed(self.words(x))) * self.scale.mean())


def prepare_training(layout: str, is_split: bool = False) -> tuple[Accelerator, Any, Any, Any]:
    zero = {"stage": 2 if layout == "offload" else int(layout[-1]) if layout != "ddp" else 0}
    config: dict[str, Any] = {"zero_optimization": {**zero, "stage3_param_persistence_threshold": 10}}
    if layout == "offload":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    plugin = None if layout == "ddp" else DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, scheduler_ticks="updates")
    torch.manual_seed(accelerator.process_index)  # different weights per rank, so the load must restore all of them
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[Any] = [{"params": trained[:1]}, {"params": trained[1:]}] if is_split else trained
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return accelerator, *accelerator.prepare(model, optimizer, schedule)


def train(parts: tuple[Accelerator, Any, Any, Any], first: int, count: int) -> list[float]:
    accelerator, model, optimizer, schedule = parts
    losses = []
    for number in range(first, first + count):
        every = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(number))
        size = 4 // accelerator.num_processes
        x = every[accelerator.process_index * size :][:size]
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def save(folder: str) -> dict[str, Any]:
    """Save in every layout after a few updates, and continue training."""
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        try:
            parts = prepare_training(layout)
            train(parts, 0, BEFORE)
            parts[0].save_state(f"{folder}/{layout}")
            parts[0].save_model(parts[1], f"{folder}/{layout}_model")
            found[layout] = train(parts, BEFORE, AFTER)
            parts[0].free_memory()
        except Exception:
            found[layout] = traceback.format_exc()
    return found


def load(folder: str) -> dict[str, Any]:
    """Load checkpoints of other layouts in every layout, and continue training."""
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        for source in LAYOUTS:
            if source not in (layout, "ddp") and layout not in ("ddp", "zero3"):
                continue
            try:
                parts = prepare_training(layout)
                parts[0].load_state(f"{folder}/{source}")
                found[f"{source} -> {layout}"] = train(parts, BEFORE, AFTER)
                parts[0].free_memory()
            except Exception:
                found[f"{source} -> {layout}"] = traceback.format_exc()
    return found


def regroup(folder: str) -> dict[str, Any]:
    """Load each layout's checkpoint with two parameter groups instead of one, first without and then with permission."""
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        try:
            parts = prepare_training(layout, is_split=True)
            with pytest.raises(CheckpointError) as error:
                parts[0].load_state(f"{folder}/{layout}")
            restored = parts[0].load_state(f"{folder}/{layout}", changed="groups")
            rates = [group["lr"] for group in parts[2].param_groups]
            found[layout] = str(error.value), restored.differences, rates, train(parts, BEFORE, AFTER)
            parts[0].free_memory()
        except Exception:
            found[layout] = traceback.format_exc()
    return found


def load_on_one_process(folder: str) -> dict[str, Any]:
    """Load the checkpoint of every layout on one process with DDP, and continue training."""
    found: dict[str, Any] = {}
    for source in LAYOUTS:
        parts = prepare_training("ddp")
        parts[0].load_state(f"{folder}/{source}")
        found[source] = train(parts, BEFORE, AFTER)
        parts[0].free_memory()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def saved(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(save, 2, str(folder), timeout=500)


def assert_close(found: Any, expected: Any) -> None:
    assert isinstance(found, list), found
    assert max(abs(a - b) for a, b in zip(found, expected)) < 5e-6, (found, expected)


def test_each_layout_continues_like_ddp(saved: list[dict[str, Any]]) -> None:
    for rank in saved:
        for layout in LAYOUTS:
            assert_close(rank[layout], saved[0]["ddp"])


def test_layouts_load_checkpoints_of_others(saved: list[dict[str, Any]], folder: Path) -> None:
    assert isinstance(saved[0]["ddp"], list), saved[0]["ddp"]
    for rank in run_ranks(load, 2, str(folder), timeout=580):
        for name, found in rank.items():
            assert isinstance(found, list), f"{name}: {found}"
            assert_close(found, saved[0]["ddp"])


def test_one_process_loads_all_checkpoints(saved: list[dict[str, Any]], folder: Path) -> None:
    for found in run_ranks(load_on_one_process, 1, str(folder), timeout=300)[0].values():
        assert_close(found, saved[0]["ddp"])


def test_changed_groups_keep_the_states_of_their_parameters(saved: list[dict[str, Any]], folder: Path) -> None:
    for found in run_ranks(regroup, 2, str(folder), timeout=500):
        for layout in LAYOUTS:
            assert isinstance(found[layout], tuple), found[layout]
            error, differences, rates, losses = found[layout]
            assert "changed='groups'" in error
            assert "their number is 2 instead of 1" in error
            assert sum("keeps the options of the script" in line for line in differences) == 2
            assert rates == pytest.approx([0.025, 0.025])  # the schedule halved them before the save
            assert_close(losses, saved[0]["ddp"])


def test_each_rank_writes_its_own_part_once(saved: list[dict[str, Any]], folder: Path) -> None:
    """Check that stage 3's files have as many elements as DDP's, and that no file has much more than half of them."""
    from safetensors import safe_open

    def count_elements(layout: str) -> list[int]:
        counts = []
        for path in sorted((folder / layout).rglob("*.safetensors")):
            with safe_open(path, "pt") as file:
                names = [name for name in file.keys() if name.startswith(("model/", "optimizer/"))]  # noqa: SIM118
                counts.append(sum(file.get_tensor(name).numel() for name in names if "/step" not in name))
        return counts

    parts, whole = count_elements("zero3"), count_elements("ddp")
    assert sum(parts) == sum(whole) > 0
    assert max(parts) < 0.6 * sum(parts)


def test_save_model_writes_whole_weights(saved: list[dict[str, Any]], folder: Path) -> None:
    from safetensors.torch import load_file

    expected = load_file(folder / "ddp_model" / "model.safetensors")
    for layout in LAYOUTS:
        found = load_file(folder / f"{layout}_model" / "model.safetensors")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(found[name], value, atol=1e-5), name
