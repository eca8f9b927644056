"""How much code there is in each room, for people: `python tests/project/tokens_per_room.py`. There is no limit.

Tokens of Python, without comments, docstrings and line ends: a measure of what has to be read, which neither short
lines nor a long explanation change.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def num_tokens(source: str) -> int:
    """Tokens of a module that say what it does."""
    documented = set()
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                documented.add((statement.lineno, statement.col_offset))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(t.type not in SILENT and (t.start not in documented) for t in tokens)


def rooms() -> Iterator[tuple[str, int, int]]:
    """(room, files, tokens) of each folder of slime/ and of the loops."""
    folders = sorted(p for p in (ROOT / "slime").iterdir() if p.is_dir() and p.name != "__pycache__")
    for room in folders:
        files = sorted(room.rglob("*.py"))
        yield room.name, len(files), sum(num_tokens(f.read_text()) for f in files)
    loops = [ROOT / "train.py", ROOT / "train_async.py"]
    yield "the loops", len(loops), sum(num_tokens(f.read_text()) for f in loops)


def main() -> None:
    """Prints one line per room, and their sum."""
    table = list(rooms())
    table.append(("all", sum(files for _, files, _ in table), sum(tokens for *_, tokens in table)))
    print(f"{'room':<16}{'files':>6}{'tokens':>9}")
    for room, files, tokens in table:
        print(f"{room:<16}{files:>6}{tokens:>9,}")


if __name__ == "__main__":
    main()
