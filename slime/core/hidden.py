"""What is written in place of a secret, in messages and in records."""

from __future__ import annotations

HIDDEN = "<hidden>"
