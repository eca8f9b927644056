"""The flag is parsed, has a range, is explained and is in --help; the engine's settings follow it."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from slime.core.errors import ConfigError
from slime.settings import parse_args
from tests.support.command_line import complete

words = complete(Path(sys.argv[1]))


def said(*more: str) -> str:
    """What the command line answers."""
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit):
        parse_args([*words, *more])
    return out.getvalue()


plain, args = parse_args(words), parse_args([*words, "--requests-at-once", "4"])
assert plain.requests_at_once == 0 and "max_running_requests" not in plain.sglang
assert args.requests_at_once == 4 and args.to_json_dict()["requests_at_once"] == 4
assert args.sglang["max_running_requests"] == 4, "it does not reach the engine"
with pytest.raises(ConfigError, match="requests-at-once"):
    parse_args([*words, "--requests-at-once", "-1"])
assert "requests that an engine works on at a time" in " ".join(said("--help", "requests-at-once").split())
lines = said("--requests-at-once", "4", "--explain").splitlines()
(line,) = (line for line in lines if line.split()[:1] == ["requests_at_once"])
assert "4" in line and "command line" in line, line
assert any("max_running_requests" in line and "--requests-at-once 4" in line for line in lines), lines
