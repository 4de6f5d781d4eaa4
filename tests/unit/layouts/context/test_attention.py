"""What torch's ring attention changes for the whole process is changed back."""

from torch.distributed.tensor import DTensor

from headway.layouts.context.attention import RingAttention, RingDispatcher, attention


def test_the_last_ring_leaves_torch_as_it_was() -> None:
    def state() -> tuple[object, list[str]]:
        handlers = DTensor._op_dispatcher._custom_op_handlers
        return attention._cp_options.rotate_method, sorted(map(str, handlers))

    before = state()
    known = RingDispatcher()
    rings = [RingAttention(None, "alltoall", known), RingAttention(None, "alltoall", known)]
    during = state()
    assert during[0] != before[0]
    assert len(during[1]) > len(before[1])
    rings[0].release()
    assert state() == during
    rings[1].release()
    rings[1].release()
    assert state() == before
