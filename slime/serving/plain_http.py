"""One HTTP request to a local server, with the standard library: for start-up and shut-down, not for the data path."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy of the host's is never asked


def request(
    method: str, url: str, body: Any = None, *, timeout_s: float = 5.0, api_key: str | None = None
) -> tuple[int, str]:
    """Returns (status, text); status 0 with the reason as text if there was no answer. Never raises on a refusal."""
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with _opener.open(urllib.request.Request(url, data, headers, method=method), timeout=timeout_s) as response:
            return response.status, response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
