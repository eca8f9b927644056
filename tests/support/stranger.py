"""A server that somebody else started, as far as a run looks at it before it uses it: SGLang's routes without SGLang.

What a real one answers is held by `tests/contract/serving/test_discovery.py`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Stranger:
    """What it says of itself, to who has its key; a test changes that while it answers."""

    def __init__(self, *, info: dict[str, Any], model: dict[str, Any], resident: list[str], key: str) -> None:
        self.info, self.model, self.resident, self.key = info, model, resident, key
        self.asked: list[str] = []
        self.url = ""

    def answer(self, route: str) -> Any:
        match route:
            case "server_info":
                return self.info
            case "model_info":
                return self.model
            case "weights_checker":
                return {"ranks": [{"checksums": dict.fromkeys(self.resident, "0" * 16)}]}
            case "generate":
                done = {"finish_reason": {"type": "length"}, "weight_version": self.info["weight_version"]}
                return [{"output_ids": [1, 2], "meta_info": {}}, {"output_ids": [3, 4], "meta_info": done}]
            case _:
                return {}

    @contextmanager
    def serving(self, port: int = 0) -> Iterator[str]:
        """It answers within the block; the address."""
        server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self.url
        finally:
            server.shutdown()
            server.server_close()


def _handler(stranger: Stranger) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._answer()

        def _answer(self) -> None:
            route = self.path.strip("/")
            if self.headers.get("Authorization") != f"Bearer {stranger.key}":
                self.send_response(401)
                self.end_headers()
                return
            stranger.asked.append(route)
            said = stranger.answer(route)
            events = (
                [f"data: {json.dumps(event)}\n\n" for event in said] if isinstance(said, list) else [json.dumps(said)]
            )
            body = "".join(events).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
