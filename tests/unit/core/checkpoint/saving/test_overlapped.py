"""Test saves that copy during the next forward and backward, and contain the state at their call."""

import threading
import time

import pytest
import torch

from headway import Accelerator, ProjectConfiguration
from headway.core.checkpoint.loading.files import verify_checkpoint
from headway.core.checkpoint.saving import snapshot
from headway.core.checkpoint.saving.snapshot import HostCopies, OverlappedCopy, TensorVersions
from headway.errors import CheckpointError
from tests.unit.core.checkpoint.reading import read_tensors


def build_prepared(tmp_path, **options):
    torch.manual_seed(0)
    project = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, overlap_saves=True)
    accelerator = Accelerator(cpu=True, project_config=project, **options)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))


def update(accelerator, model, optimizer):
    for rows in accelerator.microbatches(torch.randn(16, 4)):
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def copy_state(model, optimizer):
    own = {f"model/0/{name}": value.detach().clone() for name, value in model.state_dict().items()}
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, kept in optimizer.state.items():
        own |= {f"optimizer/0/0/{names[id(parameter)]}/{key}": value.clone() for key, value in kept.items()}
    return own


@pytest.fixture
def late_copy(monkeypatch):
    """Delay the copying thread by 0.2 s, and return an event that it sets when it begins."""
    began, real = threading.Event(), OverlappedCopy.wait

    def wait(copy):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.2)
            began.set()
        real(copy)

    monkeypatch.setattr(OverlappedCopy, "wait", wait)
    return began


@pytest.mark.parametrize("microbatching", [None, "auto"])
def test_optimizer_step_waits_for_the_copy(microbatching, tmp_path, late_copy):
    accelerator, model, optimizer = build_prepared(tmp_path, microbatching=microbatching)
    update(accelerator, model, optimizer)
    expected = copy_state(model, optimizer)
    folder = accelerator.save_state(blocking=False)
    assert not late_copy.is_set()
    update(accelerator, model, optimizer)  # forward changes the buffers, and the step changes all other state
    update(accelerator, model, optimizer)
    accelerator.wait_for_save()
    found = dict(read_tensors(folder, verify_checkpoint(folder)))
    changed = copy_state(model, optimizer)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert not torch.equal(changed[name], value), name
    accelerator.end_training()


def test_save_fails_without_the_wait(tmp_path, late_copy, monkeypatch):
    monkeypatch.setattr(HostCopies, "protect_copies", lambda copies: None)
    accelerator, model, optimizer = build_prepared(tmp_path)
    update(accelerator, model, optimizer)
    accelerator.save_state(blocking=False)
    update(accelerator, model, optimizer)
    with pytest.raises(CheckpointError, match="was changed while it was saved"):
        accelerator.wait_for_save()
    accelerator.end_training()


def test_change_by_the_user_is_detected(tmp_path, late_copy):
    accelerator, model, optimizer = build_prepared(tmp_path)
    update(accelerator, model, optimizer)
    folder = accelerator.save_state(blocking=False)
    with torch.no_grad():
        next(model.parameters()).clamp_(-0.1, 0.1)
    with pytest.raises(CheckpointError, match=r"model/0/0\.weight was changed while it was saved"):
        accelerator.wait_for_save()
    assert not folder.exists()
    accelerator.save_state(blocking=False)  # the next save works
    accelerator.wait_for_save()
    accelerator.end_training()


def test_first_thread_to_need_the_copy_makes_it():
    source, target = torch.arange(4.0), torch.zeros(4)
    copy = OverlappedCopy([(target, source)], TensorVersions({("x", 0): source}))
    copy.protect_copies()
    source.add_(1)
    copy.wait()
    assert target.tolist() == [0, 1, 2, 3]


def test_copies_on_a_device_use_a_separate_stream(monkeypatch):
    told = []

    class Stream:
        def __init__(self, device):
            self.device = device

        def record_position(self):
            return "here"

        def begin_copies(self, after):
            told.append(f"after {after}")

        def copy(self, target, source):
            told.append(tuple(source.shape))

        def end_copies(self):
            told.append("end")
            return "done"

    monkeypatch.setattr(snapshot, "CopyStream", Stream)
    monkeypatch.setattr(
        HostCopies,
        "_prepare_buffers",
        lambda copies, sources: {key: torch.empty(each.shape) for key, each in sources.items()},
    )
    tensors = {"optimizer/0/x": torch.empty(3, device="meta"), "rest": torch.ones(2)}
    taken = HostCopies().copy_overlapped(tensors, set(tensors), {"optimizer/0/x"})
    assert told == ["after here", (3,), "end"]
    assert [each.end for each in taken.pending_copies] == ["done"]
    assert torch.equal(taken.tensors["rest"], torch.ones(2))
