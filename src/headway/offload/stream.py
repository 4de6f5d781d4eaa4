"""Streaming weights to a device: copied ahead of use in the learnt order, hung into their modules for one forward."""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from headway.memory.oom import is_out_of_memory
from headway.offload.readahead import ReadTraffic, UnitReader
from headway.offload.transport import HostTransport
from headway.weights.names import TensorLocation


@dataclass(eq=False)
class PendingWeightCopy:
    """A tensor on its way to the device, or there.

    Attributes:
        home: what it is a copy of.
        version: of its values.
        tensor: on the device.
        future: gives what the transport needs to finish it.
        is_ahead: it was started before it was wanted.
        is_awaited: the computation has been told to wait for it.
    """

    home: torch.Tensor
    version: int
    tensor: torch.Tensor
    future: "Future[Any]"
    is_ahead: bool
    is_awaited: bool = False

    def is_of(self, home: torch.Tensor) -> bool:
        """Has it the values that `home` has now, or will it have them?"""
        has_failed = self.future.done() and self.future.exception() is not None
        return self.home is home and self.version == home._version and not has_failed


@dataclass
class WeightUse:
    """A unit in use: what hung in the module, and the context that autograd saves tensors in."""

    homes: list[torch.Tensor]
    saving: Any


class DeviceStream(UnitReader):
    """Weights that live in host memory or in files and are used on a device.

    A unit's copies hang in its modules while its forward runs; outside of it the modules hold the host's tensors, so
    that a state dict, a save or a look at a weight always sees real values. Copies of the next units are under way
    meanwhile, up to `window` bytes. A tensor that several units use is copied once and stays. What autograd saves of a
    weight for backward is not the copy but the name of its home: it is copied again when backward wants it. A
    trainable tensor is copied when it is used, by an operation that autograd knows, so that its gradient comes home.

    The host runs ahead of the device, so that dropping a copy here does not mean that the device has used it. A new
    copy takes over the memory of a dropped one in the computation's own queue, and is queued behind all that was computed with
    that: it waits on the device for the unit that left the window, while the host goes on. So `active_bytes` is what
    weights take there, however far ahead the host is.

    Args:
        units: the tensors that are used together, unit by unit, in the order of registration.
        device: where they are used.
        window: bytes of copies ahead of use. The device holds at most these, the unit in use and the shared tensors.
        transport: how copies are made.

    Attributes:
        active_bytes: bytes of weights on the device: copies that are there or under way, or let go before they had arrived. Not in
            it is what autograd holds: trainable weights of the present step, and a weight that backward copies again.
        peak_bytes: the most that `active_bytes` has been.
    """

    _NOT_COPIED = ("_worker", "_copies", "_leaving", "_uses", "_expected", "_shared")

    def __init__(
        self, units: list[list[TensorLocation]], device: torch.device, window: int, transport: HostTransport
    ) -> None:
        super().__init__(units, window)
        self._transport = transport
        self.device = device
        self._reset()

    def _reset(self) -> None:
        self._copies: dict[int, PendingWeightCopy] = {}
        self._leaving: list[PendingWeightCopy] = []
        self.active_bytes = self.peak_bytes = 0
        self._uses: dict[int, list[WeightUse]] = {}
        self._expected: list[int] = []
        self._shared: set[int] | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headway-stream")
        weakref.finalize(self, _abandon, self._copies, self._leaving, self._transport).atexit = False

    def _find_shared(self) -> set[int]:
        """The tensors that several units use, by id."""
        counts = Counter(key for unit in self._units for key in {id(place.tensor) for place in unit})
        return {key for key, count in counts.items() if count > 1}

    @property
    def traffic(self) -> ReadTraffic:
        """What was copied."""
        return self._transport.traffic

    def mark(self) -> Any:
        """How far the computation has queued its work; None where it computes at once."""
        return self._transport.mark()

    def enter(self, unit: int) -> None:
        """Hang the unit's copies into its modules."""
        uses = self._uses.setdefault(unit, [])
        if uses:
            uses.append(WeightUse([], None))  # within itself: its copies hang already
            return
        places = self._units[unit]
        homes = [place.tensor for place in places]
        if self._shared is None:
            self._shared = self._find_shared()
        self.order.note(unit)
        self._start(homes)
        copies = [self._on_device(home) for home in homes]
        saving = None
        if torch.is_grad_enabled():
            saving = torch.autograd.graph.saved_tensors_hooks(*self._saving(homes, copies))
            saving.__enter__()
        uses.append(WeightUse(homes, saving))
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

    def _is_copied_by_autograd(self, home: torch.Tensor) -> bool:
        return home.requires_grad and torch.is_grad_enabled()

    def _on_device(self, home: torch.Tensor) -> torch.Tensor:
        if self._is_copied_by_autograd(home):
            return home.to(self.device, copy=True)
        copy = self._copies[id(home)]
        start = time.perf_counter()
        try:
            ticket = copy.future.result()
        except Exception:
            # Kept, it would raise the same error at every later forward.
            self._let_go([id(home)])
            if not copy.is_ahead:
                raise
            self._start([home])  # what stood in its way earlier may be gone
            return self._on_device(home)
        self.traffic.waited += time.perf_counter() - start
        self._transport.finish(copy.tensor, ticket)
        copy.is_awaited = True
        return copy.tensor

    def _start(self, homes: Iterable[torch.Tensor], is_ahead: bool = False) -> None:
        """Have those copied that are not, or whose copies have failed or are of old values."""
        wanted = {id(home): home for home in homes if not self._is_copied_by_autograd(home)}
        for key, home in list(wanted.items()):
            copy = self._copies.get(key)
            if copy is not None and copy.is_of(home):
                del wanted[key]
            elif copy is not None:
                self._let_go([key])
        memory = [self._transport.allocate(home) for home in wanted.values()]
        # After the memory was given: what used it before is in the computation's queue.
        after = self._transport.mark() if memory else None
        for (key, home), tensor in zip(wanted.items(), memory):
            future = self._worker.submit(self._transport.start, home, tensor, after)
            self._copies[key] = PendingWeightCopy(home, home._version, tensor, future, is_ahead)
            self.active_bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.active_bytes)

    def _let_go(self, keys: Iterable[int]) -> None:
        """Drop copies. One that may still be written to keeps its memory until the computation waits for it."""
        for key in keys:
            copy = self._copies.pop(key)
            if copy.is_awaited or copy.future.cancel():
                self.active_bytes -= copy.tensor.nbytes
            else:
                self._leaving.append(copy)
        for copy in [copy for copy in self._leaving if copy.future.done()]:
            if copy.future.exception() is None:
                self._transport.finish(copy.tensor, copy.future.result())
            self._leaving.remove(copy)
            self.active_bytes -= copy.tensor.nbytes

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
        self._drop_unexpected()
        for following in self._expected:
            homes = [place.tensor for place in self._units[following]]
            missing = [h for h in homes if id(h) not in self._copies and not self._is_copied_by_autograd(h)]
            try:
                if missing:
                    self._start(missing, is_ahead=True)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                break  # what is wanted later may find room later

    def _drop_unexpected(self) -> None:
        wanted = (self._shared or set()) | {
            id(p.tensor) for following in self._expected for p in self._units[following]
        }
        wanted |= {id(home) for running in self._uses.values() for use in running for home in use.homes}
        self._let_go([key for key in self._copies if key not in wanted])

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
            copy = self._transport.allocate(home)
            ticket = self._worker.submit(self._transport.start, home, copy, self._transport.mark()).result()
            self._transport.finish(copy, ticket)
            return copy.as_strided(shape, stride, offset)

        return pack, unpack


def _abandon(copies: dict[int, PendingWeightCopy], leaving: list[PendingWeightCopy], transport: HostTransport) -> None:
    """A stream is gone: memory that is still written to must not go on before that has ended.

    On any thread, also on the one that copies; so it waits for no thread.
    """
    for copy in (*copies.values(), *leaving):
        if not copy.is_awaited and not copy.future.cancel():
            copy.future.add_done_callback(partial(_drain, transport, copy.tensor))


def _drain(transport: HostTransport, kept: torch.Tensor, done: "Future[Any]") -> None:
    """`kept` is held until the device has done all that was queued for it."""
    transport.drain()
