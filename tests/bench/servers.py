"""Servers that questions read from, each in a process of its own: files by ranges over HTTP, after a latency; S3, as moto plays it.

A place is `http://host:port/...`, the prefix under which a folder's files are asked for.
"""

from __future__ import annotations

import http.client
import http.server
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

LATENCY = 0.02
"""Seconds before each answer."""
BUCKET = "bench"


@contextmanager
def ranges(folder: Path) -> Iterator[str]:
    """Serve the files of a folder."""
    with _started("ranges", str(folder)) as port:
        yield f"http://127.0.0.1:{port}/"


@contextmanager
def s3(folder: Path) -> Iterator[str]:
    """Serve the files of a folder as objects."""
    with _started("moto") as port:
        place = f"http://127.0.0.1:{port}/{BUCKET}/"
        _ask(place, "PUT")
        for file in folder.iterdir():
            if file.is_file():
                _ask(f"{place}{file.name}", "PUT", file.read_bytes())
        yield place


def opened(place: str | Path) -> Any:
    """Return what meshload takes for a place, or for a folder."""
    if isinstance(place, Path):
        return place
    import tensorstore

    if urlsplit(place).path == "/":
        return place
    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_EC2_METADATA_DISABLED": "true"}
    told = urlsplit(place)
    spec = {"driver": "s3", "bucket": BUCKET, "endpoint": f"http://{told.netloc}", "aws_region": "us-east-1"}
    return tensorstore.KvStore.open({**spec, "aws_credentials": {"type": "environment"}}).result()


def served(place: str) -> int:
    """Return how many bytes of files have left a server of ranges so far; S3 does not tell."""
    return int(_ask(f"{place}served")) if urlsplit(place).path == "/" else 0


def _ask(place: str, method: str = "GET", data: bytes | None = None) -> bytes:
    told = urlsplit(place)
    connection = http.client.HTTPConnection(told.netloc, timeout=300)
    # else moto takes it for a form, or keeps it from those who do not sign
    headers = {"Content-Type": "application/octet-stream", "x-amz-acl": "public-read"} if method == "PUT" else {}
    connection.request(method, told.path, data, headers)
    answer = connection.getresponse()
    found = answer.read()
    if answer.status >= 300:
        raise OSError(f"{method} {place}: {answer.status} {found[:200]!r}")
    return found


@contextmanager
def _started(*arguments: str) -> Iterator[int]:
    """Run this file as a server until the block ends."""
    command = [sys.executable, "-W", "ignore", __file__, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield int(next(line for line in process.stdout if line.startswith("port ")).split()[1])
        finally:
            process.stdin.close()
            process.wait(20)


class _Ranges(http.server.BaseHTTPRequestHandler):
    root: Path
    served = 0
    lock = threading.Lock()
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else what follows the headers waits some 40 ms for their acknowledgement

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        if self.path == "/served":
            told = str(type(self).served).encode()
            self._head(200, len(told))
            self.wfile.write(told)
        else:
            self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        time.sleep(LATENCY)
        try:
            file = os.open(self.root / self.path.lstrip("/"), os.O_RDONLY)
        except OSError:
            self._head(404, 0)
            return
        try:
            size = os.fstat(file).st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start, stop = (int(asked[1]), min(int(asked[2] or size) + 1, size)) if asked else (0, size)
            if start >= size:
                self._head(416, 0, f"bytes */{size}")
                return
            self._head(206 if asked else 200, stop - start, f"bytes {start}-{stop - 1}/{size}" if asked else "")
            if body:
                with self.lock:
                    type(self).served += stop - start
                while start < stop:
                    start += os.sendfile(self.connection.fileno(), file, start, stop - start)
        finally:
            os.close(file)

    def _head(self, status: int, length: int, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128


def _serve_ranges(folder: str) -> None:
    server = _Server(("127.0.0.1", 0), type("Handler", (_Ranges,), {"root": Path(folder)}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("port", server.server_port, flush=True)
    sys.stdin.read()
    os._exit(0)


def _serve_s3() -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    print("port", server.get_host_and_port()[1], flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    {"ranges": _serve_ranges, "moto": _serve_s3}[sys.argv[1]](*sys.argv[2:])
