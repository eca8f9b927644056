"""docs/migration.md has the tables of the code, and these say what is so of every flag that they name."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

from slime.public.names import names_table, public_names
from slime.settings.all_flags import flag_table
from slime.settings.fields import declared, own_fields
from slime.settings.groups.launch_scripts import LaunchScriptSettings
from slime.settings.public_flags import DIFFERENT, EXAMPLES, FOREIGN_NAMES, MODEL, PUBLIC, REFUSED, tables
from slime.settings.schema import architecture_of, owned_spellings
from tests.support.documents import ROOT
from tests.support.launch_scripts import facts, launch_scripts, own_command_lines
from tests.unit.settings.test_launch_scripts import REFUSED as REFUSED_SCRIPTS
from tests.unit.settings.test_launch_scripts import REFUSED_LINES

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


def test_every_public_flag_is_in_a_table_that_says_what_it_does() -> None:
    """Flags of the launch scripts in tests/support are public flags."""
    text = tables()
    assert [name for name in PUBLIC if not re.search(rf"--{name}\b(?!-)", text)] == []
    words = {word for script in launch_scripts().values() for word in script.flags}
    used = {word.removeprefix("--") for word in words if FLAG.fullmatch(word)}
    assert len(used) > 150 and sorted(used - {*PUBLIC}) == []


def test_flags_of_the_model_are_those_that_its_configuration_decides(tmp_path: Path) -> None:
    decided: set[str] = set()
    for name, config in facts()["models"].items():
        (folder := tmp_path / name).mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        decided |= architecture_of(str(folder)).keys()
    known = flag_table().by_name
    assert {known[f"--{name}"][0].dest for name in MODEL} <= decided


def test_an_example_starts_if_its_launch_scripts_do() -> None:
    """tests/unit/settings/test_launch_scripts.py tries the scripts in tests/support."""
    for name, said in EXAMPLES.items():
        scripts = [script for script in launch_scripts() if script.startswith(f"{name}_")]
        scripts += [script for script in own_command_lines() if script == name]
        assert scripts, name
        refused = {script in REFUSED_SCRIPTS | REFUSED_LINES for script in scripts}
        assert refused == {said.startswith("refused")}, name


def test_the_document_has_the_names_that_plugins_can_import() -> None:
    assert names_table() in (ROOT / "docs" / "migration.md").read_text()
    names = public_names()
    assert len(names) > 20
    lacking = [(m, n) for m, found in names.items() for n in found if not hasattr(importlib.import_module(m), n)]
    assert lacking == []
