"""The transport is chosen on the command line and brings verified weights; a lost one is noticed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slime.core.errors import WeightSyncError
from slime.core.topology import ONE_RANK, EngineLayout
from slime.serving.payloads import digest
from slime.settings import parse_args
from slime.weights.receivers import Receiver
from slime.weights.sync import sync_weights
from slime.weights.transports import TRANSPORTS
from tests.support.command_line import complete
from tests.support.weights import FakeEngine, FakeWire, Whole, model, transport_context

words = [*complete(Path(sys.argv[1])), "--device", "cpu", "--update-weight-transport", "parcel"]
args = parse_args([*words, "--tensors-per-parcel", "2"])
table, state = model()


def synced(drop: str | None = None) -> list[FakeEngine]:
    """Engines after a weight sync."""
    wire = FakeWire()
    engines = [
        FakeEngine("http://a", table, wire, ONE_RANK),
        FakeEngine("http://b", table, wire, EngineLayout(tp_size=2)),
    ]
    engines[1].drop = drop
    channel = TRANSPORTS.build(args.update_weight_transport, args).open(transport_context(serialize=wire.serialize))
    sync_weights(
        Whole(table, state.items()),
        receivers=[Receiver(engine) for engine in engines],
        channel=channel,
        digest=digest,
        version=3,
        buffer_bytes=4096,
    )
    return engines


for engine in synced():
    assert engine.log[-1] == "resume", engine.log
    assert engine.log.count("update") >= len(state) / 2, "parcels of two tensors"
with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):
    synced(drop="model.norm.weight")
