"""Versions in a folder: which are full, which follow on which, what may go; many senders, a copy that is killed,
dropped, corrupted, reordered and doubled deltas. Against real files; engines are files, too."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.core.errors import DeadlineExceeded, EngineError, SlimeError, WeightSyncError
from slime.core.layout import EngineLayout
from slime.serving.folder_control import FolderEngineControl
from slime.serving.wire import digest
from slime.weights.buckets import Bucket
from slime.weights.delta import chain
from slime.weights.delta.channel import DeltaChannel
from slime.weights.delta.local import LocalCheckpoint
from slime.weights.delta.mailbox import call, mailbox
from slime.weights.delta.manifest import Base, Entry, Manifest, Report, merged
from slime.weights.receivers import Peers, Receiver
from slime.weights.sync import sync_weights
from tests.support.weight_agents import FileEngine, agent_beside, delta_channel
from tests.support.weights import model

URL = "http://127.0.0.1:30000"


class Rig:
    """A trainer of one rank, engines with agents, and a folder between them."""

    def __init__(self, tmp_path: Path, stack: ExitStack, *urls: str, folder_only: bool = False, **more: Any) -> None:
        self.folder, self.stack = tmp_path / "shared", stack
        self.folder.mkdir()
        self.checkpoint = tmp_path / "checkpoint"
        self.checkpoint.mkdir()
        (self.checkpoint / "config.json").write_text("{}")
        (self.checkpoint / "model.safetensors").write_text("old weights")
        self.table, state = model()
        self.state = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
        self.locals = tmp_path / "local"
        self.folder_only = folder_only
        self.channel = cast(
            DeltaChannel,
            delta_channel(self.folder, self.locals, table=self.table, hf_checkpoint=self.checkpoint, **more),
        )
        self.engines: list[FileEngine] = []
        self.agents: list[Any] = []
        self.receivers: list[Receiver] = []
        for url in urls or (URL,):
            self.join(url)

    def join(self, url: str) -> FileEngine:
        engine = FileEngine(url, self.table)
        local = self.locals / url[-5:]
        self.agents.append(self.stack.enter_context(agent_beside(cast(Any, engine), self.folder, local)))
        self.engines.append(engine)
        control = FolderEngineControl(self.folder, url, engine.layout, 20) if self.folder_only else engine
        self.receivers.append(Receiver(cast(Any, control)))
        return engine

    def step(self, seed: int, density: float = 0.05) -> None:
        """A few elements of some tensors move."""
        generator = torch.Generator().manual_seed(seed)
        for number, (name, tensor) in enumerate(self.state.items()):
            if (number + seed) % 3:
                moved = torch.rand(tensor.shape, generator=generator) < density
                self.state[name] = torch.where(moved, tensor * 1.01, tensor)

    def sync(self, version: int) -> dict[str, float]:
        return sync_weights(
            iter(self.state.items()),
            table=self.table,
            receivers=self.receivers,
            channel=self.channel,
            digest=digest,
            version=version,
            buffer_bytes=1024,
        )

    def assert_served(self, version: int) -> None:
        for engine in self.engines:
            assert engine.log[-1] == f"resume {version}"
            for name, tensor in self.state.items():
                assert torch.equal(engine.loaded[name].view(torch.int16), tensor.view(torch.int16)), name

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name != "agents")

    def manifest(self, version: int) -> Manifest:
        return Manifest.read(self.folder / chain.folder_of(version))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(tmp_path, stack)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_after_fifty_updates_a_copy_is_the_trainers_bit_for_bit(tmp_path: Path, encoding: str) -> None:
    with ExitStack() as stack:
        rig = Rig(tmp_path, stack, update_weight_delta_encoding=encoding)
        for version in range(1, 51):
            rig.step(version, density=0.9 if version == 7 else 0.05)
            rig.sync(version)
        rig.assert_served(50)
        assert rig.names() == [chain.folder_of(v) for v in range(41, 51)], "a full one each twenty; older ones went"
        assert [rig.manifest(v).base is None for v in range(41, 51)] == [True] + [False] * 9


def test_the_first_version_is_full_and_of_the_trainers_own_weights(rig: Rig) -> None:
    """Law: also after a resume: a new channel knows nothing of what is in the folder, and trusts none of it."""
    rig.sync(1)
    rig.step(2)
    rig.sync(2)
    assert rig.manifest(1).base is None and rig.manifest(2).base == Base(1, rig.manifest(1).digest)
    rig.channel = cast(
        DeltaChannel, delta_channel(rig.folder, rig.locals, table=rig.table, hf_checkpoint=rig.checkpoint)
    )
    rig.step(3)
    rig.sync(2)  # the version goes on where the checkpoint was, which may be behind
    assert rig.manifest(2).base is None
    rig.assert_served(2)
    assert rig.names() == ["weight_v000002"]


def test_a_full_version_is_a_hugging_face_folder(rig: Rig) -> None:
    rig.sync(1)
    folder = rig.folder / "weight_v000001"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(rig.state) and (folder / "config.json").read_text() == "{}"
    assert not (folder / "model.safetensors").exists() and not (folder / "config.json").is_symlink()


def test_an_engine_that_joins_gets_a_full_version(rig: Rig) -> None:
    rig.sync(1)
    rig.step(1)
    rig.sync(2)
    rig.join("http://127.0.0.1:30001")
    rig.step(2)
    rig.sync(3)
    assert rig.manifest(3).base is None
    rig.step(3)
    rig.sync(4)
    assert rig.manifest(4).base is not None
    rig.assert_served(4)


def test_agents_of_one_host_share_a_copy(tmp_path: Path) -> None:
    """The first one applies, the others find it applied; nobody loads while it changes."""
    with ExitStack() as stack:
        rig = Rig(tmp_path, stack)
        other = FileEngine("http://127.0.0.1:30009", rig.table)
        stack.enter_context(agent_beside(cast(Any, other), rig.folder, rig.locals / URL[-5:]))
        rig.engines.append(other)
        rig.receivers.append(Receiver(cast(Any, other)))
        for version in range(1, 6):
            rig.step(version)
            rig.sync(version)
            rig.assert_served(version)


def test_an_engine_is_updated_through_the_folder_alone(tmp_path: Path) -> None:
    """Law: pause, digests and resume go through it, too; two ranks are compared as one is."""
    with ExitStack() as stack:
        rig = Rig(tmp_path, stack, folder_only=True)
        for version in (1, 2):
            rig.step(version)
            rig.sync(version)
            rig.assert_served(version)
        assert rig.engines[0].log == ["pause", "flush", "load 1", "resume 1", "pause", "flush", "load 2", "resume 2"]
        rig.engines[0].loaded["model.norm.weight"][0] += 1
        original = rig.engines[0].update_weights_from_disk

        def loads_nothing(**update: Any) -> None:
            rig.engines[0].log.append("load nothing")

        rig.engines[0].update_weights_from_disk = loads_nothing  # type: ignore[method-assign]
        with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):
            rig.sync(3)
        assert rig.engines[0].log[-1] == "load nothing", "it stays paused"
        rig.engines[0].update_weights_from_disk = original  # type: ignore[method-assign]
        rig.sync(3)
        rig.assert_served(3)


# --- what may happen to a delta ---------------------------------------------------------------------------------------


def piece_file(folder: Path) -> Path:
    (file,) = folder.glob("delta-*.bin")
    return file


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at // 8)
        (byte,) = opened.read(1)
        opened.seek(at // 8)
        opened.write(bytes([byte ^ 1 << at % 8]))


def dropped(rig: Rig, folder: Path) -> None:
    shutil.rmtree(folder)


def corrupted(rig: Rig, folder: Path) -> None:
    flip(piece_file(folder), 99)


def cut_off(rig: Rig, folder: Path) -> None:
    os.truncate(piece_file(folder), piece_file(folder).stat().st_size // 2)


def without_manifest(rig: Rig, folder: Path) -> None:
    (folder / "manifest.json").unlink()


def reordered(rig: Rig, folder: Path) -> None:
    """The delta before stands in the place of this one."""
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name(chain.folder_of(2)), folder)


def of_an_older_base(rig: Rig, folder: Path) -> None:
    found = json.loads((folder / "manifest.json").read_text())
    found["base"]["version"] -= 1
    (folder / "manifest.json").write_text(json.dumps(found))


def one_tensor_less(rig: Rig, folder: Path) -> None:
    """Its digest fits: as if a sender's report had been lost."""
    found = Manifest.read(folder)
    Manifest(found.version, found.base, found.checksum, found.whole, found.entries[1:]).write(folder)


