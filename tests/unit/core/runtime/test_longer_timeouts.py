"""Test requests for a longer timeout in the heartbeat file."""

from headway.core.runtime import heartbeat_file
from headway.core.runtime.longer_timeouts import request_longer_timeout


def read_extension():
    return heartbeat_file.get_own_file().read().timeout_extension


def test_inner_block_keeps_the_request_of_the_outer_one():
    with request_longer_timeout(10.0):
        with request_longer_timeout(5.0):
            assert read_extension() == 10.0
        with request_longer_timeout(20.0):
            assert read_extension() == 20.0
        with request_longer_timeout(0.0):
            assert read_extension() == 10.0
        assert read_extension() == 10.0
    assert read_extension() == 0.0
