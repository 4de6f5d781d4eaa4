"""Starts moto's S3 server in its own process. `python -m tests.stores.server` prints its port."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

BUCKET = "bucket"


def environment(port: int, patience: float = 20, timeout: float = 10) -> dict[str, str]:
    """Return environment variables that make a process use the server or proxy on `port`.

    `patience` and `timeout` are in seconds.
    """
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "anybody", "AWS_SECRET_ACCESS_KEY": "secret", "HEADWAY_STORE_RETRY_SECONDS": str(patience),
        "HEADWAY_STORE_REQUEST_TIMEOUT": str(timeout), "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip


def s3(port: int):
    """Return a boto3 client, for access to the bucket without Headway."""
    import boto3

    return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", aws_access_key_id="anybody",
                        aws_secret_access_key="secret", region_name="us-east-1")  # fmt: skip


def keys(port: int, prefix: str = "") -> list[str]:
    pages = s3(port).get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
    return [each["Key"] for page in pages for each in page.get("Contents", ())]


@contextlib.contextmanager
def running() -> Iterator[int]:
    """Start a server with an empty bucket, and yield its port."""
    process = subprocess.Popen([sys.executable, "-m", "tests.stores.server"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               stdin=subprocess.PIPE)  # fmt: skip
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        s3(port).create_bucket(Bucket=BUCKET)
        yield port
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()  # until the process that started this one has ended
    threading.Event().wait(0)
    os._exit(0)
