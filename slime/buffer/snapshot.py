"""The saved state of the Data Buffer: what is taken of it at one moment, and the JSON made of that.

Taking is quick, because groups are kept as text since they came; putting the text together may run in any thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.buffer.origin import Issued
from slime.core.errors import CheckpointError

FORMAT = 1
"""Version of the saved state."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one moment; shares nothing with the live buffer that changes."""

    figures: Mapping[str, Any]
    """The walk, the account and the weight version."""
    buffered: Sequence[str]
    """Groups to be worked on, as JSON, in their order."""
    finished: Sequence[str]
    """Groups to be trained, as JSON."""
    in_flight: Sequence[tuple[int, Issued]]
    """In the order of issue."""

    def to_json(self) -> str:
        """One JSON object."""
        issued = '{{"group_index": {}, "attempts": {}, "group": {}}}'
        in_flight = [issued.format(index, one.attempts, one.snapshot or "null") for index, one in self.in_flight]
        parts = {"buffered": self.buffered, "finished": self.finished, "in_flight": in_flight}
        groups = ", ".join(f'"{name}": [{", ".join(texts)}]' for name, texts in parts.items())
        return f"{json.dumps({'format': FORMAT, **self.figures})[:-1]}, {groups}}}"


def check_format(state: Mapping[str, Any], *, has_walk: bool) -> None:
    """Raises `CheckpointError` for a state of another format, or of a run with (without) a dataset."""
    if state.get("format") != FORMAT:
        raise CheckpointError(f"got a buffer state of format {state.get('format')}; this version reads {FORMAT}")
    if (state["walk"] is not None) != has_walk:
        raise CheckpointError("got a buffer state with a dataset for a run without one, or the other way round")
