"""A resumed run with local SGD, in which each rank has its own parameters and optimizer state, matches an uninterrupted run."""

import os
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator, LocalSGD, ProjectConfiguration, set_seed
from headway.errors import Preempted
from tests.distributed.ranks import run_ranks

ROWS, EPOCHS, LOCAL_STEPS = 40, 2, 3


class Rows(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return torch.randn(6, generator=torch.Generator().manual_seed(index)) * (1 + index % 3)


def make_network():
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
    )


def flatten_own_state(model, optimizer):
    """Return this rank's weights, buffers and optimizer state as one vector."""
    state = [value for each in optimizer.state_dict()["state"].values() for value in each.values()]
    return torch.cat([each.detach().double().flatten() for each in (*model.state_dict().values(), *state)])


def train(folder, end=None, per_epoch=False, local=True, blocking=True, accumulation=1):
    """Train, and return this rank's state after each micro-batch, its final state, and the name of an error that ended the run.

    Args:
        folder: Folder of the run.
        end: ("save", micro-batch) saves and stops there; ("term", micro-batch) sends SIGTERM there; ("after", epoch) saves
            and stops after that epoch's block. Default: none.
        per_epoch: Whether each epoch has its own LocalSGD block, instead of one block around all epochs.
        local: Whether local SGD is enabled.
        blocking: Whether the save blocks.
        accumulation: Micro-batches per update.
    """
    set_seed(7)
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project, gradient_accumulation_steps=accumulation)
    model = make_network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    loader = DataLoader(Rows(), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if accelerator.resume("latest") is None:
        set_seed(11, device_specific=True)
    found = {}

    def block():
        return LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=LOCAL_STEPS, enabled=local)

    def step(epoch, x, inner):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        inner.step()
        place = epoch * 100 + loader.num_consumed
        found[place] = flatten_own_state(model, optimizer)
        if end == ("save", place):
            accelerator.save_state(blocking=blocking)
            raise EOFError
        if end == ("term", place) and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def rounds(inner):
        for epoch in accelerator.epochs(EPOCHS):
            if inner is not None:
                for x in loader:
                    step(epoch, x, inner)
                continue
            with block() as own:
                for x in loader:
                    step(epoch, x, own)
            if end == ("after", epoch):
                accelerator.save_state()
                raise EOFError

    try:
        if per_epoch:
            rounds(None)
        else:
            with block() as outer:
                rounds(outer)
    except (EOFError, Preempted) as error:
        return found, None, type(error).__name__
    finally:
        accelerator.wait_for_save()
    return found, flatten_own_state(model, optimizer), None


def compare_resumed_runs(folder, cases, num_ranks_before=None):
    """Stop and resume a run for each case, and compare it with an uninterrupted run.

    Returns:
        For each case: the error that ended the first part, the micro-batches with differences, whether the final states
        are equal, whether all micro-batches were run, and how many ran after the resume.
    """
    outcomes = {}
    for name, settings in cases.items():
        end = settings.pop("end")
        whole, last, _ = train(f"{folder}/{name}/whole", **settings)
        first, _, how = train(f"{folder}/{name}/cut", end, **settings)
        rest, resumed, _ = train(f"{folder}/{name}/cut", **settings)
        places = [place for place in (*first, *rest) if not torch.equal({**first, **rest}[place], whole[place])]
        outcomes[name] = how, places, torch.equal(last, resumed), sorted({*first, *rest}) == sorted(whole), len(rest)
    return outcomes


CASES = {
    "saved between two averages": {"end": ("save", 16)},
    "saved at an average": {"end": ("save", 12)},
    "in the background": {"end": ("save", 116), "blocking": False},
    "a block an epoch": {"end": ("save", 120), "per_epoch": True},
    "between two blocks": {"end": ("after", 0), "per_epoch": True},
    "asked to end": {"end": ("term", 20)},
    "in the middle of a window": {"end": ("save", 8), "accumulation": 3},
}


def test_resumed_run_matches_uninterrupted_run(tmp_path):
    by_rank = run_ranks(compare_resumed_runs, 2, str(tmp_path), CASES, timeout=240)
    for rank, outcomes in enumerate(by_rank):
        for name, (how, differing, is_same_end, is_all, count) in outcomes.items():
            assert differing == [], (rank, name)
            assert is_same_end, (rank, name)
            assert is_all, (rank, name)
            assert how == ("Preempted" if name == "asked to end" else "EOFError")
            assert count > 0


def save_in_block(folder):
    found, _, _ = train(folder, ("save", 16))
    return found[16]


def resume_and_read_state(folder, local):
    set_seed(7)
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True))
    model = make_network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    model, optimizer, _ = accelerator.prepare(model, optimizer, DataLoader(Rows(), batch_size=2, shuffle=True))
    accelerator.resume("latest")
    return flatten_own_state(model, optimizer)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_run_without_block_or_on_other_ranks_resumes_from_the_mean(num_ranks, tmp_path):
    held = run_ranks(save_in_block, 2, str(tmp_path))
    mean = torch.stack(held).mean(0)
    num_weights = sum(value.numel() for value in make_network().state_dict().values())
    for rank, own in enumerate(run_ranks(resume_and_read_state, num_ranks, str(tmp_path), False)):
        assert torch.allclose(own[:num_weights], mean[:num_weights], atol=1e-6)
        # On the same number of ranks, each rank gets its own optimizer state back.
        expected = held[rank] if num_ranks == 2 else mean
        assert torch.allclose(own[num_weights:], expected[num_weights:], atol=1e-6)
    assert not torch.equal(*held)
    assert Path(tmp_path, "checkpoints", "checkpoint_0").is_dir()
