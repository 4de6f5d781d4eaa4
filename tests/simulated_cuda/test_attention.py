"""The attention kernel that a forecast predicts compared with torch's own choice, on each kind of device."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import itertools, torch
from headway.forecasting.device.attention import AttentionRules
torch.backends.cuda.enable_cudnn_sdp(True)
NAMES = ("math", "flash", "efficient", "cudnn")
choice = AttentionRules(torch.cuda.get_device_capability(), tuple(map(int, torch.__version__.split(".")[:2])))
differing, found = [], set()
grid = itertools.product(
    (torch.float32, torch.float16, torch.bfloat16), (4, 8, 30, 40, 60, 64, 128, 136, 192, 248, 256, 264), (8, 2), (512, 128),
    (None, "bools", "numbers", "learned"), (False, True), (False, True), (0.0, 0.1),
)
for case in grid:
    dtype, width, groups, length, kind, causal, trains, p = case
    query = torch.empty(2, 8, length, width, device="cuda", dtype=dtype, requires_grad=trains)
    key = torch.empty(2, groups, 512, width, device="cuda", dtype=dtype, requires_grad=trains)
    mask = None if kind is None else torch.empty(
        2, 1, length, 512, device="cuda", dtype=torch.bool if kind == "bools" else dtype, requires_grad=kind == "learned"
    )
    theirs = NAMES[torch._fused_sdp_choice(query, key, key, mask, p, causal, enable_gqa=groups != 8)]
    ours = choice.choose_kernel(query, key, mask, p, causal, trains)
    found.add(theirs)
    if ours != theirs:
        differing.append((case, theirs, ours))
assert not differing, (len(differing), differing[:5])
print(*sorted(found))
"""


@pytest.mark.parametrize(
    ("device", "kernels"),
    [
        ("h100", "cudnn efficient flash math"),
        ("b200", "cudnn efficient flash math"),
        ("a100-80gb", "efficient flash math"),
        ("t4", "efficient math"),
    ],
)
def test_predicted_kernel_matches_torchs_choice_in_9216_cases(device: str, kernels: str) -> None:
    pytest.importorskip("simulated_cuda")
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env={**os.environ, "SIMULATED_CUDA": device, "SIMULATED_CUDA_VALUES": "0"},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == kernels.split()
