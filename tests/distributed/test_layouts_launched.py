"""One script under every way to ask for a layout: flags, a file, a plugin; its losses are those of one process."""

import json
import subprocess
import sys

import pytest

from tests.distributed.test_launch import launch

# The model reaches both ranks from rank 0; the rows come through the prepared loader.
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
PLAIN = SCRIPT.format(arguments="")


def told(ran):
    assert ran.returncode == 0, ran.stderr[-3000:]
    return sorted(
        (json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")), key=lambda one: one["rank"]
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    [one] = told(launch(tmp_path_factory.mktemp("alone"), PLAIN, "--cpu", "-n", "1"))
    assert (one["type"], one["mesh"], one["kinds"]) == ("NO", None, ["Parameter"])
    return one["losses"]


def check_sharded(both, alone):
    assert [one["rank"] for one in both] == [0, 1]
    for one in both:
        assert close(one["losses"], alone)
        assert (one["type"], one["is_fsdp2"], one["plugin"]) == ("FSDP", True, "FullyShardedDataParallelPlugin")
        assert (one["mesh"], one["kinds"]) == (["shard"], ["DTensor"])
        assert one["ranks"] == [0, one["rank"], 0]
        assert one["sizes"] == {"dp_replicate": 1, "dp_shard": 2, "tp": 1, "cp": 1, "sp": 1}


def close(found, wanted):
    return all(abs(a - b) < 5e-5 for one, two in zip(found, wanted, strict=True) for a, b in zip(one, two, strict=True))


def test_by_flags_of_headways_and_of_accelerates(tmp_path, alone):
    own = told(launch(tmp_path, PLAIN, "-n", "2", "--cpu", "--strategy", "fsdp"))
    check_sharded(own, alone)
    ran = launch(
        tmp_path, PLAIN, "-n", "2", "--cpu", "--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
        "--fsdp_transformer_layer_cls_to_wrap", "Block", "--fsdp_activation_checkpointing", "true",
        "--fsdp_reshard_after_forward", "false",
    )  # fmt: skip
    theirs = told(ran)
    check_sharded(theirs, alone)
    assert all(one["units"] == ["Block"] and one["checkpoints"] for one in theirs)
    assert "without effect: --fsdp_version (Headway uses FSDP2)" in ran.stderr


def test_by_a_file_of_accelerates_and_by_a_plugin(tmp_path, alone):
    (tmp_path / "theirs.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\nfsdp_config:\n  fsdp_version: 1\n"
        "  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_transformer_layer_cls_to_wrap: Block\n"
    )
    words = ["config", "import", "theirs.yaml", "--config_file", "mine.yaml"]
    subprocess.run([sys.executable, "-m", "headway", *words], cwd=tmp_path, check=True, capture_output=True)
    check_sharded(told(launch(tmp_path, PLAIN, "--config_file", "mine.yaml")), alone)
    plugin = SCRIPT.format(
        arguments="fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True, "
        "backward_prefetch='BACKWARD_PRE', "
        "transformer_cls_names_to_wrap=['Block']), parallelism_config=ParallelismConfig(dp_shard_size=2)"
    )
    ran = launch(tmp_path, plugin, "-n", "2", "--cpu")
    both = told(ran)
    check_sharded(both, alone)
    assert all(one["units"] == ["Block"] for one in both)
    assert ran.stderr.count("these have no effect here: fsdp_plugin.fsdp_version") == 1


def test_the_script_against_the_command_line(tmp_path):
    ran = launch(tmp_path, SCRIPT.format(arguments="strategy='ddp'"), "-n", "2", "--cpu", "--strategy", "fsdp")
    assert ran.returncode != 0
    assert "against --strategy fsdp on the command line: take one of them out, or add --force" in ran.stderr
    won = told(
        launch(tmp_path, SCRIPT.format(arguments="strategy='ddp'"), "-n", "2", "--cpu", "--strategy", "fsdp", "--force")
    )
    assert [one["type"] for one in won] == ["FSDP", "FSDP"]


def test_sizes_of_a_script_that_do_not_fit_the_launch(tmp_path):
    ran = launch(
        tmp_path, SCRIPT.format(arguments="parallelism_config=ParallelismConfig(dp_shard_size=4)"), "-n", "2", "--cpu"
    )
    assert ran.returncode != 0
    assert (
        "strategy 'fsdp=4' takes 4 ranks, but the run has 2; the nearest that fit 2: fsdp=2; or run 4 ranks (code: "
        in ran.stderr
    )
