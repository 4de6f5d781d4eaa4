"""Optional training features on the toy accelerator: automatic micro-batching, offloaded activations, and async saves."""

import json
from pathlib import Path

import pytest

from tests.accelerator.runs import needs_compiler, run

pytestmark = needs_compiler

_LOOP = """
import json, sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from headway import Accelerator, ActivationCheckpointing, set_seed

what = sys.argv[1:]
offloads = [ActivationCheckpointing(policy="keep_all", offload=True)] if "offload" in what else []
accelerator = Accelerator(microbatching="auto" if "pieces" in what else None, on_non_finite="skip", kwargs_handlers=offloads)
set_seed(7)
blocks = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(4)]
model = torch.nn.Sequential(*blocks, torch.nn.Linear(256, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(4096, 256), torch.randint(4, (4096,))), batch_size=2048)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.throughput
losses = []

def loss_of(batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

for _ in range(2):
    for batch in loader:
        losses.append(float(accelerator.forward_backward(batch, loss_of)))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state("saved", blocking=False)
accelerator.wait_for_save()
peak, ooms = torch.accelerator.max_memory_allocated(), torch.accelerator.memory_stats()["num_ooms"]
accelerator.end_training()
assert list(Path("saved").iterdir())
print(json.dumps([losses, peak, ooms]))
"""


def _run_loop(folder: Path, *what: str, **more: str) -> tuple[list[float], int, int, str]:
    (folder / "loop.py").write_text(_LOOP)
    output = run(folder, "loop.py", *what, **more)
    losses, peak, ooms = json.loads(next(line for line in output.splitlines() if line.startswith("[[")))
    return losses, peak, ooms, output


def test_running_out_of_memory_splits_batches_and_keeps_losses(tmp_path: Path) -> None:
    whole, peak, ooms, _ = _run_loop(tmp_path)
    assert ooms == 0
    losses, less, ooms, said = _run_loop(tmp_path, "pieces", TOY_MEMORY=str(peak * 3 // 4))
    # Headway measures the allocator's memory here, so it first splits the batch into quarters and then predicts a size.
    assert (
        "memory ran out on rank 0 with micro-batches of 2048 rows: the batch is replayed in micro-batches of at most 512"
        in said
    )
    assert ooms >= 1
    assert less < peak
    assert losses == pytest.approx(whole, rel=1e-5)


def test_offloading_activations_saves_memory_and_keeps_losses_bitwise(tmp_path: Path) -> None:
    whole, peak, _, _ = _run_loop(tmp_path)
    losses, less, _, _ = _run_loop(tmp_path, "offload")
    assert losses == whole
    assert less < 0.8 * peak
