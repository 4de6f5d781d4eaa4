"""Quantized layers on one GPU, and diffusers pipelines that Headway offloads from it under Accelerate's name."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from headway import BnbQuantizationConfig, QuantizationOptions, init_empty_weights, load_and_quantize_model
from headway.launch.stand_in import FOLDER
from tests.ecosystem.both import SCRIPTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH = 1024


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).eval().to(torch.bfloat16)


CONFIGS = {
    "int8": QuantizationOptions("int8"),
    "int4": QuantizationOptions("int4"),
    "bnb 8": BnbQuantizationConfig(load_in_8bit=True),
    "bnb 4": BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bf16"),
}


INT4 = pytest.param(
    "int4", marks=pytest.mark.card("needs the weight layout of a card's int4 kernel; int8 uses the same code path")
)


@pytest.mark.parametrize("name", [INT4 if name == "int4" else name for name in CONFIGS])
def test_quantized_layers_are_near_and_small(tmp_path, name):
    pytest.importorskip("bitsandbytes" if name.startswith("bnb") else "torchao", reason="not installed here")
    model = build_model()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    inputs = torch.randn(4, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = build_model().cuda()(inputs)
    with init_empty_weights():
        empty = build_model()
    before = torch.cuda.memory_allocated()
    found = load_and_quantize_model(empty, CONFIGS[name], tmp_path / "model.safetensors", device_map={"": 0})
    taken = torch.cuda.memory_allocated() - before
    with torch.no_grad():
        assert (found(inputs) - expected).norm() < 0.2 * expected.norm()
    layer = WIDTH * WIDTH
    assert taken < 2 * layer + 2 * layer * (0.7 if "4" in name else 1.2)  # the last layer stays in bf16


@pytest.mark.parametrize("way", ["model", "sequential", "group"])
def test_pipelines_of_diffusers_are_offloaded(tmp_path, way):
    pytest.importorskip("diffusers", reason="not installed here")
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); sys.argv = ['', {way!r}, 'cuda:0']; import runpy; "
    code += f"runpy.run_path({str(SCRIPTS / 'diffusion_pipelines.py')!r}, run_name='__main__')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=240)
    assert (tmp_path / "evidence/rank0.json").exists()
