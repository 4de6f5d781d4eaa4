"""Buckets of weights to another process over a connected socket: no files, and no port that others could reach."""

import json
import math
import socket
from collections.abc import Iterator

import torch

from headway.errors import StateError
from headway.weights.shards import DTYPES, dtype_name, raw_bytes

_BLOCK = 1 << 20
_MOST_NAMES = 100_000_000
_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES.values()}
_TAKEN = b"\x06"


class WeightChannel:
    """One end of a connection, over which one process sends weights and another takes them up.

    `socket.socketpair()` makes both ends; the other process gets one of them when it is started. Both ends must be of the same run:
    nothing that comes is executed, but nothing proves where it came from either.

    Args:
        connection: a connected stream socket.
        name: of the other process, for errors.
        timeout: seconds for which the other one may do nothing while a bucket is on its way.
    """

    def __init__(self, connection: socket.socket, name: str, timeout: float = 30.0) -> None:
        self._connection = connection
        self._name = name
        self._timeout = timeout

    def send(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        """Send a bucket, and wait until it has been taken up; an empty one ends the update.

        Raises:
            StateError: the other process does nothing for too long, or is gone; its weights are a mixture now.
        """
        entries = [[name, dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in bucket]
        header = json.dumps(entries).encode()
        self._put(memoryview(len(header).to_bytes(8, "little") + header))
        for _, tensor in bucket:
            self._put(memoryview(raw_bytes(tensor).numpy()))  # type: ignore[arg-type]
        answer = bytearray(1)
        self._take(memoryview(answer), self._timeout)
        if answer != _TAKEN:
            raise StateError(f"{self._name} answered {bytes(answer)!r} to a bucket of weights; it must call receive()")

    def receive(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Wait for an update, however long, and give its buckets; each counts as taken up when the next one is asked for.

        Raises:
            StateError: the sender stops within an update, is gone, or sends something else.
        """
        while True:
            bucket = self._bucket()
            if bucket:
                yield bucket
            self._put(memoryview(_TAKEN))
            if not bucket:
                return

    def _bucket(self) -> list[tuple[str, torch.Tensor]]:
        size = bytearray(8)
        self._take(memoryview(size), None)
        length = int.from_bytes(size, "little")
        if length > _MOST_NAMES:
            raise StateError(f"{self._name} sent something that is no bucket of weights")
        header = bytearray(length)
        self._take(memoryview(header), self._timeout)
        try:
            entries = [
                (str(name), _DTYPES[dtype], [int(n) for n in shape]) for name, dtype, shape in json.loads(header)
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"{self._name} sent something that is no bucket of weights ({error!r})") from error
        bucket = []
        for name, dtype, shape in entries:
            tensor = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
            self._take(memoryview(tensor.numpy()), self._timeout)  # type: ignore[arg-type]
            bucket.append((name, tensor.view(dtype).view(shape)))
        return bucket

    def _put(self, view: memoryview) -> None:
        self._connection.settimeout(self._timeout)
        for start in range(0, len(view), _BLOCK):
            try:
                self._connection.sendall(view[start : start + _BLOCK])
            except OSError as error:
                raise self._lost(error) from error

    def _take(self, view: memoryview, timeout: float | None) -> None:
        self._connection.settimeout(timeout)
        while view:
            try:
                count = self._connection.recv_into(view)
                if not count:
                    raise ConnectionResetError("it closed the connection")
            except OSError as error:
                raise self._lost(error) from error
            view = view[count:]

    def _lost(self, error: OSError) -> StateError:
        told = f"has done nothing for {self._timeout:g} s" if isinstance(error, TimeoutError) else f"is gone ({error})"
        return StateError(
            f"{self._name} {told} while weights were on their way: what it has may be a mixture of two updates. Start it again, and "
            "send all weights again; or give WeightChannel a longer timeout="
        )
