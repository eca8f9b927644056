"""Law 2 over deltas against a real SGLang server: what changed arrives exactly, and whatever happens to a delta on the
way, no token of it is served and one weight sync heals it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch

from slime.core.errors import DeadlineExceeded, SlimeError, WeightSyncError
from slime.serving.agent_process import AgentProcess, AgentSettings
from slime.serving.control import FolderEngineControl
from slime.serving.server import SGLangServer
from slime.weights.delta.channel import DeltaChannel
from slime.weights.delta.folder import Manifest, folder_of
from slime.weights.receivers import Receiver
from slime.weights.transports import Channel
from tests.contract.weights.test_sync_to_engine import Rig, StateDict, is_paused, one_float
from tests.support.marks import quick
from tests.support.weight_agents import agent_beside, agent_that_dies, delta_channel
from tests.support.weights import TamperingChannel

pytestmark = pytest.mark.timeout(900)
LIMIT_S = 60.0


class DeltaRig(Rig):
    """A server, a folder, and a channel of deltas; agents come and go."""

    def __init__(self, server: SGLangServer, tmp_path: Path) -> None:
        super().__init__(server.url, Path(server.model_path), tmp_path)
        self.folder, self.local = tmp_path / "shared", tmp_path / "local"
        self.folder.mkdir()
        self.now = dict(self.state)

    def channel_of(self, **more: Any) -> DeltaChannel:
        made = delta_channel(self.folder, self.local, table=self.table, hf_checkpoint=self.path, **more)
        return cast(DeltaChannel, made)

    def agent(self, **more: Any) -> Any:
        return agent_beside(self.control, self.folder, self.local, **more)

    def step(self, seed: int, density: float = 0.03) -> StateDict:
        """A small update: some elements of most tensors move."""
        generator = torch.Generator().manual_seed(seed)
        for number, (name, tensor) in enumerate(self.now.items()):
            if (number + seed) % 5:
                moved = torch.rand(tensor.shape, generator=generator) < density
                moves = 0.05 * torch.randn(tensor.shape, generator=generator)
                self.now[name] = torch.where(moved, tensor + moves, tensor)
        return self.now

    def is_full(self, version: int) -> bool:
        return Manifest.read(self.folder / folder_of(version)).base is None


@pytest.fixture
def rig(engine_server: SGLangServer, tmp_path: Path) -> Iterator[DeltaRig]:
    rig = DeltaRig(engine_server, tmp_path)
    yield rig
    rig.sync_weights(rig.state, rig.channel("tensor"), version=1)  # leave the shared server as it was
    rig.control.close()


def follow(rig: DeltaRig, channel: Channel, versions: range) -> None:
    for version in versions:
        rig.sync_weights(rig.step(version), channel, version)


@pytest.mark.parametrize("encoding", quick(["xor", "overwrite"], "xor"))
def test_deltas_arrive_and_are_served(rig: DeltaRig, encoding: str) -> None:
    channel = rig.channel_of(update_weight_delta_encoding=encoding)
    with rig.agent():
        follow(rig, channel, range(2, 6))
        rig.assert_serves(rig.now, 5)
    assert [rig.is_full(version) for version in range(2, 6)] == [True, False, False, False]
    assert 0 < channel.costs()["update_weights_density"] < 0.03
    whole = sum(t.numel() * t.element_size() for t in rig.now.values())
    assert channel.costs()["update_weights_wire_bytes"] < whole / 5


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_fifty_random_updates(rig: DeltaRig, encoding: str) -> None:
    """Law: bitwise, for every weight sync compares every tensor of the engine; served at the first and the last."""
    channel = rig.channel_of(update_weight_delta_encoding=encoding, update_weight_full_interval=100)
    with rig.agent():
        follow(rig, channel, range(2, 52))
        rig.assert_serves(rig.now, 51)
    assert not any(rig.is_full(version) for version in range(3, 52))


@pytest.mark.slow
def test_one_altered_float_is_refused_by_name_and_the_next_sync_is_full(rig: DeltaRig) -> None:
    """What travels is altered before it is encoded: checksums fit, and the digests of the engine do not."""
    channel = rig.channel_of()
    with rig.agent():
        follow(rig, channel, range(2, 4))
        with pytest.raises(WeightSyncError, match=r"qkv_proj"):
            rig.sync_weights(rig.step(4), TamperingChannel(channel, one_float), 4)
        assert is_paused(rig.url)
        rig.sync_weights(rig.now, channel, 4)
        assert rig.is_full(4)
        rig.assert_serves(rig.now, 4)


def flip_one(folder: Path, generator: torch.Generator) -> None:
    """One bit of one file that tensors are read from."""
    files = sorted(file for file in folder.iterdir() if file.suffix in (".bin", ".safetensors"))
    file = files[int(torch.randint(len(files), (), generator=generator))]
    if file.suffix == ".bin":
        at = int(torch.randint(file.stat().st_size * 8, (), generator=generator))
    else:  # behind the header, which is text that says where they lie
        start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        at = int(torch.randint(start * 8, file.stat().st_size * 8, (), generator=generator))
    with file.open("r+b") as opened:
        opened.seek(at // 8)
        (byte,) = opened.read(1)
        opened.seek(at // 8)
        opened.write(bytes([byte ^ 1 << at % 8]))


def catch_flips(rig: DeltaRig, turns: int) -> int:
    """How often a flipped bit was caught; each time another weight sync heals it."""
    generator = torch.Generator().manual_seed(7)
    armed = False

    def hook(folder: Path, engines: Any) -> None:
        if armed:
            flip_one(folder, generator)

    channel, caught, version = rig.channel_of(post_write=hook), 0, 2
    with rig.agent():
        rig.sync_weights(rig.step(version), channel, version)
        for turn in range(turns):
            armed, version = True, version + 1
            with pytest.raises(SlimeError, match=r"checksum|damaged|whole"):
                rig.sync_weights(rig.step(version), channel, version)
            caught += 1
            if turn % 20 == 0:
                assert is_paused(rig.url)
            if turn % 4 == 3:
                continue  # the next one is flipped in a full version
            armed = False
            rig.sync_weights(rig.now, channel, version)
        armed = False
        rig.sync_weights(rig.now, channel, version + 1)
        rig.assert_serves(rig.now, version + 1)
    return caught


@pytest.mark.slow
def test_a_flipped_bit_is_caught(rig: DeltaRig) -> None:
    assert catch_flips(rig, 5) == 5


@pytest.mark.slow
def test_a_hundred_flipped_bits_of_a_hundred_are_caught(rig: DeltaRig) -> None:
    """Law: none is served, in deltas and in full versions."""
    assert catch_flips(rig, 100) == 100


POINTS = [("applying model", 1), ("applying model", 5), ("loading", 1)]


@pytest.mark.parametrize("what, at", [POINTS[1]])
def test_an_agent_that_is_killed_in_mid_apply_serves_nothing_and_heals(rig: DeltaRig, what: str, at: int) -> None:
    """Law: SIGKILL while tensors change; the weight sync goes on with the agent that comes after it."""
    killed_and_healed(rig, what, at)


@pytest.mark.slow
@pytest.mark.parametrize("what, at", [POINTS[0], *POINTS[2:], ("copying", 1), ("copying", 2)])
def test_at_every_point(rig: DeltaRig, what: str, at: int) -> None:
    killed_and_healed(rig, what, at)


def killed_and_healed(rig: DeltaRig, what: str, at: int) -> None:
    channel = rig.channel_of(timeout_s=LIMIT_S)
    if what != "copying":  # that is the first, full version
        with rig.agent():
            follow(rig, channel, range(2, 4))
    dying = agent_that_dies(rig.url, rig.folder, rig.local, what=what, at=at)
    outcome: list[Any] = []

    def sync() -> None:
        try:
            outcome.append(rig.sync_weights(rig.step(4), channel, 4))
        except SlimeError as error:
            outcome.append(error)

    thread = threading.Thread(target=sync)
    thread.start()
    assert dying.wait(LIMIT_S) == -signal.SIGKILL
    assert is_paused(rig.url), "nobody has verified it"
    with rig.agent():  # what takes its place
        thread.join(LIMIT_S)
        assert outcome and isinstance(outcome[0], dict), outcome
        rig.assert_serves(rig.now, 4)


@pytest.mark.slow
def test_an_agent_that_is_gone_for_good_leaves_the_engine_paused(rig: DeltaRig) -> None:
    channel = rig.channel_of(timeout_s=3.0)
    with rig.agent():
        follow(rig, channel, range(2, 4))
    (rig.folder / "agents").joinpath(rig.url.split("//")[1].replace(":", "_"), "agent.json").write_text("{}")
    with pytest.raises(DeadlineExceeded, match=r"waited 3 s for the weights agent"):
        rig.sync_weights(rig.step(4), channel, 4)
    assert is_paused(rig.url)
    with rig.agent():
        rig.sync_weights(rig.now, channel, 4)
    rig.assert_serves(rig.now, 4)


@pytest.mark.slow
def test_an_engine_of_another_cluster_is_updated_through_the_folder_alone(rig: DeltaRig) -> None:
    """Law: the trainer's side makes no request to the server: its address, as the trainer knows it, leads nowhere."""
    known_as = "http://elsewhere.invalid:1"
    rig.receivers = [Receiver(FolderEngineControl(rig.folder, known_as, rig.control.layout, LIMIT_S))]
    words = ["weights-agent", "--engine", rig.url, "--name", known_as, "--disk-dir", str(rig.folder)]
    program = [sys.executable, "-m", "slime.cli.main", *words, "--local-dir", str(rig.local)]
    agent = subprocess.Popen(program, env={**os.environ, "SLIME_ENGINE_API_KEY": ""})
    try:
        channel = rig.channel_of()
        follow(rig, channel, range(2, 5))
        rig.assert_serves(rig.now, 4)
        with pytest.raises(WeightSyncError, match=r"qkv_proj"):
            rig.sync_weights(rig.step(5), TamperingChannel(channel, one_float), 5)
        assert is_paused(rig.url)
        rig.sync_weights(rig.now, channel, 5)
        rig.assert_serves(rig.now, 5)
    finally:
        agent.terminate()
        assert agent.wait(30) == 0
        rig.receivers = [Receiver(rig.control)]


