"""Key-value store whose values carry an HMAC, so that values written by other programs are detected."""

from collections.abc import Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

from headway.common.sealing import Seal
from headway.errors import ControlPlaneError


class SealedStore:
    """Key-value store whose values are authenticated with the run's secret.

    Args:
        store: torch store that keeps the values.
        name: Name that distinguishes this store from the run's other stores. A value is valid only in the store and
            under the key for which it was written.
        seal: Object that computes and checks HMACs with the run's secret.
    """

    def __init__(self, store: Store, name: str, seal: Seal) -> None:
        self._store = store
        self._name = name
        self._seal = seal

    def set(self, key: str, value: bytes) -> None:
        """Write a value together with its HMAC, which is valid for this store and key only."""
        self._store.set(key, self._seal.seal_message(f"{self._name}/{key}", value))  # type: ignore[arg-type]

    def find(self, key: str) -> bytes | None:
        """Return the value of `key`, or None if the key does not exist or its value was not written by this run."""
        return self._open_value(key, self._store.get(key)) if self._store.check([key]) else None

    def get(self, key: str) -> bytes:
        """Wait until `key` exists, as torch's store does, and return its value.

        Raises:
            ControlPlaneError: If the value was not written by this run.
        """
        return self._open_or_raise(key, self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all the given keys exist, as torch's store does, and return their values in one request.

        Raises:
            ControlPlaneError: If a value was not written by this run.
        """
        return [self._open_or_raise(key, value) for key, value in zip(keys, self._store.multi_get(list(keys)))]

    def set_once(self, key: str, value: bytes) -> bytes:
        """Write a value unless the key already has one. Return the value that the key has afterwards.

        Raises:
            ControlPlaneError: If the key already has a value that was not written by this run.
        """
        sealed = self._seal.seal_message(f"{self._name}/{key}", value)
        return self._open_or_raise(key, self._store.compare_set(key, "", sealed))  # type: ignore[arg-type, unused-ignore]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all the given keys exist. Their values are not read or checked."""
        return bool(self._store.check(list(keys)))

    def add(self, key: str, number: int) -> int:
        """Add `number` to a counter, and return its new total. Counters carry no HMAC."""
        return self._store.add(key, number)

    def reset(self, key: str) -> None:
        """Set a counter to 0 without waiting for the server."""
        self._store.set(key, "0")

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it existed."""
        return self._store.delete_key(key)

    def _open_value(self, key: str, sealed: bytes) -> bytes | None:
        """Return a value without its HMAC, or None if it was not written by this run. Such a value is counted, for a warning.

        Args:
            key: Key of the value.
            sealed: Bytes in the store.
        """
        value = self._seal.open_message(f"{self._name}/{key}", sealed)
        if value is None:
            description = (
                f"the value of {key!r} in the {self._name} store, of another program or with another HEADWAY_SECRET,"
            )
            self._seal.unsealed_counter.count_message(description)
        return value

    def _open_or_raise(self, key: str, sealed: bytes) -> bytes:
        """Return a value without its HMAC. Raise `ControlPlaneError` if the value was not written by this run.

        Args:
            key: Key of the value.
            sealed: Bytes in the store.
        """
        value = self._open_value(key, sealed)
        if value is None:
            raise ControlPlaneError(
                f"the value of {key!r} in the {self._name} store was not written by this run: another program reaches its port, or "
                "HEADWAY_SECRET (--secret) is not the same on all machines (docs/security.md)"
            )
        return value
