"""Tests of models with many parameters: JSON's C code encodes each manifest once, and manifests of earlier versions load."""

import json

import torch

from headway import Accelerator
from headway.core.checkpoint.format.manifest import Manifest, read_manifest


def prepare_model():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(50)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model


def test_save_encodes_each_manifest_once_with_the_c_code_of_json(tmp_path, monkeypatch):
    """`indent` makes json.dumps use Python code, which took 5 of 8 seconds with 10,000 parameters."""
    calls = []
    content = Manifest._encode_content

    def refuse(*args, **kwargs):
        raise AssertionError("JSON is written by Python code")

    monkeypatch.setattr(json.encoder, "_make_iterencode", refuse)
    monkeypatch.setattr(Manifest, "_encode_content", lambda self: calls.append(self) or content(self))
    accelerator, _ = prepare_model()
    accelerator.save_state(tmp_path / "x")
    assert len(calls) == 1
    accelerator.load_state(tmp_path / "x")
    assert len(calls) == 1


def test_indented_manifest_of_an_earlier_version_is_read(tmp_path):
    accelerator, model = prepare_model()
    accelerator.save_state(tmp_path / "x")
    saved = [each.detach().clone() for each in model.parameters()]
    manifest = tmp_path / "x" / "manifest.json"
    original = read_manifest(manifest.parent)
    manifest.write_text(json.dumps(json.loads(manifest.read_text()), indent=1) + "\n")
    assert read_manifest(manifest.parent).sha256 == original.sha256
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    accelerator.load_state(tmp_path / "x")
    assert all(torch.equal(mine, each) for mine, each in zip(model.parameters(), saved, strict=True))
