"""The log of a process, which people read in a terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.observability.logs import setup_logging


@pytest.fixture
def root_as_it_was() -> Iterator[None]:
    """The root logger's handlers and level, which pytest's own are among, come back after the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    for handler in handlers:
        root.removeHandler(handler)
    yield
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)


def test_no_line_orders_a_terminal_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root_as_it_was: None
) -> None:
    """Law: what a model says, in a message or in an exception, reaches console and file spelled out."""
    path = tmp_path / "driver.log"
    setup_logging(path)
    hostile = "\x1b[2J\x1b]0;title\x07 \u202egnp"
    try:
        raise ValueError(hostile)
    except ValueError:
        logging.getLogger("reward").exception("answer %s", hostile)
    for told in (capsys.readouterr().err, path.read_text()):
        assert told.count("\\x1b[2J") == 2 and "\\u202e" in told
        assert not {"\x1b", "\x07", "\u202e"} & set(told)
        assert "ValueError" in told and "\n" in told.strip(), "the traceback keeps its lines"
