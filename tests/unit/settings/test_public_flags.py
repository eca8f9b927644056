"""Law: no flag of the public slime or of its scripts is unknown: it is taken, or refused with what to do instead."""

from __future__ import annotations

import pytest

from slime.settings.all_flags import flag_table
from slime.settings.public_flags import FOREIGN_NAMES, PUBLIC
from slime.settings.schema import owned_spellings
from tests.support.command_line import refused


def test_every_public_flag_is_taken_or_answered() -> None:
    known = {*flag_table().by_name, *owned_spellings()}
    assert len(PUBLIC) > 350 and list(PUBLIC) == sorted(set(PUBLIC))
    assert [name for name in PUBLIC if f"--{name}" not in known and name not in FOREIGN_NAMES] == []


@pytest.mark.parametrize("name", [name for name in PUBLIC if name in FOREIGN_NAMES])
def test_a_flag_that_is_refused_says_what_to_do(base: list[str], name: str) -> None:
    message = refused([*base, f"--{name}"])
    assert f"--{name}; {FOREIGN_NAMES[name]}" in message
