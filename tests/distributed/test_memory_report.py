"""If a launched run runs out of memory on one rank, its report and failure.json say what used the memory."""

import json
import sys

import pytest

from tests.distributed.test_launch import launch

TRAIN = """
import resource, sys
import torch
from headway import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(20)])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(8, 512)).sum(), weight=8)
optimizer.step()
if accelerator.process_index == 1:
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (200 << 20),) * 2)
hidden = model(torch.ones(8192 if accelerator.process_index == 1 else 8, 512))
accelerator.wait_for_everyone()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space by RLIMIT_AS")
def test_failure_report_says_what_used_the_memory(tmp_path):
    result = launch(tmp_path, TRAIN, "-n", "2", "--cpu", "--log-dir", "logs")
    assert result.returncode == 1
    (report,) = tmp_path.glob("logs/**/failure.json")
    first = json.loads(report.read_text())["first"]
    assert first["rank"] == 1
    for text in (result.stderr, first["record"]["trace"]):
        assert text.count("headway: memory ran out on cpu: 16.0 MiB were asked for") == 1
        report_text = text[text.index("headway: memory ran out") :]
        assert "parameters" in report_text
        assert "optimizer state" in report_text
        assert "saved by GeluBackward0" in report_text
        assert "accelerator.checkpoint_activations(model): up to" in report_text
