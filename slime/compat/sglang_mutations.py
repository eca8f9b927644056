"""Keeps an engine's record of changed settings from growing with every bucket that it takes.

SGLang 0.5.16 notes each change of its settings after the start, with who made it, and reads that nowhere. Its weight
version is such a setting, and each bucket brings one, so that the server grew by 0.3 kB with each. `register` has it
keep the newest note of each kind. To be removed when SGLang does so itself.
"""

from __future__ import annotations

from typing import Any

_OVERRIDE = "sglang.srt.server_args.ServerArgs.override"
_RECORD = "_runtime_mutations"


def register() -> None:
    """Call before SGLang's server loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_OVERRIDE, _keep_newest, HookType.AFTER)


def _keep_newest(_result: Any, settings: Any, *_: Any, **__: Any) -> None:
    """Behind a change: of those by the same source of the same fields the last one stays."""
    record = getattr(settings, _RECORD, None)
    if record:
        record[:] = {(source, tuple(fields)): (source, fields) for source, fields in record}.values()
