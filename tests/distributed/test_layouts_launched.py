"""One script with every way to select a layout (flags, a file, a plugin) has the losses of one process."""

import json
import subprocess
import sys

import pytest

from tests.distributed.test_launch import launch

# Rank 0's model is sent to rank 1, and the rows come from the prepared loader.
SCRIPT = """
import json, sys
import torch
from headway import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, set_seed

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(8, 8)
    def forward(self, x):
        return x + torch.tanh(self.lin(x))

accelerator = Accelerator({arguments})
set_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), *[Block() for _ in range(3)], torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
rows = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = torch.utils.data.DataLoader(rows, batch_size=8 // accelerator.strategy.data_shard.count)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for x, y in loader:
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step(); optimizer.zero_grad()
    losses.append((round(float(accelerator.reduce(loss.detach(), "mean")), 5), round(float(norm), 5)))
state, sharding = accelerator.state, accelerator.options.sharding
print(json.dumps({{
    "rank": accelerator.process_index, "losses": losses, "type": accelerator.distributed_type.value,
    "is_fsdp2": accelerator.is_fsdp2, "plugin": type(state.fsdp_plugin).__name__, "units": [str(unit) for unit in sharding.units],
    "mesh": None if accelerator.torch_device_mesh is None else list(accelerator.torch_device_mesh.mesh_dim_names),
    "ranks": [accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank, accelerator.tensor_parallel_rank],
    "sizes": None if accelerator.parallelism_config is None else accelerator.parallelism_config.sizes,
    "checkpoints": accelerator.options.checkpointing is not None, "kinds": sorted({{type(p).__name__ for p in model.parameters()}}),
}}), flush=True)
accelerator.end_training()
"""
PLAIN_SCRIPT = SCRIPT.format(arguments="")


def read_reports(result):
    assert result.returncode == 0, result.stderr[-3000:]
    return sorted(
        (json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")),
        key=lambda report: report["rank"],
    )


@pytest.fixture(scope="module")
def expected_losses(tmp_path_factory):
    [report] = read_reports(launch(tmp_path_factory.mktemp("alone"), PLAIN_SCRIPT, "--cpu", "-n", "1"))
    assert (report["type"], report["mesh"], report["kinds"]) == ("NO", None, ["Parameter"])
    return report["losses"]


def check_sharded(reports, expected_losses):
    assert [report["rank"] for report in reports] == [0, 1]
    for report in reports:
        assert are_close(report["losses"], expected_losses)
        assert (report["type"], report["is_fsdp2"], report["plugin"]) == (
            "FSDP",
            True,
            "FullyShardedDataParallelPlugin",
        )
        assert (report["mesh"], report["kinds"]) == (["shard"], ["DTensor"])
        assert report["ranks"] == [0, report["rank"], 0]
        assert report["sizes"] == {"dp_replicate": 1, "dp_shard": 2, "tp": 1, "cp": 1, "sp": 1}


def are_close(found, expected):
    return all(abs(a - b) < 5e-5 for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True))


def test_flags_of_headway_and_accelerate_select_the_same_layout(tmp_path, expected_losses):
    headway_reports = read_reports(launch(tmp_path, PLAIN_SCRIPT, "-n", "2", "--cpu", "--strategy", "fsdp"))
    check_sharded(headway_reports, expected_losses)
    result = launch(
        tmp_path, PLAIN_SCRIPT, "-n", "2", "--cpu", "--use_fsdp", "--fsdp_version", "2",
        "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
        "--fsdp_transformer_layer_cls_to_wrap", "Block", "--fsdp_activation_checkpointing", "true",
        "--fsdp_reshard_after_forward", "false",
    )  # fmt: skip
    accelerate_reports = read_reports(result)
    check_sharded(accelerate_reports, expected_losses)
    assert all(report["units"] == ["Block"] and report["checkpoints"] for report in accelerate_reports)
    assert "without effect: --fsdp_version (Headway uses FSDP2)" in result.stderr


def test_config_file_of_accelerate_and_plugin_select_the_same_layout(tmp_path, expected_losses):
    (tmp_path / "theirs.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\nfsdp_config:\n  fsdp_version: 1\n"
        "  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_transformer_layer_cls_to_wrap: Block\n"
    )
    words = ["config", "import", "theirs.yaml", "--config_file", "mine.yaml"]
    subprocess.run([sys.executable, "-m", "headway", *words], cwd=tmp_path, check=True, capture_output=True)
    check_sharded(read_reports(launch(tmp_path, PLAIN_SCRIPT, "--config_file", "mine.yaml")), expected_losses)
    plugin = SCRIPT.format(
        arguments="fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True, "
        "backward_prefetch='BACKWARD_PRE', "
        "transformer_cls_names_to_wrap=['Block']), parallelism_config=ParallelismConfig(dp_shard_size=2)"
    )
    result = launch(tmp_path, plugin, "-n", "2", "--cpu")
    reports = read_reports(result)
    check_sharded(reports, expected_losses)
    assert all(report["units"] == ["Block"] for report in reports)
    assert result.stderr.count("these have no effect here: fsdp_plugin.fsdp_version") == 1


def test_conflict_of_script_and_command_line_is_refused_without_force(tmp_path):
    result = launch(tmp_path, SCRIPT.format(arguments="strategy='ddp'"), "-n", "2", "--cpu", "--strategy", "fsdp")
    assert result.returncode != 0
    assert "against --strategy fsdp on the command line: take one of them out, or add --force" in result.stderr
    forced = read_reports(
        launch(tmp_path, SCRIPT.format(arguments="strategy='ddp'"), "-n", "2", "--cpu", "--strategy", "fsdp", "--force")
    )
    assert [report["type"] for report in forced] == ["FSDP", "FSDP"]


def test_layout_size_that_does_not_fit_the_launch_is_an_error(tmp_path):
    result = launch(
        tmp_path, SCRIPT.format(arguments="parallelism_config=ParallelismConfig(dp_shard_size=4)"), "-n", "2", "--cpu"
    )
    assert result.returncode != 0
    assert (
        "strategy 'fsdp=4' takes 4 ranks, but the run has 2; the nearest that fit 2: fsdp=2; or run 4 ranks "
        "(docs/layouts.md#sizes) (code: " in result.stderr
    )