DAMAGES = (dropped, corrupted, cut_off, without_manifest, reordered, of_an_older_base, one_tensor_less)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_delta_is_never_served_and_the_next_sync_heals(rig: Rig, damage: Callable[[Rig, Path], None]) -> None:
    """Law: the engine stays paused, at the version before, and one weight sync later it has the trainer's weights."""
    for version in (1, 2):
        rig.step(version)
        rig.sync(version)
    rig.step(3)
    context = rig.channel._context
    object.__setattr__(context, "post_write", lambda folder, engines: damage(rig, folder))
    with pytest.raises(EngineError) as caught:
        rig.sync(3)
    assert caught.value.engines == (URL,)
    assert rig.engines[0].version == 2 and rig.engines[0].log[-2:] == ["pause", "flush"]
    object.__setattr__(context, "post_write", None)
    assert rig.channel.heals
    rig.sync(3)
    assert not rig.channel.heals and rig.manifest(3).base is None
    rig.assert_served(3)


def test_any_flipped_bit_of_a_version_is_caught(rig: Rig) -> None:
    """Law: one hundred of one hundred, in pieces and in manifests."""
    rig.sync(1)
    rig.step(1)
    rig.sync(2)
    folder, target = rig.folder / "weight_v000002", Base(2, rig.manifest(2).digest)
    local = LocalCheckpoint(rig.locals / "apart", rig.folder)
    generator = torch.Generator().manual_seed(0)
    for turn in range(100):
        local.bring_to(Base(1, rig.manifest(1).digest))
        file = piece_file(folder) if turn % 2 else folder / "manifest.json"
        at = int(torch.randint(file.stat().st_size * 8, (), generator=generator))
        flip(file, at)
        with pytest.raises(WeightSyncError):
            local.bring_to(target)
        flip(file, at)
    local.bring_to(target)
    assert local.state is not None and local.state.version == 2


