"""Addresses of hosts, and the network interfaces behind them. Imports nothing heavy: it is asked before torch is."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

LOOPBACK = "127.0.0.1"
"""Where the processes of a run on one host meet."""
INTERFACE_ENVS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""What gloo and NCCL read: the interface of their sockets."""


def is_loopback(address: str) -> bool:
    """Whether only this host reaches `address` (an IP address or "localhost")."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def interface_of(address: str) -> str | None:
    """The interface of this host that has `address`; None if none has it."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def interface_variables(address: str, given: Mapping[str, str]) -> dict[str, str]:
    """What to add to an environment, so that gloo and NCCL of a process on this host use the interface of `address`.

    Left to themselves both guess: gloo asks for the host's own name, which is often no address that others reach. On
    loopback gloo opens its sockets there; NCCL then moves its data by other means, and may choose. What is `given`
    (an environment) stays.
    """
    if is_loopback(address):
        wanted = {"GLOO_SOCKET_IFNAME": "lo"}
    else:
        name = interface_of(address)
        wanted = dict.fromkeys(INTERFACE_ENVS, name) if name else {}
    return {variable: name for variable, name in wanted.items() if variable not in given}
