"""Test that the quantization data of bitsandbytes' layers is exported in every layout, also where the weight was replaced."""

import pytest
import torch
from torch import nn

from headway import Accelerator
from headway.core.weights.quantization_data import add_quantization_data
from headway.errors import CheckpointError


def make_layer(seed: int = 0) -> nn.Module:
    modules = pytest.importorskip("bitsandbytes").nn
    torch.manual_seed(seed)
    return modules.Linear4bit(64, 64, bias=True, quant_type="nf4").to("cpu")  # type: ignore[no-any-return]


def test_names_and_values_are_those_of_bitsandbytes():
    model = nn.Sequential(make_layer(), nn.Linear(64, 1))
    expected = model.state_dict()
    tensors = dict(add_quantization_data(model, model.state_dict().items()))
    assert tensors.keys() == expected.keys()
    assert len([name for name in tensors if name.startswith("0.weight.")]) == 5
    for name, value in expected.items():
        assert torch.equal(tensors[name], value), name


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_replaced_weight_keeps_the_data_and_its_place(device):
    model = nn.Sequential(make_layer(), nn.Linear(64, 1))
    expected = list(add_quantization_data(model, model.state_dict().items()))
    model[0].weight = nn.Parameter(torch.zeros(64 * 64 // 2, 1, dtype=torch.uint8, device=device), requires_grad=False)
    assert "0.weight.absmax" not in model.state_dict()
    tensors = list(add_quantization_data(model, model.state_dict().items()))
    assert [name for name, _ in tensors] == [name for name, _ in expected]
    for (name, value), (_, original) in zip(tensors, expected):
        if name != "0.weight":
            assert torch.equal(value, original), name


def test_a_layer_made_from_other_values_computes_with_the_saved_ones(tmp_path):
    """The mean of the scales must be restored, too, of which the state dict has only a copy as JSON text."""
    inputs = torch.randn(4, 64)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(make_layer(0)))
    expected, state = model(inputs), model.state_dict()
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    model = accelerator.prepare(nn.Sequential(make_layer(1)))
    settings = "0.weight.quant_state.bitsandbytes__nf4"
    assert not torch.equal(model.state_dict()[settings], state[settings])
    assert not torch.allclose(model(inputs), expected, atol=0.1)
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model(inputs), expected)
    assert torch.equal(model.state_dict()[settings], state[settings])


def test_another_quantization_is_an_error_that_names_it(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Sequential(make_layer()))
    accelerator.save_state(tmp_path / "state")
    accelerator = Accelerator(cpu=True)
    layer = make_layer()
    layer.quant_state.blocksize = 128
    accelerator.prepare(nn.Sequential(layer))
    with pytest.raises(CheckpointError, match=r"0\.weight.* was quantized with blocksize=128, the checkpoint's 64"):
        accelerator.load_state(tmp_path / "state")
