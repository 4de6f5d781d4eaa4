"""Pretrained weights read straight into shards: bit-equal to loading whole, each rank its own part, once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from headway import Accelerator
from headway.errors import CheckpointError
from tests.devices import ON_CPU
from tests.distributed.layouts import VOCABULARY, gpt2, seeded, text, whole_weights
from tests.distributed.ranks import run_ranks


def mixtral() -> nn.Module:
    """Its experts are stored one by one, and stacked by transformers' conversion."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=50, num_key_value_heads=1, num_local_experts=4, use_cache=False, **sizes)
    )


def pairs_of_heads(tied: bool, **others: int) -> nn.Module:
    """A Llama whose attention two ranks can share."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2} | others
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=tied, use_cache=False, **sizes))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: pairs_of_heads(False), "llama, tied": lambda: pairs_of_heads(True), "gpt2": gpt2, "mixtral": mixtral,
}  # fmt: skip
LAYOUTS = ("ddp", "fsdp", "hsdp=2", "tp=2", "fsdp+tp=2", "cp=2")


def without_memory(make: Any, is_lazy: bool = True) -> nn.Module:
    with torch.device("meta" if is_lazy else "cpu"):
        model: nn.Module = make()
    return model


def load(folder: str, layout: str) -> list[str]:
    """Before prepare, after it, and from rank 0's memory; each is compared with a whole load."""
    failed = []
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    for name, make in MODELS.items():
        if "llama" not in name and "tp" in layout:
            continue  # transformers has no plan for it, or none that two ranks can follow
        wanted = type(make()).from_pretrained(Path(folder, name)).state_dict()
        for way in ("before", "after", "rank 0"):
            model = without_memory(make, way != "after" and (way != "rank 0" or accelerator.process_index > 0))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if way == "before":
                accelerator.load_weights(model, Path(folder, name))
            if way == "rank 0" and accelerator.process_index == 0:
                model.load_state_dict(wanted)
            model, optimizer = accelerator.prepare(model, optimizer)
            if way == "after":
                accelerator.load_weights(model, Path(folder, name))
            found = whole_weights(model)
            differing = [key for key in wanted if not torch.equal(found[key], wanted[key])]
            if differing or found.keys() != wanted.keys():
                failed.append(f"{layout}, {name}, {way}: {differing[:3]}")
            loss = model(text()).logits.square().mean()
            accelerator.backward(loss)
            optimizer.step()
            if not bool(torch.isfinite(accelerator.gather(loss.detach()[None])).all()):
                failed.append(f"{layout}, {name}, {way}: {loss}")
            accelerator.free_memory()
    return failed


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [each if each in ("hsdp=2", "fsdp+tp=2") else pytest.param(each, marks=pytest.mark.matrix) for each in LAYOUTS],
)
def test_every_layout(tmp_path, layout):
    for name, make in MODELS.items():
        seeded(0, make).save_pretrained(tmp_path / name)
    num_ranks = 4 if "+" in layout or layout == "hsdp=2" else 2
    for failed in run_ranks(load, num_ranks, str(tmp_path), layout, timeout=240):
        assert not failed, failed


class Stack(nn.Module):
    """Blocks of one matrix each, the units of sharding."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width, bias=False)) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def seen(file: str, key: str) -> int:
    line = next(line for line in Path("/proc/self", file).read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * (1024 if file == "status" else 1)


def write_stack(folder: str, width: int, num_blocks: int) -> None:
    """A checkpoint of it, a file for each block."""
    for number in range(num_blocks):
        value = torch.full((width, width), float(number))
        save_file({f"blocks.{number}.0.weight": value}, Path(folder, f"{number}.safetensors"))
    names = {f"blocks.{number}.0.weight": f"{number}.safetensors" for number in range(num_blocks)}
    Path(folder, "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def measured(folder: str, width: int, num_blocks: int) -> dict[str, int]:
    """Bytes of this rank's part, those it has read, and its memory's peak above what it had before."""
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    accelerator.prepare(Stack(4, 2))  # what is imported and allocated once
    accelerator.free_memory()
    with torch.device("meta"):
        model = Stack(width, num_blocks)
    Path("/proc/self/clear_refs").write_text("5")
    before, num_read = seen("status", "VmRSS"), seen("io", "rchar")
    accelerator.load_weights(model, folder)
    accelerator.prepare(model)
    part = sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]
    return {"part": part, "read": seen("io", "rchar") - num_read, "peak": seen("status", "VmHWM") - before}


def test_each_rank_reads_its_part_once_and_holds_no_more(tmp_path):
    width, num_blocks = 1024, 24
    unit = 4 * width * width
    write_stack(str(tmp_path), width, num_blocks)
    for num_ranks in (2, 8):  # so that 8 ranks of a machine hold one copy together
        for found in run_ranks(measured, num_ranks, str(tmp_path), width, num_blocks, timeout=240):
            assert found["part"] == unit * num_blocks // num_ranks
            assert found["read"] <= 1.1 * found["part"], found
            assert found["peak"] <= found["part"] + 1.1 * unit, found


def refused(folder: str) -> list[str]:
    accelerator = Accelerator(cpu=ON_CPU, strategy="fsdp")
    messages = []
    save_file({"0.weight": torch.ones(4, 3)}, Path(folder, f"of_{accelerator.process_index}.safetensors"))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3))
    accelerator.wait_for_everyone()
    for source in ("of_0.safetensors", "nothing"):
        with pytest.raises(CheckpointError) as error:
            accelerator.load_weights(model, Path(folder, source))
        messages.append(str(error.value))
    # A part of a model: the rest initializes itself.
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2))
    model = accelerator.prepare(model)
    Path(folder, "more").mkdir(exist_ok=True)
    tensors = {"weight": torch.full((4, 3), 7.0), **({"b": torch.ones(1)} if accelerator.process_index else {})}
    save_file(tensors, Path(folder, "more", f"{accelerator.process_index}.safetensors"))
    with pytest.raises(CheckpointError, match="contains other tensors on some ranks"):
        accelerator.load_weights(model[0], Path(folder, "more", f"{accelerator.process_index}.safetensors"))
    accelerator.load_weights(model[0], Path(folder, "more", "0.safetensors"))
    assert torch.equal(whole_weights(model)["0.weight"], torch.full((4, 3), 7.0))
    # A file that is gone on one rank when its turn comes: an error on all.
    accelerator.free_memory()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4, bias=False))
    own = Path(folder, f"own_{accelerator.process_index}.safetensors")
    save_file({"0.weight": torch.ones(4, 3)}, own)
    accelerator.load_weights(model, own)
    accelerator.wait_for_everyone()
    if accelerator.process_index:
        own.unlink()
    with pytest.raises(CheckpointError, match=r"could not be read completely.*own_1\.safetensors cannot be read"):
        accelerator.prepare(model)
    return messages


def test_what_does_not_fit_is_an_error_on_every_rank(tmp_path):
    for misfit, absent in run_ranks(refused, 2, str(tmp_path)):
        assert "Mismatched (1): 0.weight" in misfit
        assert "Missing from the checkpoint (1): 0.bias" in misfit
        assert "nothing does not exist" in absent
