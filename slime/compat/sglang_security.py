"""Closes security holes in SGLang (0.5.16 to 0.5.23) that anyone who can reach the host could exploit.

- The ranks of an engine rendezvous at a torch store that listens on every interface without authentication and
  exchanges pickles. Here, an SGLang environment variable sets a rendezvous URL with the scheme `slime`. Its store
  listens only on the rendezvous address, which is loopback for a single-host engine.
- Two routes that change state require only the request key, and the only websocket requires no key at all.
  `close_routes` makes these routes require the admin key, like similar routes, and removes the websocket.

Neither fix modifies SGLang's code. Remove this module when SGLang closes these holes itself.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any
from urllib.parse import parse_qs, urlsplit

from slime.core.errors import EngineError
from slime.core.processes import LOOPBACK

SCHEME = "slime"
"""URL scheme of the rendezvous, instead of torch's "tcp"."""
LIMIT = timedelta(minutes=30)
"""How long ranks wait for each other. Same as torch's default."""
CONTROL = ("load_lora_adapter_from_tensors", "set_trace_level")
"""The functions behind the two routes. The first one loads weights."""


MEETING_ENV = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""SGLang's environment variable for the rendezvous URL. If the user has set it, slime leaves it alone."""


def meeting_place(settings: Any) -> str:
    """Returns the rendezvous URL for a server with these ServerArgs. The first rank opens the store there.

    Raises `EngineError` for several replicas in one server, because all of them would use the same URL.
    """
    if settings.nnodes > 1:
        return f"{SCHEME}://{settings.dist_init_addr}"
    if settings.dp_size > 1 and not settings.enable_dp_attention:
        raise EngineError(
            f"--dp-size {settings.dp_size} requires --enable-dp-attention; otherwise, start one server per replica"
        )
    return f"{SCHEME}://{LOOPBACK}:{settings.nccl_port or _free_port()}"


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        port: int = server.getsockname()[1]
    return port


@cache
def know_scheme() -> None:
    """Registers the URL scheme of `meeting_place` with torch. Call it in every process of a server."""
    from torch.distributed.rendezvous import register_rendezvous_handler

    register_rendezvous_handler(SCHEME, _meet)


def _meet(url: str, timeout: timedelta = LIMIT, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """A torch rendezvous handler. Yields the store, this rank and the number of ranks."""
    from slime.weights.rendezvous import join_store, listen_on, open_store

    where = urlsplit(url)
    said = {name: int(values[0]) for name, values in parse_qs(where.query).items()}
    rank, size, host, port = said["rank"], said["world_size"], where.hostname, where.port
    assert host is not None and port is not None, f"ranks meet at {url}, which has no host or no port"
    if rank == 0:
        yield open_store(listen_on(host, port), world_size=size, timeout=timeout), rank, size
    else:
        yield join_store(host, port, world_size=size, timeout=timeout), rank, size
    raise EngineError(f"torch requested a second rendezvous at {url}, which supports only one")


def close_routes() -> None:
    """Closes the open routes and the websocket. Call it before the server accepts requests."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.routing import WebSocketRoute

    for name in CONTROL:
        auth_level(AuthLevel.ADMIN_OPTIONAL)(getattr(http_server, name))
    routes = http_server.app.router.routes
    routes[:] = [route for route in routes if not isinstance(route, WebSocketRoute)]
