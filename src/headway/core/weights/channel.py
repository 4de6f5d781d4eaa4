"""Send weights to another process over a connected socket, without files and without a listening port."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import torch

from headway.common.untrusted import PARSE_ERRORS, parse_json, shorten_repr
from headway.core.weights.tensor_bytes import TensorSpec, find_dtype, get_dtype_name, get_raw_bytes
from headway.errors import CheckpointError, StateError

_BLOCK = 1 << 20
"""Bytes per call of `sendall`. The timeout applies to each block."""
_MAX_HEADER_BYTES = 100_000_000
"""Maximum length of a bucket's header. A larger number was not sent by a `WeightChannel`."""
_ACKNOWLEDGED = b"\x06"
"""Answer of the receiver to each bucket. It is the ASCII character ACK."""

_LONGER_TIMEOUT = "or pass a longer timeout= to WeightChannel"
_RECEIVER_FAILED = (
    "while it received weights, so its weights may be a mixture of two updates. Restart it and send all weights again, "
    + _LONGER_TIMEOUT
)
_SENDER_FAILED = (
    "while it sent weights, so this process may have a mixture of two updates. Restart it and let it send all weights again, "
    + _LONGER_TIMEOUT
)
_SENDER_ENDED = "before it sent an update; the weights of this process have not changed since the last complete update"


