"""Tests of models with compiled submodules: exports use the names of the original model, and files with old names load."""

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


def compile_module(module: torch.nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def compile_first_layer(net: Any) -> Any:
    net.layers[0] = compile_module(net.layers[0])
    return net


def compile_nested(net: Any) -> Any:
    """Compile a linear layer, the block around it, and the whole model."""
    net.layers[1].wide = compile_module(net.layers[1].wide)
    net.layers[1] = compile_module(net.layers[1])
    return compile_module(net)


def compile_first_layer_in_place(net: Any) -> Any:
    net.layers[0].compile(backend="eager")
    return net


WAYS: dict[str, Callable[[Any], Any]] = {
    "one": compile_first_layer,
    "deep": compile_nested,
    "in place": compile_first_layer_in_place,
}


def make_rows() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


def build_model(has_extra: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(has_extra)


def train(model: Any, optimizer: Any, backward: Callable[[torch.Tensor], Any], num_steps: int) -> None:
    for _ in range(num_steps):
        backward(model(make_rows()).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def train_by_hand(num_steps: int, has_extra: bool = False) -> dict[str, torch.Tensor]:
    """Train in plain PyTorch in one process without compilation. All ranks read the same rows, so they reach the same weights."""
    net = build_model(has_extra)
    train(net, torch.optim.AdamW(net.parameters(), 0.05), torch.Tensor.backward, num_steps)
    return net.state_dict()


def export(layout: dict[str, Any], way: str, folder: str, is_late: bool) -> tuple[list[str], list[str]]:
    accelerator = Accelerator(cpu=True, **layout)
    net = build_model()
    net = net if is_late else WAYS[way](net)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 0.05))
    if is_late:
        WAYS[way](model)
    train(model, optimizer, accelerator.backward, 2)
    accelerator.save_model(model, f"{folder}/weights")
    accelerator.save_state(f"{folder}/state", weights="huggingface")
    state = accelerator.get_state_dict(model)
    names = [name for bucket in accelerator.stream_weights(model) for name, _ in bucket]
    model.load_state_dict(state if state else dict(train_by_hand(2)))
    after = accelerator.get_state_dict(model)
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    if accelerator.is_main_process:
        expected = train_by_hand(2)
        for found in (state, after, load_file(f"{folder}/weights/model.safetensors")):
            assert found.keys() == expected.keys()
            assert all(torch.allclose(found[name].cpu(), expected[name], atol=1e-5) for name in expected)
        assert load_file(f"{folder}/state/model.safetensors").keys() == expected.keys()
        assert type(unwrapped.layers[0]).__name__.endswith("Block")
        assert [name for name, _ in unwrapped.named_parameters()] == list(expected)
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
def test_every_export_uses_the_names_of_the_original_model(
    layout: str, way: str, is_late: bool, tmp_path: Path
) -> None:
    num_ranks, settings = LAYOUTS[layout]
    names, own_names = run_ranks(export, num_ranks, settings, way, str(tmp_path), is_late)[0]
    expected = list(train_by_hand(0))
    assert names == expected
    # With unwrap=False, the names are those of the compiled model.
    assert any("_orig_mod" in name for name in own_names) == (way != "in place")
    manifest = read_manifest(tmp_path / "state")
    assert not [name for name in manifest.tensors if "_orig_mod" in name]
    assert manifest.state["optimizer"][0]["params"] == [[f"0/{name}" for name in expected]]


def write_old_names(folder: Path) -> None:
    """Rename the first layer's entries in a checkpoint as earlier versions named those of a compiled layer."""
    text = (folder / MANIFEST).read_text()
    whole = Manifest.decode(text.encode())

    def add_compile_prefix(value: Any) -> Any:
        if isinstance(value, dict):
            return {add_compile_prefix(key): add_compile_prefix(item) for key, item in value.items()}
        if isinstance(value, list):
            return [add_compile_prefix(item) for item in value]
        return value.replace("layers.0.", "layers.0._orig_mod.") if isinstance(value, str) else value

    # The keys in the files stay the same. Chunks described as a grid would derive them from the new name.
    tensors = {
        add_compile_prefix(name): replace(entry, chunks=tuple(entry.chunks)) for name, entry in whole.tensors.items()
    }
    renamed = Manifest(
        tensors,
        whole.files,
        add_compile_prefix(dict(whole.aliases)),
        add_compile_prefix(dict(whole.state)),
        whole.about,
    )
    (folder / MANIFEST).write_bytes(renamed.encode())


def resume(layout: dict[str, Any], folder: str, saves: bool, is_compiled: bool) -> dict[str, torch.Tensor]:
    """Train for two updates and save, or load that checkpoint and train for two more."""
    accelerator = Accelerator(cpu=True, **layout)
    net = build_model(has_extra=True)
    net = compile_first_layer(net) if is_compiled else net
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
    state = run_ranks(resume, num_ranks, settings, str(folder), False, is_compiled)[0]
    expected = train_by_hand(4, has_extra=True)
    tensors = {name: value for name, value in expected.items() if isinstance(value, torch.Tensor)}
    assert state.keys() == expected.keys()
    assert all(torch.allclose(state[name].cpu(), value, atol=1e-5) for name, value in tensors.items())


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("is_prepared", [True, False])
def test_weight_files_load_with_old_and_new_names(is_compiled: bool, is_prepared: bool, tmp_path: Path) -> None:
    expected = train_by_hand(2)
    old_names = {name.replace("layers.0.", "layers.0._orig_mod."): value for name, value in expected.items()}
    for number, stored in enumerate((expected, old_names)):
        save_file(stored, tmp_path / f"{number}.safetensors")
        net: Any = Net()
        model: Any = compile_first_layer(net) if is_compiled else net
        accelerator = Accelerator(cpu=True)
        if is_prepared:
            accelerator.prepare(model)
            accelerator.load_weights(model, tmp_path / f"{number}.safetensors")
        else:
            load_checkpoint_in_model(model, tmp_path / f"{number}.safetensors")
        assert all(torch.equal(*pair) for pair in zip(model.state_dict().values(), expected.values()))


def test_transformers_loads_weights_saved_from_a_compiled_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    net: Any = transformers.LlamaForCausalLM(config)
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    net.model.layers[0] = compile_module(net.model.layers[0])
    accelerator = Accelerator(cpu=True)
    model: Any = accelerator.prepare(net)
    accelerator.save_state(tmp_path / "state", weights="huggingface")
    accelerator.unwrap_model(model, keep_torch_compile=False).save_pretrained(tmp_path / "own")
    for folder in ("state", "own"):
        opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / folder)
        assert all(torch.equal(opened.state_dict()[name], value) for name, value in expected.items())
    # Conversely, files of save_pretrained load into a model with a compiled layer.
    other: Any = transformers.LlamaForCausalLM(config)
    other.model.layers[0] = compile_module(other.model.layers[0])
    accelerator.free_memory()
    accelerator.load_weights(other, tmp_path / "own")
    state = accelerator.get_state_dict(accelerator.prepare(other))
    assert all(torch.equal(state[name], value) for name, value in expected.items())
