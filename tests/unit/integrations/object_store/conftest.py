"""Fixture with a bucket in memory, from obstore's own store, instead of a server."""

import pytest

from headway.common import scope
from headway.common.object_client import ObjectClient, get_client


@pytest.fixture
def bucket(monkeypatch):
    """Client of s3://bucket, with parts of 1,000 bytes."""
    obstore = pytest.importorskip("obstore", reason="needs obstore: pip install 'headway[s3]'")
    from headway.common import object_path
    from headway.core.weights import file_sinks
    from headway.integrations.object_store import log_mirror
    from headway.integrations.object_store import store as object_store

    store = obstore.store.MemoryStore()
    monkeypatch.setattr("obstore.store.from_url", lambda url, **_: store)
    for module in (object_path, object_store, log_mirror, file_sinks):
        monkeypatch.setattr(module, "PART", 1000)
    plain = ObjectClient.put  # the store in memory keeps the given buffers
    monkeypatch.setattr(
        ObjectClient, "put", lambda self, key, data, replaces="any": plain(self, key, bytes(data), replaces)
    )
    monkeypatch.setenv("HEADWAY_STORE_RETRY_SECONDS", "1")
    scope.clear()
    yield get_client("s3://bucket")
    scope.clear()
