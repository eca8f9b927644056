"""Leased ports: free, apart, and exclusive on the host."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from slime.core.errors import EngineError
from slime.serving.leased_ports import candidate_ports, is_bindable, lease_port, lease_ports

CHILD = """
import sys
from slime.serving.leased_ports import lease_ports
lease = lease_ports(40)
print(*lease.ports, flush=True)
sys.stdin.read()
"""


def test_leases_of_two_processes_never_share_a_port() -> None:
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        with lease_ports(40) as mine:
            sets = [set(mine.ports)]
            for child in children:
                assert child.stdout is not None
                sets.append({int(p) for p in child.stdout.readline().split()})
        assert all(len(s) == 40 for s in sets)
        assert len(set.union(*sets)) == 160
    finally:
        for child in children:
            child.communicate()


def test_a_leased_port_lies_outside_the_ephemeral_range_and_can_be_bound() -> None:
    with lease_ports() as lease, socket.socket() as server:
        assert any(lease.port in span for span in candidate_ports())
        server.bind(("127.0.0.1", lease.port))
        server.listen()
        assert not is_bindable(lease.port)


def test_a_released_lease_can_be_taken_again() -> None:
    from slime.serving.leased_ports import _claim

    lease = lease_ports()
    assert _claim(lease.port) is None
    lease.release()
    lease.release()
    again = _claim(lease.port)
    assert again is not None
    again.close()


def test_a_fixed_port_is_leased_or_refused_by_its_number() -> None:
    with lease_ports() as lease:
        port = lease.port
        with pytest.raises(EngineError, match=f"port {port}"):
            lease_port(port)
    with lease_port(port) as mine:
        assert mine.ports == (port,)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_fixed_port_on_which_somebody_listens_is_refused(address: str) -> None:
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        port = server.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port}"):
            lease_port(port)


def test_what_sglang_derives_from_a_port_is_leased_with_it() -> None:
    from slime.serving.leased_ports import DERIVED_OFFSETS, MEETING_OFFSETS, _claim, lease_meeting_point

    with lease_ports(2, beside_first=DERIVED_OFFSETS) as lease, lease_meeting_point() as meeting:
        port, other = lease.ports[:2]
        assert port != other and lease.ports[2:] == tuple(port + offset for offset in DERIVED_OFFSETS)
        assert set(meeting.ports) == {meeting.port + offset for offset in MEETING_OFFSETS}
        taken = {*lease.ports, *meeting.ports}
        assert len(taken) == 2 + len(DERIVED_OFFSETS) + len(MEETING_OFFSETS) and not any(map(_claim, taken))
