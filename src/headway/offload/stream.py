"""Streaming weights to a device: copied ahead of use in the learnt order, hung into their modules for one forward."""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headway.offload.readahead import Order, Traffic
from headway.weights.names import Place

RING = 3
CHUNK = 64 << 20


class Transport(Protocol):
    """Copies tensors. `start` runs on a thread of its own, `finish` on the thread that computes."""

    traffic: Traffic

    def start(self, home: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin a copy; returns it and what `finish` needs."""

    def finish(self, copy: torch.Tensor, ticket: Any) -> None:
        """Make the present stream wait until the copy is complete."""


class HostTransport:
    """Copies within host memory: the stream's logic on a machine without an accelerator."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def start(self, home: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy, complete on return."""
        begin = time.perf_counter()
        copy = home.detach().clone()
        self.traffic.num_bytes += home.numel() * home.element_size()
        self.traffic.seconds += time.perf_counter() - begin
        return copy, None

    def finish(self, copy: torch.Tensor, ticket: Any) -> None:
        """Nothing to wait for."""


class RingTransport:
    """Copies to an accelerator. Pageable memory and mapped files go through `RING` pinned buffers of `CHUNK` bytes.

    While one buffer travels, the next is filled from the page cache or the disk; pinned tensors travel as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.traffic = Traffic()
        self._stream = torch.Stream(device=device)
        self._buffers: list[torch.Tensor] = []
        self._busy: list[torch.Event | None] = [None] * RING
        self._turn = 0

    def __reduce__(self) -> tuple[type["RingTransport"], tuple[torch.device]]:
        return RingTransport, (self.device,)

    def start(self, home: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Queue the copy on the side stream; returns when the last buffer is on its way."""
        begin = time.perf_counter()
        with self._stream:
            copy = torch.empty_like(home, device=self.device, requires_grad=False)
            if home.is_pinned() or not home.is_contiguous():
                copy.copy_(home.detach(), non_blocking=True)
            else:
                self._through_ring(home.detach(), copy)
            done = torch.Event(device=self.device)
            done.record(self._stream)
        self.traffic.num_bytes += home.numel() * home.element_size()
        self.traffic.seconds += time.perf_counter() - begin
        return copy, done

    def _through_ring(self, home: torch.Tensor, copy: torch.Tensor) -> None:
        if not self._buffers:
            self._buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(RING)]
        source, target = home.view(-1).view(torch.uint8), copy.view(-1).view(torch.uint8)
        for begin in range(0, source.numel(), CHUNK):
            piece = source[begin : begin + CHUNK]
            busy = self._busy[self._turn]
            if busy is not None:
                busy.synchronize()
            buffer = self._buffers[self._turn][: piece.numel()]
            buffer.copy_(piece)
            target[begin : begin + CHUNK].copy_(buffer, non_blocking=True)
            event = self._busy[self._turn] = torch.Event(device=self.device)
            event.record(self._stream)
            self._turn = (self._turn + 1) % RING

    def finish(self, copy: torch.Tensor, ticket: Any) -> None:
        """The present stream waits on the device; the host goes on."""
        stream = torch.accelerator.current_stream(self.device)
        stream.wait_event(ticket)
        # The copy was allocated on the side stream: its memory may be used again only after this stream is done.
        copy.record_stream(stream)


@dataclass
class Copy:
    """A tensor on its way to the device, or there."""

    home: torch.Tensor
    version: int
    future: "Future[tuple[torch.Tensor, Any]]"
    num_bytes: int


@dataclass
class Use:
    """A unit in use: what hung in the module, and the context that autograd saves tensors in."""

    homes: list[torch.Tensor]
    saving: Any


