"""The log of a process, which people read in a terminal."""

from __future__ import annotations

import logging
import subprocess
import sys
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


def test_what_code_prints_where_nobody_looks_is_in_the_log(tmp_path: Path) -> None:
    """Law: each line is there once, also of a thread that ends with an error."""
    program = (
        "import sys, threading, logging; from pathlib import Path\n"
        "from slime.observability.logs import setup_logging\n"
        "setup_logging(Path(sys.argv[1]), crashes=True)\n"
        "print('step', 1); print('to the end', file=sys.stderr); print('\\x1b[2J', end='\\n', flush=True)\n"
        "logging.getLogger('own').info('said')\n"
        "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()\n"
    )
    path = tmp_path / "rollout.log"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, capture_output=True, timeout=120)
    told = path.read_text()
    assert told.count("I rollout stdout | step 1\n") == told.count("I rollout stderr | to the end\n") == 1
    assert told.count("said") == 1 and "ZeroDivisionError" in told and "\\x1b[2J" in told and "\x1b" not in told
