"""Test that changes by torch's ring attention to the whole process are undone."""

from torch.distributed.tensor import DTensor

from headway.layouts.context.ring_attention import RingAttention, RingDispatcher, torch_attention


def test_last_ring_restores_torch() -> None:
    def read_state() -> tuple[object, list[str]]:
        handlers = DTensor._op_dispatcher._custom_op_handlers
        return torch_attention._cp_options.rotate_method, sorted(map(str, handlers))

    before = read_state()
    known = RingDispatcher()
    rings = [RingAttention(None, "alltoall", known), RingAttention(None, "alltoall", known)]
    during = read_state()
    assert during[0] != before[0]
    assert len(during[1]) > len(before[1])
    rings[0].release()
    assert read_state() == during
    rings[1].release()
    rings[1].release()
    assert read_state() == before
