"""A package in place of Mooncake, which loads or does not."""

from __future__ import annotations

from pathlib import Path


def write_mooncake(folder: Path, engine: str) -> None:
    """Its `engine` does this when it is imported; whoever has `folder` on PYTHONPATH finds it first."""
    package = folder / "mooncake"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "engine.py").write_text(engine)
