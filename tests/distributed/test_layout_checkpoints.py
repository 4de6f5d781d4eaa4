"""A run saved in mid-epoch under one layout goes on under any other, on any number of ranks, as if it had never been stopped."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.distributed.ranks import run_ranks

pytest.importorskip("transformers", reason="the model is a transformers Llama, whose own plan cuts it")

SAVED = {4: ("fsdp", "hsdp=2", "fsdp+tp=2", "ddp"), 2: ("tp",)}
LOADED = {4: ("fsdp", "hsdp=2", "fsdp+tp=2", "ddp"), 3: ("fsdp",), 2: ("fsdp", "tp", "ddp"), 1: ("ddp",)}
BEHIND = ("fsdp", "fsdp+tp=2")  # saved behind the loop; the others in step
ROWS, WINDOW, UPDATES, STOP = 60, 12, 8, 3  # an epoch has five updates


class Rows(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return (index + (1 + index % 2) * torch.arange(9)) % 37


def built():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.model.norm.weight.requires_grad_(False)
    return model


def train(layout, load=None, save=None, is_behind=False):
    """The losses of the updates that this run makes; with `save` it stops where it has saved, with `load` it goes on from there."""
    from headway import Accelerator, set_seed

    set_seed(1)
    accelerator = Accelerator(cpu=True, strategy=layout, scheduler_ticks="updates")
    model = built()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.03)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    loader = DataLoader(Rows(), batch_size=WINDOW // accelerator.strategy.data_shard.count, shuffle=True)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    torch.manual_seed(2)  # a layout may have drawn from the stream that the loader's seed comes from
    loader = accelerator.prepare(loader)
    told, losses = [], []
    if load is not None:
        told = accelerator.resume(load).differences
    for _ in accelerator.epochs(2):
        for ids in loader:
            with accelerator.accumulate(model):
                loss = model(ids, labels=ids).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            if save is not None and accelerator.num_updates == STOP:
                accelerator.save_state(save, blocking=not is_behind)
                if not is_behind:
                    accelerator.free_memory()
                    return losses, told
            if save is not None and accelerator.num_updates == STOP + 1:  # it has learned while that was written
                accelerator.wait_for_save()
                accelerator.free_memory()
                return losses, told
            if accelerator.num_updates == UPDATES:
                accelerator.free_memory()
                return losses, told
    raise AssertionError("the epochs were too short")


def save_all(folder, layouts):
    for layout in layouts:
        train(layout, save=str(Path(folder, layout)), is_behind=layout in BEHIND)


def load_all(folder, layouts):
    return {
        (source.name, layout): train(layout, load=str(source))
        for source in sorted(Path(folder).iterdir())
        if source.is_dir()
        for layout in layouts
    }


def test_every_layout_goes_on_from_every_other(tmp_path):
    for world_size, layouts in SAVED.items():
        run_ranks(save_all, world_size, str(tmp_path), layouts, timeout=400)
    ((whole, _),) = run_ranks(train, 1, "ddp")
    assert len(whole) == UPDATES
    assert max(whole) - min(whole) > 0.1  # it learns
    for world_size, layouts in LOADED.items():
        for found in run_ranks(load_all, world_size, str(tmp_path), layouts, timeout=400):
            assert len(found) == 5 * len(layouts)
            for (before, layout), (losses, told) in found.items():
                differences = [abs(one - other) for one, other in zip(losses, whole[STOP:], strict=True)]
                assert max(differences) < 2e-5, (before, layout, world_size, losses, whole)
                is_alike = before == layout and world_size == (2 if before == "tp" else 4)
                assert any(line.startswith("layout ") for line in told) == (
                    not is_alike and {before, layout} != {"ddp"}
                ), told
