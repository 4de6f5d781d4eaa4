"""A bucket in memory, by obstore's own store, in place of a server."""

import pytest

from headway.common import scope
from headway.common.object_client import ObjectClient, client_of


@pytest.fixture
def bucket(monkeypatch):
    """The client of s3://bucket, with parts of 1,000 bytes."""
    obstore = pytest.importorskip("obstore", reason="needs obstore: pip install 'headway[s3]'")
    from headway.checkpoint.stores import objects
    from headway.common import object_path
    from headway.tracking import mirror

    store = obstore.store.MemoryStore()
    monkeypatch.setattr("obstore.store.from_url", lambda url, **_: store)
    for module in (object_path, objects, mirror):
        monkeypatch.setattr(module, "PART", 1000)
    plain = ObjectClient.put  # the store in memory keeps the buffers that it is given
    monkeypatch.setattr(
        ObjectClient, "put", lambda self, key, data, replaces="any": plain(self, key, bytes(data), replaces)
    )
    monkeypatch.setenv("HEADWAY_STORE_RETRY_SECONDS", "1")
    scope.clear()
    yield client_of("s3://bucket")
    scope.clear()
