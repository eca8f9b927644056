"""Keeps an engine's record of changed settings from growing with every bucket of weights.

SGLang 0.5.16 records each change of its settings after startup and never reads the record. The weight version is a
setting, so without the hook the server grows by 0.3 kB per bucket. The hook keeps only the newest record of each kind.
SGLang 0.5.23 keeps no such record.
"""

from __future__ import annotations

from typing import Any

from slime.compat import Hook
from slime.core.engine_versions import BEFORE_SESSIONS

_RECORD = "_runtime_mutations"


def _keep_newest(_result: Any, settings: Any, *_: Any, **__: Any) -> None:
    """Keeps only the last change for each source and set of fields."""
    record = getattr(settings, _RECORD, None)
    if record:
        record[:] = {(source, tuple(fields)): (source, fields) for source, fields in record}.values()


HOOKS = (Hook("AFTER", "sglang.srt.server_args.ServerArgs.override", _keep_newest, BEFORE_SESSIONS),)
