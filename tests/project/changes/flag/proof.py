"""The flag is parsed, has a range, is explained and is in --help."""

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


assert parse_args(words).console_width == 100
args = parse_args([*words, "--console-width", "40"])
assert args.console_width == 40 and args.to_json_dict()["console_width"] == 40
with pytest.raises(ConfigError, match="console_width"):
    parse_args([*words, "--console-width", "3"])
assert "Columns of a toy's console." in said("--help")
(line,) = (line for line in said("--console-width", "40", "--explain").splitlines() if "console_width" in line)
assert "40" in line and "command line" in line, line