def test_the_agent_of_a_run_is_started_again_and_calls_the_users_hook(rig: DeltaRig) -> None:
    hook = rig.tmp_path / "hooks.py"
    hook.write_text(
        "def note(source_dir, target_version):\n"
        f"    open({str(rig.tmp_path / 'seen')!r}, 'a').write(f'{{target_version}} ')\n"
    )
    settings = AgentSettings(str(rig.folder), str(rig.local), f"{hook}:note", LIMIT_S)
    agent = AgentProcess(settings, rig.url, None, rig.tmp_path / "agent.log")
    try:
        channel = rig.channel_of()
        follow(rig, channel, range(2, 4))
        os.kill(agent.pid, signal.SIGKILL)
        deadline, old = time.monotonic() + LIMIT_S, agent.pid
        while agent.pid == old and time.monotonic() < deadline:
            agent.tend()
            time.sleep(0.05)
        follow(rig, channel, range(4, 5))
        rig.assert_serves(rig.now, 4)
    finally:
        agent.stop()
    assert (rig.tmp_path / "seen").read_text().split() == ["2", "3", "4"]


@pytest.mark.slow
def test_kills_at_any_moment(rig: DeltaRig) -> None:
    """Law: at moments that nobody chose, too, the weight sync goes on with the agent that is started again."""
    settings = AgentSettings(str(rig.folder), str(rig.local), None, LIMIT_S)
    agent, over, rng = AgentProcess(settings, rig.url, None, rig.tmp_path / "agent.log"), threading.Event(), Random(9)

    def tend() -> None:
        while not over.wait(0.05):
            agent.tend()

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):  # it is not yet started again
            os.kill(agent.pid, signal.SIGKILL)

    tending = threading.Thread(target=tend)
    tending.start()
    try:
        channel = rig.channel_of(timeout_s=LIMIT_S)
        for version in range(2, 22):
            kill = threading.Timer(rng.uniform(0, 0.3), end)
            kill.start()
            rig.sync_weights(rig.step(version), channel, version)
            kill.join()
            rig.assert_serves(rig.now, version)
        assert sum(rig.is_full(int(path.name[-6:])) for path in rig.folder.glob("weight_v*")) == 1, (
            "none was sent again"
        )
    finally:
        over.set()
        tending.join()
        agent.stop()


