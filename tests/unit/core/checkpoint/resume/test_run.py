"""Test that refused saves leave nothing behind, and that refused loads change nothing."""

import copy
import json
import math
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration
from headway.core.checkpoint.format.manifest import MANIFEST, read_manifest
from headway.core.checkpoint.format.values import encode_value
from headway.core.runtime.seed import read_rng_states
from headway.errors import CheckpointError


@pytest.fixture(autouse=True)
def _run_in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Holder:
    """Registered object with one value as its state."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def build(model=None, holder=None, steps=0, folder="run"):
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1),
    )  # fmt: skip
    model = model or torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=2, shuffle=True)
    made = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(holder or Holder(1))
    for _, (x,) in zip(range(steps), made[2]):
        with accelerator.accumulate(made[0]):
            accelerator.backward(made[0](x).square().mean())
            made[1].step()
            made[3].step()
            made[1].zero_grad()
    return accelerator, *made


def capture_state(built):
    """Return all state of a run that a load can change, as JSON and tensors."""
    accelerator, model, optimizer, loader, scheduler = built
    tensors = {}
    state = [
        model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), loader.state_dict(), loader.seed,
        read_rng_states(accelerator.runtime.hardware), accelerator.num_updates, accelerator.gradient_accumulation_steps,
        [each.state_dict() for each in accelerator._checkpoint_state.run.custom], accelerator._checkpoint_state.progress.epoch,
    ]  # fmt: skip
    text = json.dumps(encode_value(state, "x", tensors))
    return text, {name: tensor.clone() for name, tensor in tensors.items()}


def assert_unchanged(before, after):
    assert before[0] == after[0]
    assert all(torch.equal(tensor.nan_to_num(), after[1][name].nan_to_num()) for name, tensor in before[1].items())


HOSTILE = {
    "meta": lambda: torch.empty(2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "object": object,
    "deep": lambda: __import__("functools").reduce(lambda inner, _: {1: inner}, range(300), 0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("kind", HOSTILE)
def test_refused_save_leaves_only_the_earlier_checkpoint(kind, blocking):
    holder = Holder(1)
    accelerator, *_ = build(holder=holder)
    accelerator.save_state()
    holder.value = HOSTILE[kind]()
    with pytest.raises(CheckpointError, match=r"custom/0\.value"):
        accelerator.save_state(blocking=blocking)
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == ["checkpoint_0", "latest"]
    holder.value = 2
    accelerator.save_state()
    accelerator.load_state()


@pytest.mark.parametrize("blocking", [True, False])
def test_unusual_values_are_saved_and_loaded(blocking):
    value = {
        "\ud800": 10**5000, "int4": torch.ones(3, dtype=torch.uint8).view(torch.int4), "name": numpy.str_("a"),
        "one": torch.arange(9)[3:4].as_strided((1,), (4,)), "wide": torch.ones(1).expand(3), "path": Path("a"),
        "row": numpy.zeros(1, [("a", "<i4")]),
    }  # fmt: skip
    holder = Holder(value)
    accelerator, *_ = build(holder=holder)
    accelerator.save_state(blocking=blocking)
    accelerator.wait_for_save()
    holder.value = None
    accelerator.load_state()
    back = holder.value
    assert back["\ud800"] == 10**5000
    assert back["int4"].dtype is torch.int4
    assert (type(back["name"]), type(back["path"]), back["row"].dtype) == (numpy.str_, type(Path()), value["row"].dtype)
    assert torch.equal(back["one"], torch.tensor([3]))
    assert torch.equal(back["wide"], torch.ones(3))


def test_failing_hook_leaves_no_folder_behind():
    accelerator, *_ = build()
    hook = accelerator.register_save_state_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        accelerator.save_state()
    assert list(Path("run/checkpoints").iterdir()) == []
    hook.remove()
    accelerator.save_state()


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_invalid_folder_names_are_refused(name):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(CheckpointError, match="was not saved"):
        accelerator.save_state(name)


def test_nan_metric_is_saved_as_none():
    accelerator, *_ = build()
    assert read_manifest(accelerator.save_state(metric=math.nan)).about["metric"] is None


def test_strict_load_refuses_other_dtypes_and_a_plain_load_reports_them():
    accelerator, *_ = build(torch.nn.Linear(3, 1).double())
    folder = accelerator.save_state()
    again, *_ = build(torch.nn.Linear(3, 1).to(torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"model/0/weight and 1 more tensors: float64 -> bfloat16"):
        again.load_state(folder, strict=True)
    assert again.load_state(folder).differences == ["model/0/weight and 1 more tensors: float64 -> bfloat16"]
    other, *_ = build(torch.nn.Linear(3, 1))
    other._checkpoint_state.objects.models[0].register_buffer("whole", torch.zeros(2, dtype=torch.int8))
    saved, *_ = build(torch.nn.Linear(3, 1), folder="other")
    saved._checkpoint_state.objects.models[0].register_buffer("whole", torch.full((2,), 0.5))
    with pytest.raises(CheckpointError, match=r"model/0/whole is of torch\.int8, the checkpoint's of torch\.float32"):
        other.load_state(saved.save_state("floats"))


def test_loader_that_cannot_load_its_state_changes_nothing(monkeypatch):
    built = build(steps=4)
    folder = built[0].save_state()
    built = build(steps=2, folder="other")
    before = capture_state(built)
    load = type(built[3]).load_state_dict
    taken = []

    def fail_once(self, state):
        load(self, state)
        if not taken:
            taken.append(state)
            raise RuntimeError("no such place")

    monkeypatch.setattr(type(built[3]), "load_state_dict", fail_once)
    with pytest.raises(CheckpointError, match=r"no such place\); nothing was changed"):
        built[0].load_state(folder)
    assert_unchanged(before, capture_state(built))


def test_load_hook_is_not_called_if_other_objects_do_not_fit():
    accelerator, *_ = build()
    folder = accelerator.save_state()
    other = Accelerator(cpu=True)
    other.prepare(torch.nn.Linear(3, 1))
    called = []
    other.register_load_state_pre_hook(lambda models, where: called.append(models.clear()))
    with pytest.raises(CheckpointError, match="1 optimizers were saved, 0 are prepared"):
        other.load_state(folder)
    assert called == []


def list_paths(tree, path=()):
    """Yield the paths of all leaves and containers of a JSON tree."""
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from list_paths(value, (*path, key))


JUNK = [
    None,
    True,
    -1,
    0,
    3,
    1 << 70,
    1.5,
    "x",
    "",
    [],
    {},
    [1],
    {"!": "int", "value": "zz"},
    {"a": 1},
    {"!": "tensor", "name": "no"},
]


def mutate(tree, draw):
    """Return a copy of the tree with one value replaced or deleted, and the path of this value."""
    tree = copy.deepcopy(tree)
    path = draw.choice([path for path in list_paths(tree) if path])
    owner = tree
    for key in path[:-1]:
        owner = owner[key]
    if draw.random() < 0.2:
        del owner[path[-1]]
    else:
        owner[path[-1]] = draw.choice(JUNK)
    return tree, path


@pytest.mark.slow
def test_crafted_manifests_are_refused_before_anything_changes():
    made = build(steps=4, holder=Holder({"a": torch.ones(2), "b": (1, 2)}))
    folder = made[0].save_state()
    manifest, refused, deadline = read_manifest(folder), 0, time.monotonic() + 60
    for seed in range(200):
        draw = random.Random(seed)
        state, about, path = dict(manifest.state), dict(manifest.about), ()
        if draw.random() < 0.8:
            state, path = mutate(state, draw)
        else:
            about, path = mutate(about, draw)
        crafted = Path("crafted")
        shutil.copytree(folder, crafted, dirs_exist_ok=True)
        (crafted / MANIFEST).write_bytes(replace(manifest, state=state, about=about).encode())
        if seed % 20 == 0 or not refused:
            built = build(steps=2, holder=Holder({"a": torch.zeros(2), "b": (0, 0)}), folder="other")
        before = capture_state(built)
        try:
            built[0].load_state(crafted.absolute())
        except CheckpointError:
            refused += 1
            assert_unchanged(before, capture_state(built))
        except Exception as error:
            raise AssertionError(f"seed {seed}, {path}: {error!r}") from error
        else:
            built = build(steps=2, holder=Holder({"a": torch.zeros(2), "b": (0, 0)}), folder="other")
        if time.monotonic() > deadline:
            break
    assert refused > 20
