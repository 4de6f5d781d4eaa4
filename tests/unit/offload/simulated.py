"""Simulated accelerator with two queues that run only when they are waited for.

Its allocator reuses memory in the order of the computation, as torch's does on a GPU. It replaces the copy stream to a real
device. Queued work runs in any order that the events allow, drawn from a seed. A copy that does not wait for work that still
reads its memory, or a computation that does not wait for its copy, gives wrong values here.
"""

import random
import threading
import weakref
from collections import deque

import torch


class SimulatedPoint:
    """Point in one of the two queues."""

    def __init__(self, lane, queue):
        self.lane, self.queue, self.time = lane, queue, None

    def is_reached(self):
        return self.time is not None

    def wait(self):
        self.lane.run(until=self)

    def measure_seconds_until(self, later):
        return later.time - self.time


class SimulatedLane:
    """`headway.core.runtime.copy_stream.CopyStream` without a device.

    Args:
        seed: Seed for the order in which the queues run.
        bandwidth: Bytes per second of copies. Computing takes no time.
        can_pin: False simulates a system without pinned memory.

    """

    def __init__(self, seed=0, bandwidth=1e9, can_pin=True):
        self.queues = {"compute": deque(), "copies": deque()}
        self.random, self.lock = random.Random(seed), threading.RLock()
        self.bandwidth, self.can_pin, self.clock = bandwidth, can_pin, 0.0
        self.free, self.blocks, self.pinned_at, self.bound = {}, {}, set(), set()
        self.num_bytes = 0  # largest device memory needed at once
        self.num_copied = self.num_computed = self.most_ahead = 0

    # ------------------------------------------------ device

    def put(self, queue, condition, act):
        with self.lock:
            self.queues[queue].append((condition, act))

    def point(self, queue):
        made = SimulatedPoint(self, queue)

        def act():
            made.time = self.clock

        self.put(queue, None, act)
        return made

    def run(self, until=None):
        """Run the queued work up to a point. Raise an error if it waits for work that was never queued."""
        with self.lock:
            while until is None or not until.is_reached():
                ready = [q for q in self.queues.values() if q and (q[0][0] is None or q[0][0].is_reached())]
                if not ready:
                    assert not any(self.queues.values()), "the device waits forever"
                    return
                self.random.choice(ready).popleft()[1]()

    def compute(self, tensor, act):
        """Queue `act(values)` for the memory of a tensor. Queued work does not keep a tensor alive."""
        block = self.blocks[tensor.data_ptr()]

        def run():
            self.num_computed += 1
            act(block.clone())

        self.put("compute", None, run)

    # ------------------------------------------------ interface of a copy stream

    def bind_device(self):
        self.bound.add(threading.get_ident())

    def allocate(self, like):
        kind = (like.dtype, like.numel())
        with self.lock:
            block = self.free[kind].pop() if self.free.get(kind) else torch.zeros(like.numel(), dtype=like.dtype)
            if block.data_ptr() not in self.blocks:
                self.blocks[block.data_ptr()] = block
                self.num_bytes += block.nbytes
        with torch.no_grad():
            tensor = block.view(like.shape)
        weakref.finalize(tensor, self.give_back, kind, block)
        return tensor

    def give_back(self, kind, block):
        self.free.setdefault(kind, []).append(block)

    def record_position(self):
        return self.point("compute")

    def begin_copies(self, after):
        assert threading.get_ident() in self.bound
        self.put("copies", after, lambda: None)
        return self.point("copies")

    def copy(self, target, source):
        assert threading.get_ident() in self.bound
        # Not the tensor itself, because queued work does not keep it alive. A real copy increases the version counter when it
        # is queued, not when it runs, so `data`, which has a counter of its own.
        memory = target.data

        def run():
            memory.copy_(source)
            self.clock += source.nbytes / self.bandwidth
            self.num_copied += 1
            self.most_ahead = max(self.most_ahead, self.num_copied - self.num_computed)

        self.put("copies", None, run)
        if not self.is_pinned(source):
            self.end_copies().wait()  # like torch with ordinary memory

    def end_copies(self):
        return self.point("copies")

    def order_after_copy(self, copy, allocated, done):
        self.put("compute", done, lambda: None)

    def drain(self):
        self.end_copies().wait()

    def allocate_pinned(self, num_bytes):
        if not self.can_pin:
            raise RuntimeError("CUDA error: out of memory")
        made = torch.zeros(num_bytes, dtype=torch.uint8)
        self.pinned_at.add(made.untyped_storage().data_ptr())
        return made

    def is_pinned(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.pinned_at
