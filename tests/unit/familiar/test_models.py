"""Questions about models, and files of weights."""

import sys
import types

import numpy
import pytest
import torch

import headway
from headway.errors import UnsupportedError
from headway.familiar import files, models


def test_a_model_comes_out_of_its_wrappers():
    model = torch.nn.Linear(1, 1)
    assert models.extract_model_from_parallel(torch.nn.DataParallel(model)) is model
    compiled = torch.compile(model, backend="eager")
    assert models.is_compiled_module(compiled)
    assert not models.is_compiled_module(model)
    assert models.extract_model_from_parallel(compiled) is compiled
    assert models.extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    nested = torch.nn.Sequential(torch.nn.DataParallel(model))
    assert models.has_compiled_regions(torch.nn.Sequential(compiled))
    assert models.extract_model_from_parallel(nested, recursive=True)[0] is model


def test_a_peft_model_is_known_without_importing_peft(monkeypatch):
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    assert not headway.is_peft_model(torch.nn.Linear(1, 1))
    assert "peft" not in sys.modules
    peft = types.ModuleType("peft")
    peft.PeftModel = type("PeftModel", (torch.nn.Linear,), {})
    monkeypatch.setitem(sys.modules, "peft", peft)
    assert headway.is_peft_model(torch.nn.DataParallel(peft.PeftModel(1, 1)))
    assert not headway.is_peft_model(torch.nn.Linear(1, 1))


def test_parts_of_a_model():
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(1, 1)), torch.nn.ReLU())
    assert models.get_module_class_from_name(model, "Linear") is torch.nn.Linear
    assert models.get_module_class_from_name(model, "Conv2d") is None
    assert not models.model_has_dtensor(model)
    names = [name for name, _ in models.get_module_children_bottom_up(model, return_fqns=True)]
    assert names[-1] == ""
    assert names.index("0.0") < names.index("0")
    assert models.get_module_children_bottom_up(model)[-1] is model


def test_objects_go_to_a_file_and_back(tmp_path):
    kept = {"weight": torch.ones(2), "array": numpy.arange(3), "floats": numpy.ones(2, dtype=numpy.float32), "n": 3}
    headway.save(kept, tmp_path / "kept.pt")
    found = headway.load(tmp_path / "kept.pt", map_location="cpu")
    assert found["weight"].tolist() == [1, 1]
    assert found["array"].tolist() == [0, 1, 2]
    assert found["floats"].dtype == numpy.float32
    headway.save({"weight": torch.ones(2)}, tmp_path / "kept.safetensors", safe_serialization=True)
    headway.save({"weight": torch.ones(2)}, tmp_path / "each.pt", save_on_each_node=True)
    for name in ("kept.safetensors", "each.pt"):
        assert files.load_state_dict(str(tmp_path / name), {"": "cpu"})["weight"].tolist() == [1, 1]
    with pytest.raises(UnsupportedError, match="over 2 devices; use load_checkpoint_in_model"):
        files.load_state_dict(tmp_path / "each.pt", {"a": "cpu", "b": "meta"})


def test_a_file_with_code_in_it_is_refused(tmp_path):
    torch.save(types.SimpleNamespace(x=1), tmp_path / "code.pt")
    with pytest.raises(Exception, match="weights_only"):
        headway.load(tmp_path / "code.pt")
    assert headway.load(tmp_path / "code.pt", weights_only=False).x == 1


def test_names_of_files_are_those_that_save_model_writes(tmp_path):
    accelerator = headway.Accelerator(cpu=True)
    accelerator.save_model(torch.nn.Linear(1, 1), tmp_path)
    assert (tmp_path / headway.SAFE_WEIGHTS_NAME).exists()
    accelerator.save_model(torch.nn.Linear(1, 1), tmp_path / "torch", safe_serialization=False)
    assert (tmp_path / "torch" / headway.WEIGHTS_NAME).exists()
