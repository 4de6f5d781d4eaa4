"""Send weights to another process over a connected socket, without files and without a listening port."""

import json
import math
import socket
from collections.abc import Iterator

import torch

from headway.core.weights.shards import DTYPES, get_dtype_name, get_raw_bytes
from headway.errors import StateError

_BLOCK = 1 << 20
_MAX_HEADER_BYTES = 100_000_000
"""Maximum length of a bucket's header. A larger number was not sent by a `WeightChannel`."""
_DTYPES = {get_dtype_name(dtype): dtype for dtype in DTYPES.values()}
_ACKNOWLEDGED = b"\x06"
"""Answer of the receiver to each bucket. It is the ASCII character ACK."""


class WeightChannel:
    """One end of a socket connection over which one process sends weights and another process receives them.

    Weights are sent in updates. An update is one transfer of all weights, divided into buckets of tensors. Create
    both ends with `socket.socketpair()` and pass one to the other process when it starts. Received data is never
    executed, but its origin is not authenticated either, so both ends must belong to the same run.

    Args:
        connection: Connected stream socket.
        name: Name of the other process, for error messages.
        timeout: Seconds that the other process may stay silent during a transfer. Default: 30.
    """

    def __init__(self, connection: socket.socket, name: str, timeout: float = 30.0) -> None:
        self._connection = connection
        self._name = name
        self._timeout = timeout

    def send(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        """Send a bucket of tensors and wait until it has been received. An empty bucket ends the update of the weights.

        Args:
            bucket: Pairs of (name, dense tensor on any device).

        Raises:
            StateError: If the other process stays silent for longer than `timeout`, has ended, or sends an unexpected
                answer. Its weights might then be a mixture of two updates.
        """
        entries = [[name, get_dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in bucket]
        header = json.dumps(entries).encode()
        self._send_bytes(memoryview(len(header).to_bytes(8, "little") + header))
        for _, tensor in bucket:
            self._send_bytes(memoryview(get_raw_bytes(tensor).numpy()))  # type: ignore[arg-type]
        answer = bytearray(1)
        self._receive_bytes(memoryview(answer), self._timeout)
        if answer != _ACKNOWLEDGED:
            raise StateError(f"{self._name} answered {bytes(answer)!r} to a bucket of weights; it must call receive()")

    def receive(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Wait for an update of the weights, without a time limit, and yield its buckets of (name, CPU tensor) pairs.

        A bucket is acknowledged when the next one is requested. The empty bucket at the end is not yielded.

        Raises:
            StateError: If the sender stays silent for longer than `timeout` during an update, has ended, or sends data
                that is not a bucket.
        """
        while True:
            bucket = self._receive_bucket()
            if bucket:
                yield bucket
            self._send_bytes(memoryview(_ACKNOWLEDGED))
            if not bucket:
                return

    def _receive_bucket(self) -> list[tuple[str, torch.Tensor]]:
        """Wait for a bucket without a time limit, and return its tensors. The last bucket of an update is empty."""
        size = bytearray(8)
        self._receive_bytes(memoryview(size), None)
        length = int.from_bytes(size, "little")
        if length > _MAX_HEADER_BYTES:
            raise StateError(f"{self._name} sent something that is no bucket of weights")
        header = bytearray(length)
        self._receive_bytes(memoryview(header), self._timeout)
        try:
            entries = [
                (str(name), _DTYPES[dtype], [int(n) for n in shape]) for name, dtype, shape in json.loads(header)
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"{self._name} sent something that is no bucket of weights ({error!r})") from error
        bucket = []
        for name, dtype, shape in entries:
            tensor = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
            self._receive_bytes(memoryview(tensor.numpy()), self._timeout)  # type: ignore[arg-type]
            bucket.append((name, tensor.view(dtype).view(shape)))
        return bucket

    def _send_bytes(self, view: memoryview) -> None:
        self._connection.settimeout(self._timeout)
        for start in range(0, len(view), _BLOCK):
            try:
                self._connection.sendall(view[start : start + _BLOCK])
            except OSError as error:
                raise self._make_connection_error(error) from error

    def _receive_bytes(self, view: memoryview, timeout: float | None) -> None:
        self._connection.settimeout(timeout)
        while view:
            try:
                count = self._connection.recv_into(view)
                if not count:
                    raise ConnectionResetError("it closed the connection")
            except OSError as error:
                raise self._make_connection_error(error) from error
            view = view[count:]

    def _make_connection_error(self, error: OSError) -> StateError:
        problem = (
            f"has done nothing for {self._timeout:g} s" if isinstance(error, TimeoutError) else f"is gone ({error})"
        )
        return StateError(
            f"{self._name} {problem} while it received weights, so it may have a mixture of two updates. Restart it and send all "
            "weights again, or pass a longer timeout= to WeightChannel"
        )
