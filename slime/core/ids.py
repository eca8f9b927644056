"""Identifiers of a run: one id that names its folder, its processes (environment variable) and its temporary files."""

from __future__ import annotations

import secrets
import time

RUN_ID_ENV = "SLIME_RUN_ID"
"""Set in every process that a run starts; the guardian finds what a dead driver left behind by it."""


def new_run_id() -> str:
    """A short id, unique in practice, sortable by time, safe in file names: `20260131-235959-1a2b3c`."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
