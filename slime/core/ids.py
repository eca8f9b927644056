"""Identifiers of a run: one id that names its folder, its processes (environment variable) and its temporary files."""

from __future__ import annotations

import os
import secrets
import time

RUN_ID_ENV = "SLIME_RUN_ID"
"""Set in every process that a run starts; the guardian finds what a dead driver left behind by it."""


def new_run_id() -> str:
    """A short id, unique in practice, sortable by time, safe in file names: `20260131-235959-1a2b3c`."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def scratch_prefix(kind: str = "") -> str:
    """How the name of every temporary folder begins: the guardian of the run removes it, should its maker be killed."""
    return f"slime-{os.environ.get(RUN_ID_ENV, 'no-run')}-{kind}"
