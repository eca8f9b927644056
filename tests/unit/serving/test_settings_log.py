"""An engine's notes of changed settings stay as many as there are kinds of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from slime.compat.sglang_0_5_16 import keep_newest_settings


def test_the_newest_note_of_each_source_and_field_stays() -> None:
    settings = SimpleNamespace(_runtime_mutations=[("load", {"path": "a"}), ("load", {"dtype": "b"})])
    for version in range(100):
        settings._runtime_mutations.append(("version", {"weight_version": str(version)}))
        keep_newest_settings(None, settings, "version", weight_version=str(version))
    kept: list[Any] = [("load", {"path": "a"}), ("load", {"dtype": "b"}), ("version", {"weight_version": "99"})]
    assert settings._runtime_mutations == kept


def test_settings_without_notes_are_left_alone() -> None:
    settings = SimpleNamespace()
    keep_newest_settings(None, settings)
    assert not vars(settings)
