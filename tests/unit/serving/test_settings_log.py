"""An engine's notes of changed settings stay as many as there are kinds of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from slime.compat.sglang_settings_log import _keep_newest


def test_the_newest_note_of_each_source_and_field_stays() -> None:
    settings = SimpleNamespace(_runtime_mutations=[("load", {"path": "a"}), ("load", {"dtype": "b"})])
    for version in range(100):
        settings._runtime_mutations.append(("version", {"weight_version": str(version)}))
        _keep_newest(None, settings, "version", weight_version=str(version))
    kept: list[Any] = [("load", {"path": "a"}), ("load", {"dtype": "b"}), ("version", {"weight_version": "99"})]
    assert settings._runtime_mutations == kept


def test_settings_without_notes_are_left_alone() -> None:
    settings = SimpleNamespace()
    _keep_newest(None, settings)
    assert not vars(settings)