def test_a_call_that_is_made_twice_changes_nothing(rig: Rig) -> None:
    """Law: a version is applied once, however often it is asked for."""
    rig.sync(1)
    rig.step(1)
    rig.sync(2)
    target = {"version": 2, "digest": rig.manifest(2).digest}
    for _ in range(3):
        assert call(mailbox(rig.folder, URL), "apply", target, limit_s=20) == {"full": 0, "deltas": 0, "num_bytes": 0}
    assert torch.equal(rig.engines[0].loaded["model.norm.weight"], rig.state["model.norm.weight"])


def test_versions_that_were_missed_are_caught_up_in_order(rig: Rig) -> None:
    """Law: whichever version is asked for first, what it stands on is applied before it."""
    for version in range(1, 5):
        rig.step(version)
        rig.sync(version)
    late = LocalCheckpoint(rig.locals / "late", rig.folder)
    done = late.bring_to(Base(4, rig.manifest(4).digest))
    assert (done.full, done.deltas) == (1, 3)
    assert late.state is not None and late.state.digest == rig.manifest(4).digest
    assert late.bring_to(Base(2, rig.manifest(2).digest)).full == 1, "back is a way from the full one"


def test_a_copy_that_somebody_changed_is_made_anew(rig: Rig) -> None:
    rig.sync(1)
    rig.step(1)
    file = max((rig.locals / URL[-5:] / "model").glob("*.safetensors"), key=lambda f: f.stat().st_size)
    for at in range(10):
        flip(file, (file.stat().st_size - 2 * at - 1) * 8)
    rig.sync(2)
    rig.assert_served(2)


KILLED_COPY = """
import os, signal, sys
from pathlib import Path
from slime.weights.delta.local import LocalCheckpoint
from slime.weights.delta.manifest import Base, Manifest
from slime.weights.delta import local

folder, copy, version, at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
seen = 0

def here(doing):
    global seen
    seen += 1
    if seen == at:
        os.kill(os.getpid(), signal.SIGKILL)

local.MOST_THREADS = 1
digest = Manifest.read(folder / f"weight_v{version:06d}").digest
LocalCheckpoint(copy, folder, here).bring_to(Base(version, digest))
"""


