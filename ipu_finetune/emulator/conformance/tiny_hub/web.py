# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that answers every plain `http://` request with a generated picture.

optimum-graphcore's image tests download one picture over http. Here they get one from a server of this process, which
requests reaches as its proxy (`http_proxy`, "HTTP proxies" in its documentation): neither the tests nor the libraries
are changed, and nothing leaves the machine. Requests over https are not touched.
"""

import io
import os
import threading
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Iterator, List

from .samples import picture

__all__: List[str] = ["picture_proxy"]

_undo = ExitStack()


def _png() -> bytes:
    buffer = io.BytesIO()
    picture().save(buffer, format="PNG")
    return buffer.getvalue()


@contextmanager
def picture_proxy() -> Iterator[str]:
    """Run the server; gives the URL to use as an http proxy."""
    content = _png()

    class Picture(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "image/png")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Keep the requests out of the tests' output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Picture)
    thread = threading.Thread(target=server.serve_forever, name="picture-proxy", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def pytest_configure(config: Any) -> None:
    """Start the server and name it as the proxy of this process and its children."""
    before = os.environ.get("http_proxy")
    os.environ["http_proxy"] = _undo.enter_context(picture_proxy())
    if before is None:
        _undo.callback(os.environ.pop, "http_proxy", None)
    else:
        _undo.callback(os.environ.__setitem__, "http_proxy", before)


def pytest_unconfigure(config: Any) -> None:
    """Stop the server."""
    _undo.close()
