"""Models whose submodules `torch.compile` wraps: exports have the names of the bare model, and old names can still be loaded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway import Accelerator, load_checkpoint_in_model
from headway.core.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest
from tests.distributed.ranks import run_ranks


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.relu(self.wide(x))) * self.scale

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Net(torch.nn.Module):
    def __init__(self, has_extra: bool = False) -> None:
        super().__init__()
        kind = Block if has_extra else PlainBlock
        self.layers = torch.nn.ModuleList(kind() for _ in range(3))
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class PlainBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.relu(self.wide(x)))


def compiled(module: torch.nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def compile_one(net: Any) -> Any:
    net.layers[0] = compiled(net.layers[0])
    return net


def compile_deep(net: Any) -> Any:
    """Wrappers within wrappers: a layer, a list of layers, the model."""
    net.layers[1].wide = compiled(net.layers[1].wide)
    net.layers[1] = compiled(net.layers[1])
    return compiled(net)


def compile_in_place(net: Any) -> Any:
    net.layers[0].compile(backend="eager")
    return net


WAYS: dict[str, Callable[[Any], Any]] = {"one": compile_one, "deep": compile_deep, "in place": compile_in_place}


def data() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


def built(has_extra: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(has_extra)


def train(model: Any, optimizer: Any, backward: Callable[[torch.Tensor], Any], num_steps: int) -> None:
    for _ in range(num_steps):
        backward(model(data()).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def by_hand(num_steps: int, has_extra: bool = False) -> dict[str, torch.Tensor]:
    """Plain torch, one process, nothing compiled; all ranks read the same rows, so they learn this, too."""
    net = built(has_extra)
    train(net, torch.optim.AdamW(net.parameters(), 0.05), torch.Tensor.backward, num_steps)
    return net.state_dict()


def export(layout: dict[str, Any], way: str, folder: str, is_late: bool) -> tuple[list[str], list[str]]:
    accelerator = Accelerator(cpu=True, **layout)
    net = built()
    net = net if is_late else WAYS[way](net)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 0.05))
    if is_late:
        WAYS[way](model)
    train(model, optimizer, accelerator.backward, 2)
    accelerator.save_model(model, f"{folder}/weights")
    accelerator.save_state(f"{folder}/state", weights="huggingface")
    state = accelerator.get_state_dict(model)
    names = [name for bucket in accelerator.stream_weights(model) for name, _ in bucket]
    model.load_state_dict(state if state else dict(by_hand(2)))
    after = accelerator.get_state_dict(model)
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    if accelerator.is_main_process:
        wanted = by_hand(2)
        for found in (state, after, load_file(f"{folder}/weights/model.safetensors")):
            assert found.keys() == wanted.keys()
            assert all(torch.allclose(found[name].cpu(), wanted[name], atol=1e-5) for name in wanted)
        assert load_file(f"{folder}/state/model.safetensors").keys() == wanted.keys()
        assert type(unwrapped.layers[0]).__name__.endswith("Block")
        assert [name for name, _ in unwrapped.named_parameters()] == list(wanted)
    return names, list(accelerator.get_state_dict(model, unwrap=False))


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "ddp": (2, {}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "tp": (2, {"strategy": "tp"}),
}
CASES = [
    *(pytest.param(layout, "one", False, id=f"{layout}, one") for layout in ("one process", "fsdp")),
    *(
        pytest.param(layout, way, is_late, id=f"{layout}, {way}{', after prepare' if is_late else ''}", marks=pytest.mark.matrix)
        for layout in LAYOUTS
        for way, is_late in (("one", False), ("deep", False), ("in place", False), ("one", True))
        if (layout, way, is_late) not in (("one process", "one", False), ("fsdp", "one", False))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "way", "is_late"), CASES)
def test_every_export_has_the_names_of_the_bare_model(layout: str, way: str, is_late: bool, tmp_path: Path) -> None:
    num_ranks, settings = LAYOUTS[layout]
    names, own_names = run_ranks(export, num_ranks, settings, way, str(tmp_path), is_late)[0]
    wanted = list(by_hand(0))
    assert names == wanted
    # As the object itself names them, if that is asked for.
    assert any("_orig_mod" in name for name in own_names) == (way != "in place")
    manifest = read_manifest(tmp_path / "state")
    assert not [name for name in manifest.tensors if "_orig_mod" in name]
    assert manifest.state["optimizer"][0]["params"] == [[f"0/{name}" for name in wanted]]


def write_old_names(folder: Path) -> None:
    """Give a checkpoint's first layer the names that earlier versions wrote for a compiled one."""
    text = (folder / MANIFEST).read_text()
    whole = Manifest.decode(text.encode())

    def old(value: Any) -> Any:
        if isinstance(value, dict):
            return {old(key): old(item) for key, item in value.items()}
        if isinstance(value, list):
            return [old(item) for item in value]
        return value.replace("layers.0.", "layers.0._orig_mod.") if isinstance(value, str) else value

    # Files keep their keys, which a grid of boxes would derive from the name.
    tensors = {old(name): replace(entry, chunks=tuple(entry.chunks)) for name, entry in whole.tensors.items()}
    renamed = Manifest(tensors, whole.files, old(dict(whole.aliases)), old(dict(whole.state)), whole.about)
    (folder / MANIFEST).write_bytes(renamed.encode())


