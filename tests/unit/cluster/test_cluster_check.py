"""Laws of what `slime doctor --ray-address` makes of the hosts' reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.cluster.cluster_check import (
    ClusterReport,
    Facts,
    Gpu,
    HostReport,
    bus_bandwidth,
    clock_skew,
    gpus_here,
    not_writable,
    pairs_of,
    problems_of,
    slow_hosts,
)

H100 = Gpu("NVIDIA H100 80GB HBM3", "550.54", 81559, 4, 0)


def host(number: int, *gpus: Gpu, ray_gpus: int | None = None, problem: str = "", skew_s: float = 0.0) -> HostReport:
    facts = Facts(f"node{number}", {"torch": "2.13"}, [], [], {"/runs": 2**40, "/dev/shm": 2**40}, list(gpus), problem)
    has = len(gpus) if ray_gpus is None else ray_gpus
    return HostReport(f"id{number}", f"10.0.0.{number}", has, f"node{number}", facts, skew_s, 0.001)


def told(*hosts: HostReport) -> list[str]:
    """Problems in words; a `!` is before those that fail a run."""
    report = ClusterReport({"torch": "2.13"}, list(hosts))
    return [f"{'!' * p.is_fatal}{p.host}: {p.text}" for p in problems_of(report)]


def test_the_skew_of_a_clock_is_within_its_error() -> None:
    """Law: whatever the delays of the answers are, the true skew is within the error of the fastest ping."""
    true_skew_s, time_s = 3.25, 100.0
    delays = iter([(0.5, 0.1), (0.02, 0.01), (0.0, 0.3)])

    def ask() -> float:
        nonlocal time_s
        there, back = next(delays)
        time_s += there
        answer = time_s + true_skew_s
        time_s += back
        return answer

    skew_s, error_s = clock_skew(ask, now=lambda: time_s, pings=3)
    assert abs(skew_s - true_skew_s) <= error_s == pytest.approx(0.015)


def test_a_clock_is_a_problem_only_beyond_its_error() -> None:
    (said,) = told(host(1), host(2, skew_s=-3.0))
    assert said.startswith("node2 (10.0.0.2): its clock is 3.0 s behind this host's")
    loose = host(3, skew_s=3.0)
    loose.skew_error_s = 2.5
    assert told(host(1), loose) == []


@pytest.mark.parametrize("count", [2, 3, 4, 7, 64])
def test_two_rounds_of_disjoint_pairs_hold_every_host(count: int) -> None:
    rounds = pairs_of(count)
    for pairs in rounds:
        used = [i for pair in pairs for i in pair]
        assert len(used) == len(set(used)), "no host has two partners at once"
    assert {i for pairs in rounds for pair in pairs for i in pair} == set(range(count))


def test_the_bandwidth_is_that_of_nccl_tests() -> None:
    """The example of NVIDIA's nccl-tests, PERFORMANCE.md: busbw = S/t * 2(n-1)/n."""
    assert bus_bandwidth(10**9, 8, 0.01) == pytest.approx(1e11 * 1.75)
    assert bus_bandwidth(10**9, 2, 1.0) == pytest.approx(1e9)


def test_a_host_with_a_slow_link_is_named_and_its_partners_are_not() -> None:
    """Of two hosts nobody can say which is slow."""
    (said,) = slow_hosts({"a": 10e9, "b": 9e9, "c": 1e9, "d": 10e9}, "gloo between hosts")
    assert said.host == "c" and "1.00 GB/s, the median of the hosts is 9.50" in said.text and not said.is_fatal
    assert slow_hosts({"a": 10e9, "b": 1e9}, "gloo between hosts") == []


def test_gpus_that_ray_promises_and_the_driver_does_not_know_are_a_problem() -> None:
    assert told(host(1, H100, H100), host(2, H100, H100)) == []
    (said,) = told(host(1, H100, ray_gpus=8))
    assert said == "!node1 (10.0.0.1): Ray has 8 GPUs there, but nvidia-smi lists 1; check --num-gpus"
    (said,) = told(
        host(1, ray_gpus=8, problem="nvidia-smi failed with exit status 18: Driver/library version mismatch")
    )
    assert said.startswith("!node1 (10.0.0.1): nvidia-smi failed with exit status 18: Driver/library version mismatch")
    (said,) = told(host(1, H100, Gpu("NVIDIA H100 80GB HBM3", "550.54", 81559, 4, 3)))
    assert said.startswith("!node1 (10.0.0.1): GPU 1 has 3 uncorrected memory errors")
    (said,) = told(host(1, H100), host(2, Gpu("NVIDIA H100 80GB HBM3", "535.1", 81559, 4, 0)), host(3))
    assert said.startswith(": hosts have different GPUs or drivers: node1") and "driver 535.1" in said


def test_versions_folders_and_space_are_named_by_host() -> None:
    wrong = host(2)
    assert wrong.facts is not None
    wrong.facts.versions["torch"] = "1.2.3"
    wrong.facts.unseen.append("--shared /runs (No such file or directory)")
    wrong.facts.unwritable.append("/save (Read-only file system)")
    wrong.facts.free_bytes["/dev/shm"] = 64 * 2**20
    found = told(host(1), wrong)
    assert [said.split(";")[0] for said in found] == [
        "!node2 (10.0.0.2): has torch 1.2.3, but the environment of slime doctor has torch 2.13",
        "!node2 (10.0.0.2): does not see --shared /runs (No such file or directory)",
        "!node2 (10.0.0.2): cannot write to /save (Read-only file system)",
        "node2 (10.0.0.2): has 0.1 GiB free in /dev/shm",
    ]


def test_what_nvidia_smi_says_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: its lines become GPUs; without it there are none, and its failure is a sentence."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus_here() == ([], "")
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 550.54, 81559, 4, 0'\necho 'Tesla T4, 550.54, 15360, 1, [N/A]'\n"
    )
    program.chmod(0o755)
    assert gpus_here() == ([H100, Gpu("Tesla T4", "550.54", 15360, 1, 0)], "")
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    _, why = gpus_here()
    assert why == "nvidia-smi failed with exit status 18: Failed to initialize NVML: Driver/library version mismatch"


def test_a_folder_that_takes_no_file_is_named(tmp_path: Path) -> None:
    """A folder in /proc refuses even root."""
    assert not_writable([str(tmp_path), str(tmp_path / "missing")]) == [] and list(tmp_path.iterdir()) == []
    (said,) = not_writable(["/proc/self"])
    assert said.startswith("/proc/self (")
