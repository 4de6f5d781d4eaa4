"""One process on the toy accelerator: device placement, losses, resuming, mixed precision, and memory measurements."""

import json
from pathlib import Path

import pytest

from tests.accelerator.runs import needs_compiler, run, run_script

pytestmark = needs_compiler

LOOP = """
import json, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from headway import Accelerator, set_seed

rate, first, last = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=sys.argv[4])
set_seed(7)
layers = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Dropout(rate), torch.nn.Linear(16, 4)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
rows = TensorDataset(torch.randn(48, 8), torch.randint(4, (48,)))
loader = DataLoader(rows, batch_size=4, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
if first:
    accelerator.load_state("saved")
losses = []
places = set()
for epoch in range(first, last):
    loader.set_epoch(epoch)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        places |= {str(inputs.device), str(targets.device), str(loss.device)}
    if epoch == 0 and not first:
        accelerator.save_state("saved")
places |= {str(each.device) for each in model.parameters()}
places |= {str(each.device) for state in optimizer.state.values() for name, each in state.items() if name != "step"}
print(json.dumps([losses, sorted(places), str(accelerator.device)]))
"""


def run_loop(
    folder: Path, rate: float = 0.0, first: int = 0, last: int = 2, precision: str = "no", **more: str
) -> tuple[list[float], list[str]]:
    """Run LOOP and return its losses and the device names of its tensors."""
    (folder / "loop.py").write_text(LOOP)
    output = run(folder, "loop.py", str(rate), str(first), str(last), precision, **more)
    losses, places, device = json.loads(next(line for line in output.splitlines() if line.startswith("[[")))
    assert device == places[0]
    return losses, places


def test_loop_runs_on_the_toy_device_with_the_losses_of_the_cpu(tmp_path: Path) -> None:
    losses, places = run_loop(tmp_path)
    assert places == ["toy:0"]
    on_cpu, places = run_loop(tmp_path, HEADWAY_DEVICE="cpu")
    assert places == ["cpu"]
    assert losses == on_cpu


def test_resumed_run_matches_uninterrupted_run(tmp_path: Path) -> None:
    whole, _ = run_loop(tmp_path, rate=0.5)
    resumed, _ = run_loop(tmp_path, rate=0.5, first=1)
    assert resumed == whole[12:]
    assert len(set(whole)) > 12


def test_warning_if_the_device_has_no_rng_state_to_save(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    output = run(tmp_path, "loop.py", "0", "0", "1", "no", TOY_WITHOUT="get_rng_state,set_rng_state")
    assert "torch.toy has no get_rng_state: its random state is not in checkpoints" in output


def test_mixed_precision_uses_the_devices_autocast(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    exact, _ = run_loop(tmp_path, last=1)
    for precision in ("bf16", "fp16"):
        losses, _ = run_loop(tmp_path, last=1, precision=precision)
        assert losses != exact
        assert losses == pytest.approx(exact, abs=0.05)


def test_mixed_precision_is_refused_without_autocast_support(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    output = run(tmp_path, "loop.py", "0", "0", "1", "bf16", code=1, TOY_WITHOUT="get_amp_supported_dtype")
    assert "mixed_precision='bf16', but torch.autocast does not cast to bfloat16 on toy devices; use 'no'" in output
    block = """
    import torch
    from headway import Accelerator, AutocastKwargs
    accelerator = Accelerator()
    for options in (None, AutocastKwargs(enabled=False)):
        with accelerator.autocast(options):
            print(torch.ones(2, 2, device=accelerator.device) @ torch.ones(2, 2, device=accelerator.device))
    """
    assert run_script(tmp_path, block, TOY_WITHOUT="get_amp_supported_dtype").count("device='toy:0'") == 2


_MEMORY = """
import torch
from headway import Accelerator
from headway.core.memory.monitor import MemoryMonitor
from headway.core.memory.oom import is_out_of_memory
from headway.core.memory.use import all_memory_use, memory_use

accelerator = Accelerator()
with MemoryMonitor() as monitor:
    kept = torch.empty(1 << 18, device=accelerator.device)
    torch.empty(1 << 20, device=accelerator.device)
found = memory_use()
print(found.device, found.used, found.total, monitor.peak, monitor.source, found.source, sep=" | ")
print(sorted(use.device for use in all_memory_use()))
try:
    torch.empty(1 << 30, device=accelerator.device)
except RuntimeError as error:
    print(is_out_of_memory(error))
"""
_FIGURES = "memory_allocated,memory_reserved,max_memory_allocated,reset_peak_memory_stats,memory_stats,mem_get_info"


@pytest.mark.parametrize("without", ["", _FIGURES])
def test_memory_is_read_from_the_device_module_or_from_torch(tmp_path: Path, without: str) -> None:
    lines = run_script(tmp_path, _MEMORY, TOY_MEMORY=str(64 << 20), TOY_WITHOUT=without).splitlines()
    figures = f"toy:0 | {1 << 20} | {64 << 20} | {5 << 20} | torch's allocator | torch's allocator"
    assert lines == [figures, "['cpu', 'toy:0', 'toy:1']", "True"]


def test_memory_falls_back_to_process_samples_without_allocator_statistics(tmp_path: Path) -> None:
    lines = run_script(tmp_path, _MEMORY, TOY_WITHOUT=_FIGURES, TOY_PLAIN="1").splitlines()
    device, used, total, _, monitor, source = lines[0].split(" | ")
    assert (device, used, total) == ("toy:0", "0", "0")
    assert monitor == "samples of resident memory"
    assert source == "none: torch does not count memory of toy"
    assert lines[1:] == ["['cpu']", "True"]
