"""Writes or checks slime/settings/schemas/*.json: the flags of the installed Megatron, SGLang and router.

python -m slime.cli.schemas --write     after changing a pinned version
python -m slime.cli.schemas             says what differs; exit code 1 if anything does
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from slime.settings.schema import SCHEMA_DIR


def build_all() -> dict[str, dict[str, Any]]:
    """Owner -> schema of the installed package. Slow: imports all of them."""
    from slime.cli.schema_megatron import build as build_megatron
    from slime.cli.schema_sglang import build_router, build_sglang

    if not list(Path("/dev").glob("nvidia[0-9]*")):
        from slime.compat.sglang_cpu import activate

        activate("cpu")
    return {"megatron": build_megatron(), "sglang": build_sglang(), "router": build_router()}


def dump(schema: dict[str, Any]) -> str:
    """The text of a schema file: one flag per line, so that a diff shows flags."""
    head = {k: v for k, v in schema.items() if k != "flags"}
    flags = ",\n".join(json.dumps(f, sort_keys=True) for f in schema["flags"])
    return json.dumps(head)[:-1] + ', "flags": [\n' + flags + "\n]}\n"


def differences(installed: dict[str, dict[str, Any]]) -> list[str]:
    """What the files say otherwise than the installed packages, one line per setting."""
    out = []
    for owner, schema in installed.items():
        path = SCHEMA_DIR / f"{owner}.json"
        stored = json.loads(path.read_text()) if path.exists() else {"flags": []}
        old = {f["dest"]: f for f in stored["flags"]}
        new = {f["dest"]: f for f in json.loads(dump(schema))["flags"]}
        out += [f"{owner}: {dest}" for dest in sorted(old.keys() | new.keys()) if old.get(dest) != new.get(dest)]
    return out


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Whether to write."""
    parser.add_argument("--write", action="store_true", help="write them again")


def run(options: argparse.Namespace) -> int:
    """Prints what differs; returns 1 if anything does and nothing is written."""
    installed = build_all()
    changed = differences(installed)
    if options.write:
        for owner, schema in installed.items():
            (SCHEMA_DIR / f"{owner}.json").write_text(dump(schema))
    print(f"{len(changed)} settings differ" + "".join(f"\n  {line}" for line in changed))
    return 0 if options.write else int(bool(changed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="compare the flag schemas with the installed engines")
    add_flags(parser)
    sys.exit(run(parser.parse_args()))