class WeightChannel:
    """One end of a socket connection over which one process sends weights and another process receives them.

    Weights are sent in updates. An update is one transfer of all weights, divided into buckets of tensors. Create
    both ends with `socket.socketpair()` and pass one to the other process when it starts. Received data is never
    executed, but its origin is not authenticated either, so both ends must belong to the same run.

    Args:
        connection: Connected stream socket. The channel sets its timeout, and does not close it.
        name: Name of the other process, for error messages.
        timeout: Seconds that the other process may stay silent during a transfer. Default: 30.

    Example::

        ours, theirs = socket.socketpair()  # pass `theirs` to the inference process

        # in the training process, on every rank
        channel = WeightChannel(ours, "engine")
        for bucket in accelerator.stream_weights(model):
            if accelerator.is_main_process:
                channel.send(bucket)
        if accelerator.is_main_process:
            channel.send([])  # ends the update

        # in the inference process
        for bucket in WeightChannel(theirs, "trainer").receive():
            replica.load_state_dict(dict(bucket), strict=False)
    """

    def __init__(self, connection: socket.socket, name: str, timeout: float = 30.0) -> None:
        self._connection = connection
        self._name = name
        self._timeout = timeout

    def send(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        """Send a bucket of tensors and wait until it has been received. An empty bucket ends the update of the weights.

        Args:
            bucket: Pairs of (name, dense tensor on any device). Tensors on an accelerator are copied to the host.

        Raises:
            StateError: If the other process stays silent for longer than `timeout`, has ended, or sends an unexpected
                answer. Its weights might then be a mixture of two updates.
        """
        entries = [[name, get_dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in bucket]
        header = json.dumps(entries).encode()
        self._send_bytes(memoryview(len(header).to_bytes(8, "little") + header), _RECEIVER_FAILED)
        for _, tensor in bucket:
            self._send_bytes(memoryview(get_raw_bytes(tensor).numpy()), _RECEIVER_FAILED)  # type: ignore[arg-type]
        answer = bytearray(1)
        self._receive_bytes(memoryview(answer), self._timeout, _RECEIVER_FAILED)
        if answer != _ACKNOWLEDGED:
            raise StateError(f"{self._name} answered {bytes(answer)!r} to a bucket of weights; it must call receive()")

    def receive(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Wait for an update of the weights, without a time limit, and yield its buckets of (name, CPU tensor) pairs.

        A bucket is acknowledged when the next one is requested, so request it before the sender's `timeout` has passed.
        The empty bucket at the end is not yielded. Iterate to the end, because the sender waits for each acknowledgment.

        Raises:
            StateError: If the sender has ended, stays silent for longer than `timeout` within a bucket, or sends data
                that is not a bucket. The message says whether this process may have a mixture of two updates.
        """
        consequence = _SENDER_ENDED
        while True:
            bucket = self._receive_bucket(consequence)
            consequence = _SENDER_FAILED
            if bucket:
                yield bucket
            self._send_bytes(memoryview(_ACKNOWLEDGED), _SENDER_FAILED)
            if not bucket:
                return

    def _receive_bucket(self, consequence: str) -> list[tuple[str, torch.Tensor]]:
        """Wait for a bucket without a time limit, and return its tensors. The last bucket of an update is empty.

        Args:
            consequence: End of the error message if the sender ends before this bucket begins.

        Returns:
            Pairs of (name, tensor in host memory).

        Raises:
            StateError: If the connection is lost, or the received data is not a bucket.
        """
        size = bytearray(8)
        self._receive_bytes(memoryview(size), None, consequence)
        length = int.from_bytes(size, "little")
        if length > _MAX_HEADER_BYTES:
            raise self._make_message_error(f"a header of {length:,} bytes (allowed: {_MAX_HEADER_BYTES:,})")
        header = bytearray(length)
        self._receive_bytes(memoryview(header), self._timeout, _SENDER_FAILED)
        try:
            entries = [_read_entry(entry) for entry in _require_list(parse_json(bytes(header)))]
        except (*PARSE_ERRORS, CheckpointError) as error:
            raise self._make_message_error(f"a header that cannot be read ({error})") from error
        bucket = []
        for name, spec in entries:
            try:
                tensor = torch.empty(spec.num_bytes, dtype=torch.uint8)
                shaped = tensor.view(spec.dtype).view(spec.shape)
            except (*PARSE_ERRORS, RuntimeError) as error:
                raise self._make_message_error(
                    f"{shorten_repr(name)} of shape {shorten_repr([*spec.shape])} and dtype {get_dtype_name(spec.dtype)}, which "
                    f"this process cannot allocate ({str(error).partition(chr(10))[0]})"
                ) from error
            self._receive_bytes(memoryview(tensor.numpy()), self._timeout, _SENDER_FAILED)  # type: ignore[arg-type]
            bucket.append((name, shaped))
        return bucket

    def _make_message_error(self, received: str) -> StateError:
        """Return the error for a message that is not a bucket of weights.

        Args:
            received: Description of what the peer sent.
        """
        return StateError(
            f"{self._name} sent {received}, which is no bucket of weights. A bucket begins with a JSON list of [name, dtype, shape], "
            'such as [["weight", "float32", [2, 3]]], in which sizes are integers of at least 0. Only WeightChannel.send() of the '
            "same version of Headway and torch may write to the connection, from one thread. Restart the sender, open a new "
            "connection, and send all weights again"
        )

    def _send_bytes(self, view: memoryview, consequence: str) -> None:
        """Send bytes to the peer in blocks. Each block must be sent within the timeout.

        Args:
            view: Bytes to send.
            consequence: End of the error message if the peer fails.

        Raises:
            StateError: If the connection is lost, or a block takes too long.
        """
        self._connection.settimeout(self._timeout)
        for start in range(0, len(view), _BLOCK):
            try:
                self._connection.sendall(view[start : start + _BLOCK])
            except OSError as error:
                raise self._make_connection_error(error, consequence) from error

    def _receive_bytes(self, view: memoryview, timeout: float | None, consequence: str) -> None:
        """Fill a buffer with bytes from the peer.

        Args:
            view: Buffer to fill.
            timeout: Maximum time in seconds to wait for each block. None: without limit.
            consequence: End of the error message if the peer fails.

        Raises:
            StateError: If the connection is lost, closed by the peer (`ConnectionResetError` as the cause), or the peer
                sends nothing for too long.
        """
        self._connection.settimeout(timeout)
        while view:
            try:
                count = self._connection.recv_into(view)
                if not count:
                    raise ConnectionResetError("it closed the connection")
            except OSError as error:
                raise self._make_connection_error(error, consequence) from error
            view = view[count:]

    def _make_connection_error(self, error: OSError, consequence: str) -> StateError:
        """Return the error for a lost connection, or for a peer that did nothing until the timeout.

        Args:
            error: Error of the socket.
            consequence: End of the message: what the peer did, which weights may be inconsistent, and what to do.
        """
        is_silent = isinstance(error, TimeoutError)
        problem = f"has done nothing for {self._timeout:g} s" if is_silent else f"is gone ({error})"
        return StateError(f"{self._name} {problem} {consequence}")


def _require_list(header: Any) -> list[Any]:
    """Return a parsed header if it is a list. Raise `TypeError` otherwise."""
    if not isinstance(header, list):
        raise TypeError(f"{shorten_repr(header)} is not a list")
    return header


def _read_entry(entry: Any) -> tuple[str, TensorSpec]:
    """Return the name of a tensor, and its shape and dtype, from an entry of a header.

    Raises:
        TypeError: If the entry is not [name, dtype, shape], or a size is not an integer of at least 0.
        CheckpointError: If this version of torch has no such dtype.
    """
    if not isinstance(entry, list) or len(entry) != 3 or not isinstance(entry[0], str):
        raise TypeError(f"{shorten_repr(entry)} is not [name, dtype, shape]")
    name, dtype, shape = entry
    has_valid_sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not has_valid_sizes:
        raise TypeError(f"{shorten_repr(name)} has the shape {shorten_repr(shape)}")
    return name, TensorSpec(tuple(shape), find_dtype(dtype))
