"""docs/migration.md has the tables of the code, and these say what is so of every flag that they name."""

from __future__ import annotations

import re

from slime.settings.all_flags import flag_table
from slime.settings.fields import declared, own_fields
from slime.settings.groups.launch_scripts import LaunchScriptSettings
from slime.settings.public_flags import DIFFERENT, FOREIGN_NAMES, REFUSED, tables
from slime.settings.schema import owned_spellings
from tests.support.documents import ROOT

FLAG = re.compile(r"--[a-z][a-z0-9-]*[a-z0-9]")


def test_the_document_has_the_tables_of_the_code() -> None:
    """After a change: `python -m slime train --help public` prints what belongs there."""
    assert tables() in (ROOT / "docs" / "migration.md").read_text()


def test_flags_with_another_meaning_are_taken_and_refused_ones_are_not() -> None:
    known = flag_table().by_name
    written = [flag for one in DIFFERENT for flag in FLAG.findall(one)]
    assert [flag for flag in written if flag not in known] == []
    assert [name for name in REFUSED if f"--{name}" in known or f"--{name}" in owned_spellings()] == []
    assert FOREIGN_NAMES.items() >= REFUSED.items()


def test_every_flag_that_never_acts_is_in_the_tables() -> None:
    never = [f.name.replace("_", "-") for f in own_fields(LaunchScriptSettings) if declared(f).conditions]
    text = tables()
    assert never and [name for name in never if f"`--{name}`" not in text] == []
