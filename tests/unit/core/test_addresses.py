"""An address is loopback or it is not; gloo and NCCL are told the interface that has it."""

from __future__ import annotations

from slime.core.processes import (
    host_of,
    host_port,
    http_url,
    in_brackets,
    interface_of,
    interface_variables,
    is_loopback,
    server_url,
)


def test_loopback_is_told_from_other_addresses() -> None:
    assert all(
        is_loopback(a) for a in ("127.0.0.1", "127.3.2.1", "::1", "[::1]", "0:0::1", "::ffff:127.0.0.1", "localhost")
    )
    assert not any(is_loopback(a) for a in ("10.0.0.1", "0.0.0.0", "::", "fe80::1%eth0", "node-3"))


def test_the_interface_is_that_of_the_address() -> None:
    assert interface_of("127.0.0.1") == "lo" and interface_of("203.0.113.9") is None
    assert interface_of("::1") == interface_of("[0:0::1]") == "lo" and interface_of("2001:db8::9") is None
    assert interface_variables("::1", {}) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert interface_variables("127.0.0.1", {}) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert interface_variables("203.0.113.9", {}) == {}, "no interface has it"


def test_what_the_user_chose_stays() -> None:
    assert interface_variables("127.0.0.1", {"GLOO_SOCKET_IFNAME": "ib0"}) == {}


def test_an_ipv6_address_is_in_brackets_before_a_port_and_nowhere_else() -> None:
    for host in ("fd00::7", "[fd00::7]"):
        assert http_url(host, 80) == "http://[fd00::7]:80" and host_port(host, 80) == "[fd00::7]:80"
        assert in_brackets(host) == "[fd00::7]" and server_url(f"{in_brackets(host)}:80") == "http://[fd00::7]:80"
    assert host_of("http://[fd00::7]:80") == "fd00::7"
    assert http_url("10.0.0.1", 80) == "http://10.0.0.1:80" and in_brackets("node-3") == "node-3"
