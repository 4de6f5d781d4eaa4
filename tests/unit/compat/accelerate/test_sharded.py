"""Test Accelerate's files of sharded models on one process. tests/ecosystem tests several processes."""

from types import SimpleNamespace

import pytest
import torch

from headway.compat.accelerate.sharded import (
    get_parameters_from_modules,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from headway.errors import CheckpointError

ALONE = SimpleNamespace(num_processes=1, process_index=0, wait_for_everyone=lambda: None)


def train(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("read_by", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_files_of_either_type_are_read_whatever_the_plugin_says(tmp_path, kind, read_by):
    model, optimizer = train(1)
    save_fsdp_model(SimpleNamespace(state_dict_type=kind), ALONE, model, tmp_path, adapter_only=True)
    save_fsdp_optimizer(SimpleNamespace(state_dict_type=kind), ALONE, optimizer, model, tmp_path)
    whole = {"pytorch_model_fsdp.bin", "optimizer.bin"}
    found = {path.name for path in tmp_path.iterdir()}
    assert found == (whole if kind == "FULL_STATE_DICT" else {"pytorch_model_fsdp_0", "optimizer_0"})
    other, others_optimizer = train(2)
    plugin = SimpleNamespace(state_dict_type=read_by)
    missing = load_fsdp_model(plugin, ALONE, other, tmp_path, adapter_only=True)
    load_fsdp_optimizer(plugin, ALONE, others_optimizer, other, tmp_path)
    assert (missing.missing_keys, missing.unexpected_keys) == ([], [])
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    for one, two in zip(model.parameters(), other.parameters()):
        assert torch.equal(optimizer.state[one]["exp_avg"], others_optimizer.state[two]["exp_avg"])


def test_folder_without_either_type_is_refused(tmp_path):
    model, optimizer = train(1)
    with pytest.raises(
        CheckpointError, match=r"neither a folder pytorch_model_fsdp_1 nor a file pytorch_model_fsdp_1\.bin"
    ):
        load_fsdp_model(None, ALONE, model, tmp_path, model_index=1)
    with pytest.raises(CheckpointError, match=r"neither a folder optimizer_0 nor a file optimizer\.bin"):
        load_fsdp_optimizer(None, ALONE, optimizer, model, tmp_path)


@pytest.mark.parametrize(("given", "expected"), [(None, 0), (r"0\.weight|1", 2), (r"0", 2)])
def test_parameters_are_selected_by_module_name(given, expected):
    model, _ = train(1)
    assert len(get_parameters_from_modules(given, model, "cpu")) == expected