def resources(pid: int) -> tuple[int, int, int]:
    """(open files, resident MiB, mappings of shared memory) of a process."""
    resident = next(
        int(line.split()[1]) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line
    )
    mapped = Path(f"/proc/{pid}/maps").read_text().count("/dev/shm/")
    return len(os.listdir(f"/proc/{pid}/fd")), resident // 1024, mapped


def repeat(rig: DeltaRig, num: int, warm: int) -> None:
    """`num` weight syncs; after the first `warm` nothing grows."""
    settings = AgentSettings(str(rig.folder), str(rig.local), None, LIMIT_S)
    agent = AgentProcess(settings, rig.url, None, rig.tmp_path / "agent.log")
    try:
        channel = rig.channel_of(update_weight_full_interval=10)
        follow(rig, channel, range(2, 2 + warm))
        gc.collect()
        before = [resources(pid) for pid in (os.getpid(), agent.pid)]
        follow(rig, channel, range(2 + warm, 2 + num))
        gc.collect()
        after = [resources(pid) for pid in (os.getpid(), agent.pid)]
        rig.assert_serves(rig.now, 1 + num)
    finally:
        agent.stop()
    for (files, mib, mapped), (files_before, mib_before, mapped_before) in zip(after, before, strict=True):
        grown = files > files_before + 2 or mib > mib_before + 48 or mapped > mapped_before
        assert not grown, f"{before} became {after}"
    assert len(list(rig.folder.glob("weight_v*"))) <= 10


@pytest.mark.slow
def test_weight_syncs_in_a_row_leave_nothing_behind(rig: DeltaRig) -> None:
    repeat(rig, 25, 12)


@pytest.mark.slow
def test_five_hundred_in_a_row(rig: DeltaRig) -> None:
    """Law: no growth of memory, open files or shared memory in trainer and agent."""
    repeat(rig, 500, 60)
