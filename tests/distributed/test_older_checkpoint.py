"""Resume from an older checkpoint if the newest one is damaged, on two ranks, wherever the damage is."""

from pathlib import Path

import pytest
import torch

from headway import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration
from headway.errors import CheckpointError
from tests.distributed.ranks import run_ranks

HEADER_LENGTH = 8
"""Bytes of a safetensors file that precede the header and hold its length."""

PLACES = ("value", "header", "header length", "cut", "removed", "folder")
"""Ways to damage a file: flip a bit in one of three places, cut it, remove it, or replace it by a folder."""


def build(folder, layout):
    """Return an Accelerator, a prepared model and its optimizer. Checkpoints are named automatically."""
    torch.manual_seed(0)
    plugin = FullyShardedDataParallelPlugin() if layout == "fsdp" else None
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project, fsdp_plugin=plugin)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4))
    return accelerator, *accelerator.prepare(model, torch.optim.Adam(model.parameters(), 0.1))


def train(accelerator, model, optimizer):
    """Make one update."""
    accelerator.backward(model(torch.ones(2, 6)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def read_weights(accelerator, model):
    """Return the full weights."""
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def harm(path, place):
    """Damage a file in one of the ways of `PLACES`."""
    content = bytearray(path.read_bytes())
    if place == "header":
        content[HEADER_LENGTH + 1] ^= 1
    elif place == "header length":
        content[0] ^= 1
    elif place == "value":
        content[-3] ^= 1
    elif place == "cut":
        del content[-4:]
    path.unlink()
    if place == "folder":
        path.mkdir()
    elif place != "removed":
        path.write_bytes(bytes(content))


def damage_newest(folder, layout, file, place):
    """Save twice, damage a file of the newer checkpoint, and return (weights of the older one, folder of the newer)."""
    accelerator, model, optimizer = build(folder, layout)
    train(accelerator, model, optimizer)
    accelerator.save_state()
    saved = read_weights(accelerator, model)
    train(accelerator, model, optimizer)
    newer = accelerator.save_state()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        [damaged] = newer.glob(file)
        harm(damaged, place)
    accelerator.wait_for_everyone()
    return saved, newer


def load_past_damage(folder, layout, file, place):
    """Load after the newest checkpoint was damaged. Return what was loaded, as a list of short texts."""
    saved, newer = damage_newest(folder, layout, file, place)
    lines = [place]
    for load in (lambda each: each.resume("latest"), lambda each: each.load_state()):
        accelerator, model, optimizer = build(folder, layout)
        restored = load(accelerator)
        is_equal = are_equal(read_weights(accelerator, model), saved)
        lines.append(f"{restored.folder.name} {'equal' if is_equal else 'other weights'}")
        train(accelerator, model, optimizer)
    accelerator, model, optimizer = build(folder, layout)
    before = read_weights(accelerator, model)
    try:
        accelerator.load_state(newer)
    except CheckpointError as error:
        lines.append("refused" if newer.name in str(error) else str(error))
    lines.append("unchanged" if are_equal(before, read_weights(accelerator, model)) else "changed")
    return lines


def are_equal(one, other):
    """Whether two dicts hold equal tensors under equal names."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def load_past_each_damage(folder, layout, file, places):
    """Return the lines of `load_past_damage` for each kind of damage, each in a folder of its own."""
    return [load_past_damage(str(Path(folder, place)), layout, file, place) for place in places]


@pytest.mark.parametrize("file", ["model-00000*", "optimizer-00001*", "manifest.json"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_older_checkpoint_is_loaded_if_the_newest_is_damaged(tmp_path, layout, file):
    if layout == "ddp":
        file = file.replace("00001", "0000[01]")  # either rank may have written the optimizer's state
    # Without its manifest, a folder is no checkpoint.
    places = ["value", "cut"] if file == "manifest.json" else PLACES
    for found in run_ranks(load_past_each_damage, 2, str(tmp_path), layout, file, places):
        assert found == [
            [place, "checkpoint_0 equal", "checkpoint_0 equal", "refused", "unchanged"] for place in places
        ]
