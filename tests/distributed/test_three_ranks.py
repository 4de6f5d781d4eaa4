"""With three or more ranks, a sum's last bits depend on the position in DDP's buckets, so a resumed run restores their order."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DistributedDataParallelKwargs, ProjectConfiguration, set_seed
from tests.distributed.ranks import run_ranks

OPTIONS = {
    "as they are": {},
    "gradients in buckets": {"gradient_as_bucket_view": True},
    "many buckets": {"bucket_cap_mb": 0.0005},
    "no other layout": {"find_unused_parameters": True},
}


def train(folder, options, stop_after=None):
    """Train, and return the sum of weights after each update since the start, and how often the script's gradient hook ran."""
    set_seed(7)
    seen = []
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)],
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True),
    )  # fmt: skip
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 12), torch.nn.LayerNorm(12), torch.nn.Tanh(), torch.nn.Linear(12, 12), torch.nn.Linear(12, 1)
    )
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    data = TensorDataset(torch.randn(37, 6, generator=torch.Generator().manual_seed(1)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
    accelerator.resume("latest")
    sums = []
    for _ in accelerator.epochs(3):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            sums.append(sum(parameter.double().sum().item() for parameter in model.parameters()))
            if accelerator.num_updates == stop_after:
                accelerator.save_state()
                return sums, len(seen)
    return sums, len(seen)


def run_whole_and_in_two(folder, options):
    whole, _ = train(f"{folder}/whole", options)
    found = []
    for stop_after in (1, 6):
        first, _ = train(f"{folder}/{stop_after}", options, stop_after)
        rest, seen = train(f"{folder}/{stop_after}", options)
        found.append((first == whole[:stop_after], rest == whole[stop_after:], len(rest) == seen))
    return found


@pytest.mark.parametrize("options", OPTIONS)
def test_resumed_run_sums_gradients_in_the_same_order(options, tmp_path):
    for found in run_ranks(run_whole_and_in_two, 3, str(tmp_path), OPTIONS[options]):
        assert found == [(True, True, True)] * 2
