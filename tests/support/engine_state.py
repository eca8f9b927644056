"""What a running SGLang server is asked and told beside the way of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from slime.serving.leased_ports import request
from slime.serving.server import SGLangServer


def _call(method: str, url: str, body: Any = None, api_key: str | None = None) -> str:
    status, text = request(method, url, body, timeout_s=30, api_key=api_key)
    assert status == 200, f"{url}: {status} {text}"
    return text


def num_running(url: str) -> int:
    """Requests that the server at `url` works on or holds."""
    loads = json.loads(_call("GET", f"{url}/v1/loads?include=core"))["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def relabel(url: str, version: int, api_key: str | None = None) -> None:
    """The server calls the weights that it has `version`."""
    body = {"new_version": str(version), "abort_all_requests": False}
    _call("POST", f"{url}/update_weight_version", body, api_key)


@contextmanager
def noting_requests(server: SGLangServer) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Within the block the server notes each request as it received it; the call reads what it has noted."""
    noting = {"log_requests": True, "log_requests_level": 1, "log_requests_format": "json"}
    _call("POST", f"{server.url}/configure_logging", noting)
    begin = server.log_path.stat().st_size

    def read() -> list[dict[str, Any]]:
        text = server.log_path.read_bytes()[begin:].decode(errors="replace")
        found = (json.loads(line) for line in re.findall(r'\{"timestamp".*"event": "request.received".*\}', text))
        return [one["obj"] for one in found]

    try:
        yield read
    finally:
        _call("POST", f"{server.url}/configure_logging", {"log_requests": False})
