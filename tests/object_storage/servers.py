"""Servers of object storage on loopback: moto for S3, gcp-storage-emulator for GCS."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import urllib.request
from collections.abc import Iterator
from http.server import HTTPServer
from unittest import mock

BUCKET = "a-bucket"


@contextlib.contextmanager
def run_s3_server() -> Iterator[str]:
    """Runs an S3 server with a bucket; yields its endpoint."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    send_request(f"{endpoint}/moto-api/reset", method="POST")
    send_request(f"{endpoint}/{BUCKET}")
    try:
        yield endpoint
    finally:
        server.stop()


@contextlib.contextmanager
def run_gcs_server() -> Iterator[str]:
    """Runs a GCS server with a bucket; yields its endpoint."""
    from gcp_storage_emulator.server import create_server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    # A client connects for all arrays at once; one that finds no place in the queue tries again after a second.
    with mock.patch.object(HTTPServer, "request_queue_size", 128):
        server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()


SERVERS = {"s3": run_s3_server, "gs": run_gcs_server}


def environment(scheme: str, endpoint: str) -> dict[str, str]:
    """The variables by which a program finds a server."""
    if scheme == "gs":
        return {"STORAGE_EMULATOR_HOST": endpoint, "TENSORSTORE_GCS_HTTP_URL": endpoint}
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "a-secret-key",
        "AWS_REGION": "us-east-1",
    }


@contextlib.contextmanager
def use_server(scheme: str, endpoint: str) -> Iterator[None]:
    """Points this process to a server."""
    with mock.patch.dict(os.environ, environment(scheme, endpoint)):
        yield


def send_request(url: str, method: str = "PUT") -> None:
    """Sends a request without a body, which for the URL of a bucket makes the bucket."""
    request = urllib.request.Request(url, method=method, headers={"Content-Length": "0"})
    urllib.request.urlopen(request).close()
