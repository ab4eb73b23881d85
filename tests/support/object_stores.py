"""A real S3 server on loopback, with credentials in the usual environment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.ports import free_port

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Address of the server, ready."""
    port = free_port()
    code = f"""
import sys, threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port={port}, verbose=False)
server.start()
print("ready", flush=True)
sys.stdin.read()
server.stop()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


def new_bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sets the environment, makes a bucket, and returns its name."""
    import pyarrow.fs as pafs

    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    name = "clicks-" + os.urandom(4).hex()
    filesystem, root = pafs.FileSystem.from_uri(f"s3://{name}?allow_bucket_creation=true")
    filesystem.create_dir(root)
    return name
