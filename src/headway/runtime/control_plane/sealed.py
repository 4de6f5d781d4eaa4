"""A store of torch's, in which each value of Headway's carries the run's proof; whatever else stands there counts as not written.

Counters, and that a key is there at all, are torch's and carry none: somebody who reaches the port can delay a run or end it by
them, but cannot put a value into it.
"""

from collections.abc import Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

from headway.common.sealing import Seal
from headway.errors import ControlPlaneError


class SealedStore:
    """The store, as Headway uses it.

    Args:
        store: torch's.
        name: tells it from other stores of the run: a value opens in this one only, and under its own key.
        seal: of the run.
    """

    def __init__(self, store: Store, name: str, seal: Seal) -> None:
        self._store = store
        self._name = name
        self._seal = seal

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        self._store.set(key, self._seal.close(f"{self._name}/{key}", value))  # type: ignore[arg-type]

    def find(self, key: str) -> bytes | None:
        """The value, where the run has written one."""
        return self._open(key, self._store.get(key)) if self._store.check([key]) else None

    def get(self, key: str) -> bytes:
        """The value; waits for the key as torch's store does.

        Raises:
            ControlPlaneError: somebody else has written it.
        """
        return self._proven(key, self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys in one call, else as `get`."""
        return [self._proven(key, value) for key, value in zip(keys, self._store.multi_get(list(keys)))]

    def set_once(self, key: str, value: bytes) -> bytes:
        """Write a value unless there is one; returns the one there is."""
        sealed = self._seal.close(f"{self._name}/{key}", value)
        return self._proven(key, self._store.compare_set(key, "", sealed))  # type: ignore[arg-type, unused-ignore]

    def check(self, keys: Sequence[str]) -> bool:
        """Are all of these there?"""
        return bool(self._store.check(list(keys)))

    def add(self, key: str, number: int) -> int:
        """Add to a counter; returns its sum."""
        return self._store.add(key, number)

    def reset(self, key: str) -> None:
        """Set a counter to 0, without a wait for the server."""
        self._store.set(key, "0")

    def delete_key(self, key: str) -> bool:
        """Take a key away; says whether it was there."""
        return self._store.delete_key(key)

    def _open(self, key: str, sealed: bytes) -> bytes | None:
        value = self._seal.open(f"{self._name}/{key}", sealed)
        if value is None:
            what = f"the value of {key!r} in the {self._name} store, of another program or with another HEADWAY_SECRET,"
            self._seal.strangers.note(what)
        return value

    def _proven(self, key: str, sealed: bytes) -> bytes:
        value = self._open(key, sealed)
        if value is None:
            raise ControlPlaneError(
                f"the value of {key!r} in the {self._name} store was not written by this run: another program reaches its port, or "
                "HEADWAY_SECRET (--secret) is not the same on all machines (docs/security.md)"
            )
        return value
