"""Test load_and_quantize_model: layers of torchao and bitsandbytes, loaded from a checkpoint or quantized in place."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import headway
from headway import errors
from headway.offload.quantization import (
    BnbQuantizationConfig,
    QuantizationOptions,
    get_keys_to_not_convert,
    has_4bit_bnb_layers,
    load_and_quantize_model,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.second = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(x))))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


@pytest.fixture
def checkpoint(model, tmp_path):
    """Path of a file with the model's weights."""
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def inputs():
    return torch.randn(5, 64, generator=torch.Generator().manual_seed(1))


def build_empty_net():
    with headway.init_empty_weights():
        return Net().eval()


def list_quantized(model):
    return {name for name, each in model.named_modules() if isinstance(each, nn.Linear) and is_quantized(each)}


def is_quantized(layer):
    return type(layer) is not nn.Linear or type(layer.weight.data) is not torch.Tensor


@pytest.mark.parametrize(("weights", "bound"), [("int8", 0.02), ("int4", 0.25)])
def test_torchao_quantizes_a_checkpoint(model, checkpoint, inputs, weights, bound):
    found = load_and_quantize_model(build_empty_net(), QuantizationOptions(weights), checkpoint, device_map="cpu")
    assert list_quantized(found) == {"first", "second.0"}
    assert torch.equal(found.head.weight, model.head.weight)
    difference = (found(inputs) - model(inputs)).norm() / model(inputs).norm()
    assert 0 < difference < bound


def test_results_equal_torchaos(model, checkpoint, inputs):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    found = load_and_quantize_model(build_empty_net(), QuantizationOptions(), checkpoint)
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name in ("first", "second.0"))
    assert torch.equal(found(inputs), model(inputs))


BNB = [
    {"load_in_8bit": True},
    {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp32"},
    {
        "load_in_4bit": True,
        "bnb_4bit_compute_dtype": "bf16",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
]


@pytest.mark.parametrize("settings", BNB)
def test_results_equal_those_of_bitsandbytes_layers(model, checkpoint, inputs, settings):
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    config = BnbQuantizationConfig(**settings)
    found = load_and_quantize_model(build_empty_net(), config, checkpoint, device_map={"": "cpu"})
    for name in ("first", "second.0"):
        old = model.get_submodule(name)
        if config.load_in_8bit:
            new = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0)
        else:
            new = bnb.nn.Linear4bit(
                64, 64, compute_dtype=config.bnb_4bit_compute_dtype, quant_type=config.bnb_4bit_quant_type,
                compress_statistics=config.bnb_4bit_use_double_quant,
            )  # fmt: skip
        new.load_state_dict(old.state_dict())
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, new.to("cpu").requires_grad_(False))
        assert torch.equal(found.get_submodule(name).weight, new.weight)
    model.eval()  # bitsandbytes uses other kernels for training
    with torch.no_grad():
        assert torch.equal(found(inputs), model(inputs))
    assert has_4bit_bnb_layers(found) == config.load_in_4bit
    assert (found.is_loaded_in_8bit, found.is_loaded_in_4bit) == (config.load_in_8bit, config.load_in_4bit)


@pytest.mark.parametrize("config", [QuantizationOptions(), BnbQuantizationConfig(load_in_8bit=True)])
def test_model_is_quantized_in_place(model, inputs, config):
    if isinstance(config, BnbQuantizationConfig):
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    expected = model(inputs)
    found = load_and_quantize_model(model, config)
    assert found is model
    assert (found(inputs) - expected).norm() / expected.norm() < 0.02


def test_skipped_modules_keep_the_requested_dtypes(checkpoint, inputs):
    options = QuantizationOptions(
        dtype=torch.bfloat16, skip_modules=("second",), keep_in_fp32_modules=("norm",), group_size=64
    )
    found = load_and_quantize_model(build_empty_net(), options, checkpoint)
    assert list_quantized(found) == {"first", "head"}
    assert found.second[0].weight.dtype == torch.bfloat16
    assert found.norm.weight.dtype == torch.float32


def test_layers_on_disk_are_not_quantized(model, checkpoint, inputs, tmp_path):
    places = {"first": "cpu", "norm": "cpu", "second": "disk", "head": "cpu"}
    found = load_and_quantize_model(
        build_empty_net(), QuantizationOptions(), checkpoint, places, offload_folder=tmp_path / "off"
    )
    assert list_quantized(found) == {"first"}
    assert torch.equal(found.second[0].weight, model.second[0].weight)
    assert found(inputs).shape == (5, 8)


def test_map_that_would_offload_quantized_layers_is_refused(checkpoint, tmp_path):
    with pytest.raises(errors.UnsupportedError, match="not quantized"):
        load_and_quantize_model(
            build_empty_net(),
            QuantizationOptions(),
            checkpoint,
            "auto",
            max_memory={"cpu": "20kB"},
            offload_folder=tmp_path / "off",
        )


def test_invalid_arguments_are_refused(model):
    with pytest.raises(errors.ConfigError, match="weights_location"):
        load_and_quantize_model(build_empty_net(), QuantizationOptions())
    with pytest.raises(errors.ConfigError, match="no linear layer"):
        load_and_quantize_model(nn.Sequential(nn.LayerNorm(4)), QuantizationOptions())
    with pytest.raises(errors.ConfigError, match="'int8' or 'int4'"):
        QuantizationOptions("int2")
    with pytest.raises(errors.ConfigError, match="above 0"):
        QuantizationOptions(group_size=0)
    for settings in (
        {},
        {"load_in_8bit": True, "load_in_4bit": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "int4"},
        {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp64"},
        {"load_in_8bit": True, "skip_modules": "head"},
        {"load_in_8bit": 1},
    ):
        with pytest.raises(errors.ConfigError):
            BnbQuantizationConfig(**settings)


def test_head_and_tied_modules_are_skipped_by_default():
    tied = Net()
    tied.second[0].weight = tied.first.weight
    assert get_keys_to_not_convert(Net()) == ["head"]
    assert set(get_keys_to_not_convert(tied)) == {"first", "second.0", "head"}
