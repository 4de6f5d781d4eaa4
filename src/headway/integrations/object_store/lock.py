"""Lock object next to a checkpoint directory in an object store.

The object is created only if it does not exist. The process that holds the lock rewrites it every few seconds, on
condition that no other process has changed it (if-match). Another process uses its own clock to observe whether the
object still changes. The clocks of different machines are never compared.
"""

import contextlib
import json
import secrets
import threading
import time
from dataclasses import asdict

from headway.common.object_path import ObjectPath
from headway.core.checkpoint import lock
from headway.errors import CheckpointError


class ObjectLock(lock.CheckpointLock):
    """Lock on a checkpoint directory in an object store. The lock is an object next to the directory.

    Args:
        folder: Directory to lock.
        run: ID of the run, as in `LockOwner`.
        start: ID of this start of the run, as in `LockOwner`.

    Raises:
        CheckpointError: If another run holds the lock.
    """

    def __init__(self, folder: ObjectPath, run: str, start: str) -> None:
        self._owner = asdict(lock.LockOwner.describe_this_process(run, start))
        self._requests = threading.Lock()
        self._token = secrets.token_hex(8)  # of this process; with the count, it makes each written text unique
        self._count = 0
        self._etag = ""  # of the object that this process has written. "": another machine of this run has created it
        self._is_lost = False  # whether another run has taken the lock
        super().__init__(folder, run, start)

    def check(self) -> None:
        """Rewrite the lock object, and raise `CheckpointError` if another run has taken it.

        Do nothing if another machine of this run has created the object.

        Raises:
            CheckpointError: If another run has taken the lock.
            ObjectStoreError: If the store does not answer.
        """
        if self._etag and not self._rewrite_lock():
            stored = self._path.client.get(self._path.key)
            content = b"" if stored is None else stored[0]
            raise CheckpointError(self._describe_owner(content, lock.TAKEN))

    def _remove_lock(self) -> None:
        """Remove the lock's object if this run still owns it. A failed request is ignored."""
        # If a request fails, the object stays, and other runs consider its holder dead after lock.SILENCE seconds.
        with contextlib.suppress(CheckpointError):
            # It is rewritten first, so that no other run can consider its owner dead before it is removed.
            if self._etag and self._rewrite_lock():
                self._path.unlink()

    def _rewrite_lock(self) -> bool:
        """Rewrite the lock object to show that this process is alive. Return False if another run has taken the lock.

        Raises:
            ObjectStoreError: If the store does not answer.
        """
        with self._requests:
            if self._is_lost:
                return False
            self._is_lost = not self._write_owner(self._etag)
            return not self._is_lost

    def _write_owner(self, replaced_etag: str | None) -> bool:
        """Write this process's data to the lock object, on condition that no other process has changed the object.

        Args:
            replaced_etag: ETag of the object to replace. None: there must be no object.

        Returns:
            Whether the object was written. False: another process has changed, created or deleted it.
        """
        client, key = self._path.client, self._path.key
        while True:
            self._count += 1
            text = json.dumps({**self._owner, "beat": f"{self._token} {self._count}"}).encode()
            etag = client.put(key, text, replaced_etag)
            if etag is not None:
                self._etag = etag
                return True
            stored = client.get(key)
            if stored is None:
                return False
            content, stored_etag = stored
            if f'"beat": "{self._token} '.encode() not in content or stored_etag == replaced_etag:
                return False
            replaced_etag = stored_etag  # an earlier write of this process succeeded, but the store's response was lost

    def _create_lock(self) -> None:
        """Create the lock's object, and start the thread that renews it.

        If another run owns the lock, wait until it has released it or counts as dead. If another machine of this run
        owns it, do nothing.

        Raises:
            CheckpointError: If the owner is alive.
        """
        client, key, dead_etag = self._path.client, self._path.key, None
        while not self._write_owner(dead_etag):
            stored = client.get(key)
            dead_etag = None
            if stored is not None:
                content, dead_etag = stored
                if self._is_own(content):  # written by another machine of this run
                    self._etag = ""
                    return
                self._wait_for_end(content, dead_etag)
        threading.Thread(target=self._rewrite_until_end, name="headway-lock", daemon=True).start()

    def _wait_for_end(self, text: bytes, etag: str) -> None:
        """Block until the lock's owner is considered dead, or until the lock object has been deleted.

        Args:
            text: Content of the lock object.
            etag: ETag of the lock object.

        Raises:
            CheckpointError: If the owner rewrites the object, and is therefore alive.
        """
        client, key, is_alive = self._path.client, self._path.key, lock.is_owner_alive(text)
        if is_alive is None:
            self._warn_of_wait(text)
        until = time.monotonic() + (lock.SILENCE if is_alive is None else 0)
        while time.monotonic() < until:
            time.sleep(min(1.0, lock.SILENCE / 10))
            stored = client.get(key)
            if stored is None:
                return
            is_alive = stored[1] != etag
            if is_alive:
                break
        if is_alive:
            raise CheckpointError(self._describe_owner(text, lock.IN_USE))

    def _rewrite_until_end(self) -> None:
        """Rewrite the lock object every few seconds until the lock is removed or lost."""
        while not self._end.wait(lock.BEAT):
            with contextlib.suppress(CheckpointError):  # the store might be unavailable for a while
                if not self._rewrite_lock():
                    return
