"""Closes security holes of SGLang (0.5.16 to 0.5.23) that anyone who can reach the host could use.

- The ranks of an engine meet at a torch store that listens on every interface, requires no key and carries pickles. A
  variable of SGLang names a meeting place with the URL scheme `slime`, whose store listens only on the address where
  the ranks meet: loopback for an engine on one host.
- Two routes that change something require only the request key, and the only websocket requires no key. `close_routes`
  makes the routes require the admin key, as similar routes do, and removes the websocket.

Neither changes SGLang's code. Remove it when SGLang does this itself.
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
"""URL scheme of the addresses where ranks meet, instead of torch's "tcp"."""
LIMIT = timedelta(minutes=30)
"""How long ranks wait for each other: torch's default."""
CONTROL = ("load_lora_adapter_from_tensors", "set_trace_level")
"""The functions of the two routes. The first one takes weights."""


MEETING_ENV = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""SGLang's variable with the URL where the ranks meet. A value that the user has set stays."""


def meeting_place(settings: Any) -> str:
    """Returns the URL where the ranks of a server with these ServerArgs meet. The first rank opens the store there.

    Raises `EngineError` for several replicas in one server, which would meet at the same place.
    """
    if settings.nnodes > 1:
        return f"{SCHEME}://{settings.dist_init_addr}"
    if settings.dp_size > 1 and not settings.enable_dp_attention:
        raise EngineError(
            f"--dp-size is {settings.dp_size} without --enable-dp-attention: start one server per replica instead"
        )
    return f"{SCHEME}://{LOOPBACK}:{settings.nccl_port or _free_port()}"


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        port: int = server.getsockname()[1]
    return port


@cache
def know_scheme() -> None:
    """Makes torch understand the URLs of `meeting_place`. Call it in every process of a server."""
    from torch.distributed.rendezvous import register_rendezvous_handler

    register_rendezvous_handler(SCHEME, _meet)


def _meet(url: str, timeout: timedelta = LIMIT, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yields the store, this rank and the number of ranks, as a rendezvous handler for torch."""
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
    """Closes the open routes and the websocket. Call it before the server takes requests."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.routing import WebSocketRoute

    for name in CONTROL:
        auth_level(AuthLevel.ADMIN_OPTIONAL)(getattr(http_server, name))
    routes = http_server.app.router.routes
    routes[:] = [route for route in routes if not isinstance(route, WebSocketRoute)]
