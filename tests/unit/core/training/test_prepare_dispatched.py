"""Test models on several devices: `prepare()` leaves them there, and refuses to move or replicate them."""

import pytest
import torch
from torch import nn

from headway import Accelerator, dispatch_model
from headway.core.training.prepared.dispatched import list_dispatch_places
from headway.errors import PrepareError
from tests.unit.offload.test_stream import stream_model

CPU = torch.device("cpu")


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def build_mapped_model(device_map):
    model = build_model()
    model.hf_device_map = device_map  # set like by transformers and Accelerate; no second device exists here
    return model


@pytest.mark.parametrize(
    "device_map",
    [
        {"0": 0, "2": 1},
        {"0": "cuda:0", "2": "cuda:1"},
        {"0": torch.device("cuda", 0), "2": "cpu"},
        {"0": 0, "2": "disk"},
    ],
    ids=str,
)
def test_model_on_several_devices_is_not_moved(device_map, monkeypatch):
    model = build_mapped_model(device_map)
    with pytest.raises(PrepareError, match=r"Sequential was dispatched over .*device_placement=\[True\]"):
        Accelerator(cpu=True).prepare(model, device_placement=[True])
    with pytest.raises(PrepareError, match="dispatched"):
        Accelerator(cpu=True).prepare(
            nn.Sequential(model), device_placement=[True]
        )  # the dispatched model is a submodule
    monkeypatch.setattr(nn.Module, "to", lambda *_: pytest.fail("the model was moved"))
    for placement in (None, [False]):
        assert Accelerator(cpu=True).prepare(model, device_placement=placement) is model


@pytest.mark.parametrize(
    "device_map", [{"": "cpu"}, {"": 0}, {"0": 0, "2": "cuda:0"}, {"0": 0, "2": torch.device("cuda:0")}, {}], ids=str
)
def test_model_on_one_device_is_moved(device_map):
    model = build_mapped_model(device_map)
    assert Accelerator(cpu=True).prepare(model) is model


def test_model_mapped_from_files_that_runs_on_the_cpu_is_complete(tmp_path):
    model = dispatch_model(build_model(), {"0": "cpu", "1": "cpu", "2": "disk"}, offload_dir=tmp_path)
    assert Accelerator(cpu=True).prepare(model) is model
    assert list_dispatch_places(model, torch.device("cuda", 0)) == ["cpu", "disk"]


def test_streamed_model_is_trained_in_place():
    whole, model = build_model(), build_model()
    stream_model(model)
    model.hf_device_map = {
        "": "cpu"
    }  # set like by cpu_offload(): weights are stored on one device and copied for each use
    inputs = torch.randn(8, 4)
    for each in (whole, model):
        accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each, optimizer = accelerator.prepare(each, optimizer)
        for _ in range(3):
            accelerator.backward(each(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.free_memory()
    assert all(map(torch.equal, whole.parameters(), model.parameters()))


def test_model_dispatched_by_transformers_is_prepared_only_on_one_device(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # transformers uses it to dispatch models
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "saved")
    for device_map, is_refused in (({"": "cpu"}, False), ({"model": "cpu", "lm_head": "disk"}, True)):
        model = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / "saved", device_map=device_map, offload_folder=tmp_path / "offload", tie_word_embeddings=False
        )
        if is_refused:
            assert model.hf_device_map == device_map
            with pytest.raises(PrepareError, match="dispatched over cpu, disk"):
                Accelerator(cpu=True).prepare(model, device_placement=[True])
            with pytest.raises(PrepareError, match="on the meta device"):  # Accelerate's hooks keep the weights on disk
                Accelerator(cpu=True).prepare(model)
        else:
            assert Accelerator(cpu=True).prepare(model) is model
