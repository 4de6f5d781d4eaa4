"""Offloaded weights that stream to the second of two toy devices, and checkpoint snapshots of tensors on both devices."""

from pathlib import Path

from tests.accelerator.runs import needs_compiler, run_script

pytestmark = needs_compiler

_STREAMED = """
import copy
import torch
from torch import nn
from headway import cpu_offload, disk_offload, offload_pace

torch.manual_seed(0)
whole = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))).eval()
rows = torch.randn(3, 64)
with torch.no_grad():
    expected = whole(rows)
torch.accelerator.set_device_index(1)
"""


def test_weights_stream_to_the_current_device_within_the_window(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        _STREAMED
        + """
for place in ("cpu", "disk"):
    model = copy.deepcopy(whole)
    model = cpu_offload(model) if place == "cpu" else disk_offload(model, "offload")
    stream = model.headway_execution.stream
    one = stream._sizes[0]
    stream.window = 2 * one
    torch.accelerator.reset_peak_memory_stats(1)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(rows), expected)
    assert str(stream.device) == "toy:1"
    assert stream.peak_bytes == 3 * one
    assert torch.accelerator.max_memory_allocated(1) < 4 * one
    assert torch.accelerator.memory_allocated(0) == 0
    assert all(p.is_pinned() == (place == "cpu") for p in model.parameters())
    assert offload_pace(model).num_passes == 3
    assert torch.equal(copy.deepcopy(model)(rows), model(rows))
    del model, stream
""",
    )


def test_snapshot_of_two_devices_is_queued_without_waiting(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        """
import torch
from headway.core.checkpoint.saving.snapshot import HostCopies

tensors = {"a": torch.ones(300, device="toy:0"), "b": torch.ones(30, device="toy:1"), "c": torch.ones(3)}
snapshot = HostCopies()
torch.toy.forget_waits()
taken = snapshot.copy_tensors(tensors, tensors)
assert not any(torch.toy.waits().values()), torch.toy.waits()
assert [str(each.stream.device) for each in taken.pending_copies] == ["toy:0", "toy:1"]
for each in taken.pending_copies:
    each.wait()
assert torch.toy.waits()["synchronize"] == 2
assert all(torch.equal(taken.tensors[name], value.cpu()) for name, value in tensors.items())
""",
    )