class DeviceStream:
    """Weights that live in host memory or in files and are used on a device.

    A unit's copies hang in its modules while its forward runs; outside of it the modules hold the host's tensors, so
    that a state dict, a save or a look at a weight always sees real values. Copies of the next units are under way
    meanwhile, up to `window` bytes. A tensor that several units use is copied once and stays. What autograd saves of a
    weight for backward is not the copy but the name of its home: it is copied again when backward wants it. A
    trainable tensor is copied when it is used, by an operation that autograd knows, so that its gradient comes home.

    Args:
        units: the tensors that are used together, unit by unit, in the order of registration.
        device: where they are used.
        window: bytes of copies ahead of use. The device holds at most these, the unit in use and the shared tensors.
        transport: how copies are made; None: through a pinned ring.
    """

    def __init__(
        self, units: list[list[Place]], device: torch.device, window: int, transport: Transport | None = None
    ) -> None:
        self._units = units
        self._transport: Transport = transport or RingTransport(device)
        self._device = device
        self._sizes = [sum(p.tensor.numel() * p.tensor.element_size() for p in unit) for unit in units]
        self.order = Order(len(units))
        self.window = max(window, *self._sizes, 1)
        self._reset()

    def _reset(self) -> None:
        self._copies: dict[int, Copy] = {}
        self._uses: dict[int, list[Use]] = {}
        self._expected: list[int] = []
        self._shared: set[int] | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headway-stream")

    def _find_shared(self) -> set[int]:
        """The tensors that several units use, by id."""
        counts = Counter(key for unit in self._units for key in {id(place.tensor) for place in unit})
        return {key for key, count in counts.items() if count > 1}

    @property
    def device(self) -> torch.device:
        """Where weights are used."""
        return self._device

    @property
    def traffic(self) -> Traffic:
        """What was copied."""
        return self._transport.traffic

    @property
    def num_bytes(self) -> int:
        """Bytes of all units."""
        return sum(self._sizes)

    @property
    def bytes_on_device(self) -> int:
        """Bytes of the copies that are there or under way."""
        return sum(copy.num_bytes for copy in self._copies.values())

    def enter(self, unit: int) -> None:
        """Hang the unit's copies into its modules."""
        uses = self._uses.setdefault(unit, [])
        if uses:
            uses.append(Use([], None))  # within itself: its copies hang already
            return
        places = self._units[unit]
        homes = [place.tensor for place in places]
        if self._shared is None:
            self._shared = self._find_shared()
        self.order.note(unit)
        copies = [self._on_device(home) for home in homes]
        saving = None
        if torch.is_grad_enabled():
            saving = torch.autograd.graph.saved_tensors_hooks(*self._saving(homes, copies))
            saving.__enter__()
        uses.append(Use(homes, saving))
        for place, copy in zip(places, copies):
            place.put(copy)
        self._look_ahead(unit)

    def leave(self, unit: int) -> None:
        """Hang the host's tensors back; the copies are dropped unless they are shared or soon wanted again."""
        uses = self._uses.get(unit)
        if not uses:
            return  # its forward never began
        use = uses.pop()
        if uses:
            return
        if use.saving is not None:
            use.saving.__exit__(None, None, None)
        for place, home in zip(self._units[unit], use.homes):
            place.put(home)
        self._drop_unexpected()

    def _on_device(self, home: torch.Tensor) -> torch.Tensor:
        if home.requires_grad and torch.is_grad_enabled():
            return home.to(self._device, copy=True)
        copy = self._copies.get(id(home))
        is_ahead = copy is not None and copy.home is home and copy.version == home._version
        if copy is None or not is_ahead:
            copy = self._start(home)
        start = time.perf_counter()
        try:
            tensor, ticket = copy.future.result()
        except Exception:
            # Kept, it would raise the same error at every later forward.
            del self._copies[id(home)]
            if not is_ahead:
                raise
            return self._on_device(home)  # what stood in its way earlier may be gone
        self.traffic.waited += time.perf_counter() - start
        self._transport.finish(tensor, ticket)
        return tensor

    def _start(self, home: torch.Tensor) -> Copy:
        future = self._worker.submit(self._transport.start, home)
        copy = self._copies[id(home)] = Copy(home, home._version, future, home.numel() * home.element_size())
        return copy

    def _look_ahead(self, unit: int) -> None:
        room = self.window
        self._expected = []
        for following in self.order.ahead():
            if following == unit or following in self._expected or self._sizes[following] > room:
                break
            if self._uses.get(following):
                continue  # a module around this one: its copies hang already
            room -= self._sizes[following]
            self._expected.append(following)
            for place in self._units[following]:
                home = place.tensor
                if not (home.requires_grad and torch.is_grad_enabled()) and id(home) not in self._copies:
                    self._start(home)
        self._drop_unexpected()

    def _drop_unexpected(self) -> None:
        wanted = (self._shared or set()) | {
            id(p.tensor) for following in self._expected for p in self._units[following]
        }
        wanted |= {id(home) for running in self._uses.values() for use in running for home in use.homes}
        for key in [key for key in self._copies if key not in wanted]:
            del self._copies[key]

    def _saving(
        self, homes: list[torch.Tensor], copies: list[torch.Tensor]
    ) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """Hooks that save a weight as its home and its layout, and copy it again for backward."""
        by_memory = {
            copy.untyped_storage().data_ptr(): home for home, copy in zip(homes, copies) if not copy.requires_grad
        }

        def pack(tensor: torch.Tensor) -> Any:
            home = by_memory.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
            if home is None or tensor.dtype != home.dtype:
                return tensor
            return home, tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(saved: Any) -> torch.Tensor:
            if isinstance(saved, torch.Tensor):
                return saved
            home, shape, stride, offset = saved
            copy, ticket = self._worker.submit(self._transport.start, home).result()
            self._transport.finish(copy, ticket)
            return copy.as_strided(shape, stride, offset)

        return pack, unpack

    def __getstate__(self) -> dict[str, Any]:
        """Without thread and copies: a copy of the model makes its own."""
        dropped = ("_worker", "_copies", "_uses", "_expected", "_shared")
        return {name: value for name, value in self.__dict__.items() if name not in dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The modules are being copied as well, and may not hold their tensors yet.
        self.__dict__.update(state)
        self._reset()
