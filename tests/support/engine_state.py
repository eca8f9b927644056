"""What a running SGLang server is asked and told beside the way of a run."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def _call(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        text = response.read()
    return json.loads(text) if text else None


def num_running(url: str) -> int:
    """Requests that the server at `url` works on or holds."""
    loads = _call(f"{url}/v1/loads?include=core")["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def relabel(url: str, version: int) -> None:
    """The server calls the weights that it has `version`."""
    _call(f"{url}/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
