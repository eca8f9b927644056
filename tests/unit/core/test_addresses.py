"""An address is loopback or it is not; gloo and NCCL are told the interface that has it."""

from __future__ import annotations

from slime.core.addresses import interface_of, interface_variables, is_loopback


def test_loopback_is_told_from_other_addresses() -> None:
    assert all(is_loopback(a) for a in ("127.0.0.1", "127.3.2.1", "::1", "localhost"))
    assert not any(is_loopback(a) for a in ("10.0.0.1", "0.0.0.0", "node-3"))


def test_the_interface_is_that_of_the_address() -> None:
    assert interface_of("127.0.0.1") == "lo" and interface_of("203.0.113.9") is None
    assert interface_variables("127.0.0.1", {}) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert interface_variables("203.0.113.9", {}) == {}, "no interface has it"


def test_what_the_user_chose_stays() -> None:
    assert interface_variables("127.0.0.1", {"GLOO_SOCKET_IFNAME": "ib0"}) == {}