@pytest.mark.parametrize("version", [2, 3])
def test_a_copy_that_is_killed_in_mid_apply_is_never_taken_for_whole(rig: Rig, version: int) -> None:
    """Law: at whatever tensor or file; the next one to come makes a whole copy of it."""
    for number in (1, 2, 3):
        rig.step(number)
        rig.sync(number)
    whole = LocalCheckpoint(rig.locals / "whole", rig.folder)
    whole.bring_to(Base(version, rig.manifest(version).digest))
    num_notes = sum(1 + len(rig.manifest(number).entries) for number in range(2, version + 1))
    for at in (1, 2, num_notes // 2, num_notes):
        copy = rig.locals / f"killed-{at}"
        local = LocalCheckpoint(copy, rig.folder)
        local.bring_to(Base(1, rig.manifest(1).digest))
        program = [sys.executable, "-c", KILLED_COPY, str(rig.folder), str(copy), str(version), str(at)]
        assert subprocess.run(program, timeout=60).returncode == -signal.SIGKILL
        held = local.state
        assert (held is None) == (at not in (1, 1 + len(rig.manifest(2).entries) + 1)), "a torn copy has no state"
        local.bring_to(Base(version, rig.manifest(version).digest))
        for file in whole.model.iterdir():
            assert file.read_bytes() == (local.model / file.name).read_bytes()


# --- senders ----------------------------------------------------------------------------------------------------------


def test_many_senders_write_one_version(tmp_path: Path) -> None:
    """Law: each writes what it has, names of files do not clash, and one publishes what all reported."""
    with ExitStack() as stack:
        rig = Rig(tmp_path, stack)
        senders = [
            cast(
                DeltaChannel,
                delta_channel(
                    rig.folder,
                    rig.locals,
                    table=rig.table,
                    hf_checkpoint=rig.checkpoint,
                    rank=rank,
                    peers=Peers(is_sender=rank == 0),
                ),
            )
            for rank in range(3)
        ]
        for version in (1, 2, 3):
            rig.step(version)
            for sender in senders:
                sender.begin(rig.receivers, version=version)
            for number, item in enumerate(rig.state.items()):
                sender = senders[number % 3]
                sender.deliver(sender.prepare(Bucket((item,)), rig.receivers), rig.receivers, version=version)
            senders[0].publish([sender.report() for sender in senders], rig.receivers, version=version)
            for sender in senders:
                sender.settle()
            files = {entry.file for entry in rig.manifest(version).entries}
            assert {name[6:12] for name in files} >= ({"r00000", "r00001", "r00002"} if version == 1 else set())
            assert len(files) >= 2
        rig.engines[0].resume()
        rig.assert_served(3)
        assert rig.manifest(3).base == Base(2, rig.manifest(2).digest)


def entry(name: str, file: str = "a") -> Entry:
    return Entry(name, "BF16", (2,), 4, "xor", file, 0, 1, "x", "y")


def test_a_tensor_that_two_senders_sent_is_refused() -> None:
    reports = [Report((entry("w"),), 2, 1), Report((entry("w", "b"),), 2, 1)]
    with pytest.raises(WeightSyncError, match="got w in a and in b"):
        merged(reports)


@given(st.permutations([Report((entry(f"w{i}", f"f{i}"),), i, i) for i in range(4)]))
@settings(max_examples=20)
def test_the_order_of_senders_does_not_matter(reports: list[Report]) -> None:
    assert merged(reports) == merged(reports[::-1])
    assert merged(reports).num_elements == 6


# --- the rules --------------------------------------------------------------------------------------------------------


@given(outcomes=st.lists(st.sampled_from(["well", "failed", "joined"]), max_size=60), every=st.integers(1, 7))
@settings(deadline=None)
def test_a_delta_only_follows_a_version_that_every_engine_confirmed(outcomes: list[str], every: int) -> None:
    """Laws: a full version first, after a failure, for a newcomer, and at least every so many."""
    since: int | None = None
    confirmed, kinds = False, list[bool]()
    for outcome in outcomes:
        full = chain.is_full(since_full=since, every=every, confirmed=confirmed, all_known=outcome != "joined")
        assert full or (confirmed and outcome != "joined" and kinds)
        kinds.append(full)
        confirmed = outcome != "failed"
        if confirmed:
            since = 0 if full or since is None else since + 1
        assert True in kinds[-every:]


@given(fulls=st.lists(st.booleans(), min_size=1, max_size=30), data=st.data())
def test_pruning_leaves_every_chain_whole(fulls: list[bool], data: st.DataObject) -> None:
    """Law: from what is left, each version that is left can be made."""
    fulls[0] = True
    made: dict[int, Manifest] = {}
    for version, full in enumerate(fulls, 1):
        base = None if full else Base(version - 1, made[version - 1].digest)
        made[version] = Manifest(version, base, "xxh3-128", f"{version}", ())
    newest_full = max(version for version, full in enumerate(fulls, 1) if full)
    gone = chain.prunable(
        [chain.folder_of(v) for v in made] + ["agents", ".weight_v000001.tmp"], newest_full=newest_full
    )
    left = {v: m for v, m in made.items() if chain.folder_of(v) not in gone}

    def read(version: int) -> Manifest:
        if version not in left:
            raise WeightSyncError("gone")
        return left[version]

    assert min(left) == newest_full
    target = data.draw(st.sampled_from(sorted(left)))
    steps = chain.steps_to(Base(target, left[target].digest), None, read)
    assert [m.version for m in steps] == list(range(newest_full, target + 1))
    held = data.draw(st.sampled_from(sorted(left)))
    if held <= target:
        steps = chain.steps_to(Base(target, left[target].digest), left[held].digest, read)
        assert [m.version for m in steps] == list(range(held + 1, target + 1))


@pytest.mark.parametrize("name", ["../x.bin", "/etc/passwd", ".hidden", "a\\b"])
def test_a_manifest_names_no_file_outside_of_its_version(tmp_path: Path, name: str) -> None:
    Manifest(1, None, "xxh3-128", "", (entry("w", name),)).write(tmp_path)
    with pytest.raises(WeightSyncError, match="damaged"):
        Manifest.read(tmp_path)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_without_an_agent_the_trainer_says_so(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"got no weights agent.*start `slime weights-agent`"):
        call(mailbox(tmp_path, URL), "pause", {"mode": "abort"}, limit_s=0.2)


def test_an_agent_that_does_not_answer_is_named_and_the_call_is_taken_back(tmp_path: Path) -> None:
    box = mailbox(tmp_path, URL)
    box.mkdir(parents=True)
    (box / "agent.json").write_text('{"doing": "applying version 7"}')
    with pytest.raises(DeadlineExceeded, match=r"127.0.0.1_30000 to apply; last progress: applying version 7"):
        call(box, "apply", {}, limit_s=0.2)
    assert not (box / "call.json").exists()


@pytest.mark.parametrize("method", ["__init__", "local", "run", "update_weights_from_disk"])
def test_an_agent_knows_its_own_methods_alone(rig: Rig, method: str) -> None:
    with pytest.raises(EngineError, match="which is none of apply"):
        call(mailbox(rig.folder, URL), method, {"model_path": "/tmp"}, limit_s=20)


def test_an_engine_that_is_lost_is_not_waited_for(tmp_path: Path) -> None:
    box = mailbox(tmp_path, URL)
    box.mkdir(parents=True)
    (box / "agent.json").write_text("{}")
    lost = threading.Event()
    threading.Timer(0.2, lost.set).start()
    with pytest.raises(SlimeError, match="was lost"):
        call(box, "apply", {}, limit_s=60, is_lost=lost.is_set)


def test_digests_of_several_ranks_come_through_the_folder(tmp_path: Path) -> None:
    table, state = model()
    engine = FileEngine(URL, table, EngineLayout(tp_size=2))
    engine.loaded = dict(state)
    with agent_beside(cast(Any, engine), tmp_path, tmp_path / "local"):
        control = FolderEngineControl(tmp_path, URL, engine.layout, 20)
        assert control.weight_checksums() == engine.weight_checksums()
