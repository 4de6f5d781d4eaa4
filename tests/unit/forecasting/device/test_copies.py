"""Copies that CUDA's kernels make, and RMSNorm as one kernel: figures of torch's allocator in the CUDA build (H100)."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from headway.forecasting.device.devices import find_device
from headway.forecasting.device.kernels import substitute_kernels
from headway.forecasting.tracing.trace import StorageTracker

ROWS = 16 * 196 * 384 * 4


def asked(function, *shape, turned=False):
    """Return the large allocations (positive) and frees of forward and backward, by the gradient's layout."""
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
        sizes[0] = sizes[found[0] - 1] = 0  # what was marked
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
def test_a_gradient_that_does_not_lie_in_a_row_is_copied(function, forward, backward):
    assert asked(function, 16, 196, 384, turned=True) == [forward, backward]
    plain = asked(function, 16, 196, 384)
    assert plain[0] == forward
    assert len(plain[1]) == len(backward) - 2


def test_what_picks_values_out_adds_into_zeros_in_place():
    """For a subclass such as a fake tensor, torch allocates zeros and then a sum."""
    picks = (
        lambda x: x.index_select(1, torch.zeros(100, dtype=torch.long)),
        lambda x: x.max(1).values,
        lambda x: x[:, torch.zeros(100, dtype=torch.long)],
    )
    for function in picks:
        assert asked(function, 16, 196, 384)[1] == [ROWS]


def test_losses_that_are_reduced_ask_for_each_elements_own():
    loss = torch.nn.functional
    assert asked(lambda x: loss.huber_loss(x, x.detach()), 16, 196, 384)[0] == [ROWS, -ROWS]
    logits = asked(lambda x: loss.binary_cross_entropy_with_logits(x, x.detach()), 16, 196, 384)[0]
    assert logits == [ROWS, ROWS, -ROWS, -ROWS]


def test_rms_norm_is_one_kernel_and_differs_where_torch_takes_none():
    """Weights in another dtype: torch's own operations, each with a result."""
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
