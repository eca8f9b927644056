"""Law: no flag of the public slime or of its scripts is unknown: it is taken, or refused with what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.settings.all_flags import flag_table
from slime.settings.public_flags import FOREIGN_NAMES
from slime.settings.schema import owned_spellings
from tests.support.command_line import refused

FLAGS = [
    line
    for line in (Path(__file__).parents[2] / "support" / "public_flags.txt").read_text().splitlines()
    if not line.startswith("#")
]


def test_every_public_flag_is_taken_or_answered() -> None:
    known = {*flag_table().by_name, *owned_spellings()}
    assert len(FLAGS) > 350
    assert [name for name in FLAGS if f"--{name}" not in known and name not in FOREIGN_NAMES] == []


@pytest.mark.parametrize("name", [name for name in FLAGS if name in FOREIGN_NAMES])
def test_a_flag_that_is_refused_says_what_to_do(base: list[str], name: str) -> None:
    message = refused([*base, f"--{name}"])
    assert f"--{name}; {FOREIGN_NAMES[name]}" in message
