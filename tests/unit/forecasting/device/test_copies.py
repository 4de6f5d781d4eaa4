"""Test copies made by CUDA's kernels, and RMSNorm as one kernel, against figures of torch's allocator on an H100."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from headway.forecasting.device.devices import find_device
from headway.forecasting.device.kernels import substitute_kernels
from headway.forecasting.tracing.storage_tracker import StorageTracker

ROWS = 16 * 196 * 384 * 4


def list_allocations(function, *shape, turned=False):
    """Return the large allocations (positive) and frees of forward and of backward."""
    device, found = find_device("h100"), []
    with substitute_kernels(device, "no"), FakeTensorMode():
        x = torch.empty(shape, requires_grad=True)
        tracker = StorageTracker(device)
        tracker.mark_tensors([x], "batch")
        with tracker:
            outputs = function(x)
        gradient = torch.empty(outputs.mT.shape).mT if turned else torch.empty(outputs.shape)
        tracker.mark_tensors([gradient], "batch")
        found.append(len(tracker.events))
        with tracker:
            held = torch.autograd.grad(outputs, x, gradient)
        sizes = [event.num_bytes if abs(event.num_bytes) > 1 << 16 else 0 for event in tracker.events]
        sizes[0] = sizes[found[0] - 1] = 0  # the marked tensors
        assert held
        return [[size for size in part if size] for part in (sizes[: found[0]], sizes[found[0] :])]


@pytest.mark.parametrize(
    ("function", "forward", "backward"),
    [
        (lambda x: torch.nn.functional.layer_norm(x, (384,)), [ROWS], [ROWS, ROWS, -ROWS]),
        (lambda x: torch.nn.functional.rms_norm(x, (384,)), [ROWS], [ROWS, ROWS, -ROWS]),
        (lambda x: x.softmax(-1), [ROWS], [ROWS, ROWS, ROWS, -ROWS, -ROWS]),
        (lambda x: x.log_softmax(-1), [ROWS], [ROWS, ROWS, -ROWS]),
    ],
)
def test_transposed_gradient_is_copied(function, forward, backward):
    assert list_allocations(function, 16, 196, 384, turned=True) == [forward, backward]
    plain = list_allocations(function, 16, 196, 384)
    assert plain[0] == forward
    assert len(plain[1]) == len(backward) - 2


def test_gathered_values_are_added_into_zeros_in_place():
    """For a tensor subclass such as a fake tensor, torch allocates zeros and then a sum."""
    picks = (
        lambda x: x.index_select(1, torch.zeros(100, dtype=torch.long)),
        lambda x: x.max(1).values,
        lambda x: x[:, torch.zeros(100, dtype=torch.long)],
    )
    for function in picks:
        assert list_allocations(function, 16, 196, 384)[1] == [ROWS]


def test_reduced_losses_allocate_unreduced_ones():
    loss = torch.nn.functional
    assert list_allocations(lambda x: loss.huber_loss(x, x.detach()), 16, 196, 384)[0] == [ROWS, -ROWS]
    logits = list_allocations(lambda x: loss.binary_cross_entropy_with_logits(x, x.detach()), 16, 196, 384)[0]
    assert logits == [ROWS, ROWS, -ROWS, -ROWS]


def test_rms_norm_is_one_kernel_unless_torch_uses_none():
    """With weights in another dtype torch runs single operations, each with a result."""
    device = find_device("h100")
    with substitute_kernels(device, "no"), FakeTensorMode(allow_non_fake_inputs=True):
        norm, rows = torch.nn.RMSNorm(512), torch.empty(64, 512)
        with StorageTracker(device) as tracker:
            norm(rows)
            one = len([event for event in tracker.events if event.num_bytes > 1 << 16])
        with StorageTracker(device) as tracker:
            norm(rows.bfloat16())
            several = len([event for event in tracker.events if event.num_bytes > 1 << 16])
    assert one == 1 < several
