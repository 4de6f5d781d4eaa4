"""Background saves from one and two CUDA devices: the snapshot has the values at the time of the call, and the loop
does not wait.
"""

import pytest
import torch
from torch import nn

from headway import Accelerator, ProjectConfiguration
from headway.core.checkpoint.saving.snapshot import HostCopies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine shows none"),
]


def keep_busy(device: torch.device) -> None:
    """Keep the device busy for about half a second."""
    with torch.cuda.device(device):
        torch.cuda._sleep(10**9)  # cycles: half a second


def test_a_snapshot_is_of_the_moment_and_nobody_waits_for_it() -> None:
    devices = [torch.device("cuda", n) for n in range(min(2, torch.cuda.device_count()))]
    tensors = {str(device): torch.full((1 << 20,), 3.0, device=device) for device in devices}
    snapshot = HostCopies()
    snapshot.copy_tensors(tensors, tensors)  # allocates the pinned memory
    for device in devices:
        keep_busy(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        taken = snapshot.copy_tensors(tensors, tensors)
        for tensor in tensors.values():
            tensor.add_(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not any(copy.is_reached() for copy in taken.pending_copies)
    for copy in taken.pending_copies:
        copy.wait()
    assert all(tensor.is_pinned() and (tensor == 3).all() for tensor in taken.tensors.values())


def test_training_goes_on_beside_the_save(tmp_path) -> None:
    accelerator = Accelerator(project_config=ProjectConfiguration(project_dir=str(tmp_path)))
    model = nn.Linear(1024, 1024)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    inputs = torch.randn(64, 1024, device="cuda")

    def update() -> None:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    update()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    keep_busy(accelerator.device)
    accelerator.save_state(str(tmp_path / "saved"), blocking=False)
    for _ in range(5):
        update()
    accelerator.wait_for_save()
    assert not torch.equal(model.weight, expected["weight"])
    accelerator.load_state(str(tmp_path / "saved"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_large_copies_are_in_registered_memory() -> None:
    tensors = {str(number): torch.full((1 << 25,), float(number), device="cuda") for number in range(4)}
    snapshot = HostCopies()
    for _ in range(2):
        taken = snapshot.copy_tensors(tensors, tensors)
        for copy in taken.pending_copies:
            copy.wait()
        for number, tensor in enumerate(taken.tensors.values()):
            assert tensor.is_pinned()
            assert (tensor == number).all()


def test_a_blocking_save_reads_the_device_from_several_threads(tmp_path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accelerator.save_state(str(tmp_path / "saved"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path / "saved"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
