"""Rendezvous stores (`TCPStore`) that listen on one address instead of on every interface of the host.

By default, torch opens its store on all interfaces without authentication and sends pickles through it, so anyone who
can reach the port can run code in the trainer. This module instead binds a socket to the address that peers connect to
(loopback if all of them are on one host) and hands the socket to the store.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from slime.core.processes import interface_variables, is_loopback

BACKLOG = 1024
"""Maximum number of pending connections."""


def listen_on(address: str, port: int = 0) -> socket.socket:
    """Returns a socket that listens only on `address`. Port 0 picks a free port. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)


def open_store(listener: socket.socket, *, world_size: int, timeout: timedelta, wait: bool = True) -> Store:
    """Opens the store that other ranks join with `join_store` or any `TCPStore` client. Takes ownership of `listener`.

    `wait`: whether to wait until `world_size` ranks, including this one, have joined.
    """
    address, port = listener.getsockname()[:2]
    return TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        wait_for_workers=wait,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def join_store(address: str, port: int, *, world_size: int, timeout: timedelta) -> Store:
    """Joins the store that another rank opens at `address`. Waits up to `timeout` for that rank."""
    return TCPStore(address, port, world_size, is_master=False, timeout=timeout)


def keep_gloo_on(address: str) -> None:
    """Binds gloo's sockets to loopback if `address` is loopback. Call it before the first process group is created."""
    if is_loopback(address):
        os.environ.update(interface_variables(address, os.environ))
