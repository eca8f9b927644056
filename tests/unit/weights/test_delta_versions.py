"""Versions in a folder: which are full, which follow on which, what may go, and who writes them. Against real files;
engines are files, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.core.errors import WeightSyncError
from slime.weights.delta import folder as chain
from slime.weights.delta.channel import DeltaChannel
from slime.weights.delta.folder import Base, Entry, Manifest, Report, folder_of, merged
from slime.weights.receivers import Peers, Receiver
from slime.weights.send_plan import Bucket
from tests.support.delta_rig import URL, Rig
from tests.support.marks import quick
from tests.support.weight_agents import FileEngine, agent_beside, delta_channel


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(tmp_path, stack)


@pytest.mark.parametrize("encoding", quick(["xor", "overwrite"], "xor"))
@pytest.mark.slow
def test_after_fifty_updates_a_copy_is_the_trainers_bit_for_bit(tmp_path: Path, encoding: str) -> None:
    with ExitStack() as stack:
        rig = Rig(tmp_path, stack, update_weight_delta_encoding=encoding)
        for version in range(1, 51):
            rig.step(version, density=0.9 if version == 7 else 0.05)
            rig.sync(version)
        rig.assert_served(50)
        assert rig.names() == [folder_of(v) for v in range(41, 51)], "a full one each twenty; older ones went"
        assert [rig.manifest(v).base is None for v in range(41, 51)] == [True] + [False] * 9
        assert encoding in {entry.encoding for entry in rig.manifest(50).entries}


def test_the_first_version_is_full_and_of_the_trainers_own_weights(rig: Rig) -> None:
    """Law: also after a resume: a new channel knows nothing of what is in the folder, and trusts none of it."""
    rig.sync(1)
    rig.step(2)
    rig.sync(2)
    assert rig.manifest(1).base is None and rig.manifest(2).base == Base(1, rig.manifest(1).digest)
    rig.begin_again()
    rig.step(3)
    rig.sync(2)  # the version goes on where the checkpoint was, which may be behind
    assert rig.manifest(2).base is None
    rig.assert_served(2)
    assert rig.names() == ["weight_v000002"]


def test_agents_also_bring_whole_versions(tmp_path: Path) -> None:
    """Law: without deltas every version is full, and the trainer keeps no copy of its weights."""
    with ExitStack() as stack:
        rig = Rig(tmp_path, stack, update_weight_mode="full")
        for version in (1, 2, 3):
            rig.step(version)
            rig.sync(version)
            rig.assert_served(version)
            assert rig.names() == [folder_of(version)] and rig.manifest(version).base is None
        assert rig.channel._memory is None


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
        assert rig.engines[0].log == [
            *("pause", "flush", "begin", "pause", "load 1", "end", "resume 1"),
            *("pause", "flush", "begin", "pause", "load 2", "end", "resume 2"),
        ]
        assert rig.manifest(2).base is not None
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
        assert rig.manifest(3).base is None, "after a failure it is full"


# --- senders ----------------------------------------------------------------------------------------------------------


def test_many_senders_write_one_version(tmp_path: Path) -> None:
    """Law: each writes what it has, names of files do not clash, and one makes a version of what all reported."""
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
                    peers=Peers(rank=rank),
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
            reports = [sender.report() for sender in senders]
            senders[0].finish(rig.receivers, version=version, reports=reports)
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
    with pytest.raises(WeightSyncError, match="w was sent twice: in a and b"):
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
    gone = chain.prunable([folder_of(v) for v in made] + ["agents", ".weight_v000001.tmp"], newest_full=newest_full)
    left = {v: m for v, m in made.items() if folder_of(v) not in gone}

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