def resume(layout: dict[str, Any], folder: str, saves: bool, is_compiled: bool) -> dict[str, torch.Tensor]:
    """Two updates and a save, or the load of that save and two more."""
    accelerator = Accelerator(cpu=True, **layout)
    net = built(has_extra=True)
    net = compile_one(net) if is_compiled else net
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 0.05))
    first: Any = model.layers[0]
    if saves:
        train(model, optimizer, accelerator.backward, 2)
        first.calls = 7
        accelerator.save_state(folder)
        return {}
    accelerator.load_state(folder)
    assert first.calls == 7
    train(model, optimizer, accelerator.backward, 2)
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize(
    ("layout", "is_old"),
    [
        pytest.param("one process", True),
        pytest.param("one process", False, marks=pytest.mark.matrix),
        *(pytest.param(layout, is_old, marks=pytest.mark.matrix) for layout in ("ddp", "fsdp") for is_old in (True, False)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_compiled", [True, False])
def test_checkpoints_load_with_old_and_new_names(layout: str, is_old: bool, is_compiled: bool, tmp_path: Path) -> None:
    num_ranks, settings = LAYOUTS[layout]
    folder = tmp_path / "state"
    run_ranks(resume, num_ranks, settings, str(folder), True, not is_compiled)
    if is_old:
        write_old_names(folder)
    found = run_ranks(resume, num_ranks, settings, str(folder), False, is_compiled)[0]
    wanted = by_hand(4, has_extra=True)
    tensors = {name: value for name, value in wanted.items() if isinstance(value, torch.Tensor)}
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name].cpu(), value, atol=1e-5) for name, value in tensors.items())


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("is_prepared", [True, False])
def test_files_of_weights_load_with_old_and_new_names(is_compiled: bool, is_prepared: bool, tmp_path: Path) -> None:
    wanted = by_hand(2)
    old = {name.replace("layers.0.", "layers.0._orig_mod."): value for name, value in wanted.items()}
    for number, stored in enumerate((wanted, old)):
        save_file(stored, tmp_path / f"{number}.safetensors")
        net: Any = Net()
        model: Any = compile_one(net) if is_compiled else net
        accelerator = Accelerator(cpu=True)
        if is_prepared:
            accelerator.prepare(model)
            accelerator.load_weights(model, tmp_path / f"{number}.safetensors")
        else:
            load_checkpoint_in_model(model, tmp_path / f"{number}.safetensors")
        assert all(torch.equal(*pair) for pair in zip(model.state_dict().values(), wanted.values()))


def test_a_model_of_transformers_opens_what_a_compiled_one_saved(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    net: Any = transformers.LlamaForCausalLM(config)
    wanted = {name: value.clone() for name, value in net.state_dict().items()}
    net.model.layers[0] = compiled(net.model.layers[0])
    accelerator = Accelerator(cpu=True)
    model: Any = accelerator.prepare(net)
    accelerator.save_state(tmp_path / "state", weights="huggingface")
    accelerator.unwrap_model(model, keep_torch_compile=False).save_pretrained(tmp_path / "own")
    for folder in ("state", "own"):
        opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / folder)
        assert all(torch.equal(opened.state_dict()[name], value) for name, value in wanted.items())
    # And the other way: what from_pretrained opens fills a model with a compiled layer.
    other: Any = transformers.LlamaForCausalLM(config)
    other.model.layers[0] = compiled(other.model.layers[0])
    accelerator.free_memory()
    accelerator.load_weights(other, tmp_path / "own")
    found = accelerator.get_state_dict(accelerator.prepare(other))
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
