"""Quantized layers get their scales and code tables when weights are loaded, or an error, but never packed values alone."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from headway import Accelerator, load_checkpoint_in_model
from headway.errors import CheckpointError

KINDS: dict[str, Callable[[], nn.Module]] = {
    "nf4": lambda: bitsandbytes().Linear4bit(64, 64, quant_type="nf4", compress_statistics=False),
    "nf4 twice": lambda: bitsandbytes().Linear4bit(64, 64, quant_type="nf4"),
    "fp4 twice": lambda: bitsandbytes().Linear4bit(64, 64, quant_type="fp4"),
    "int8": lambda: bitsandbytes().Linear8bitLt(64, 64, has_fp16_weights=False),
}
INPUTS = torch.randn(4, 64, generator=torch.Generator().manual_seed(9))


def bitsandbytes():
    return pytest.importorskip("bitsandbytes").nn


def make_model(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(KINDS[kind](), nn.Linear(64, 3))
    with torch.no_grad():
        model[0].weight.data.mul_(3**seed)  # another length of the offset as JSON
    return model.to("cpu")


def save(kind: str, form: str, folder) -> torch.Tensor:
    """Save a model in the given form, and return what it computes."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make_model(kind, 0))
    with torch.no_grad():
        outputs = model(INPUTS)
    if form == "model":
        accelerator.save_model(model, folder)
    else:
        accelerator.save_state(folder)
    return outputs


@pytest.mark.parametrize("form", ["model", "state"])
@pytest.mark.parametrize("kind", KINDS)
def test_loaded_layers_compute_with_the_stored_scales(tmp_path, kind, form):
    expected = save(kind, form, tmp_path / "saved")
    for is_prepared in (False, True):
        accelerator = Accelerator(cpu=True)
        model = make_model(kind, 4)
        if is_prepared:
            model = accelerator.prepare(model)
            model(INPUTS)  # the first call moves the data of 8-bit layers
        accelerator.load_weights(model, tmp_path / "saved", strict=True)
        model = accelerator.prepare(model)
        with torch.no_grad():
            assert torch.equal(model(INPUTS), expected), is_prepared


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_are_loaded_into_quantized_models(tmp_path, kind):
    expected = save(kind, "model", tmp_path / "saved")
    model = make_model(kind, 4)
    load_checkpoint_in_model(model, tmp_path / "saved", strict=True)
    with torch.no_grad():
        assert torch.equal(model(INPUTS), expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int8"])
def test_copied_layers_resume_with_the_stored_scales(tmp_path, kind):
    """`copy.deepcopy` copies the data of the layer and that of its weight separately."""
    expected = save(kind, "state", tmp_path / "saved")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(copy.deepcopy(make_model(kind, 4)))
    accelerator.load_state(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(model(INPUTS), expected)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nf4", r"0\.weight.* was quantized with nested_blocksize=None, the checkpoint's 256"),
        ("fp4 twice", r"0\.weight.* was quantized with quant_type='fp4', the checkpoint's 'nf4'"),
        ("int8", r"0\.weight: \[2048, 1\] uint8 in the checkpoint, \[64, 64\] int8 in the model"),
    ],
)
def test_another_quantization_is_an_error_before_anything_is_loaded(tmp_path, kind, message):
    save("nf4 twice", "model", tmp_path / "saved")
    model = make_model(kind, 4)
    with torch.no_grad():
        expected = model(INPUTS)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(CheckpointError, match=message):
        accelerator.load_weights(model, tmp_path / "saved")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint_in_model(model, tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(model(INPUTS), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_values_without_their_scales_are_an_error(tmp_path, kind):
    from safetensors.torch import save_file

    tensors = make_model(kind, 0).state_dict()
    weights = {name: tensors[name].contiguous() for name in ("0.weight", "0.bias", "1.weight", "1.bias")}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is missing from the checkpoint, which has packed values in 0\.weight"):
        Accelerator(cpu=True).load_weights(make_model(kind, 4), tmp_path)
