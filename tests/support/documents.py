"""What the documents show: their text, and the commands in it."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.py")),
    *sorted(p for p in (ROOT / "recipes").rglob("*") if p.suffix in {".py", ".sh", ".yaml"}),
]
"""Everything that tells people what to type. Of Python files the docstrings count."""


SHELLS = ("", "bash", "sh")
"""Languages of the blocks of a document that hold commands; a block with the title "fails" shows a mistake."""

ENDS_OF_COMMANDS = (">", ">>", "2>", "|", "||", "&&", "&")


def text_of(path: Path) -> str:
    """The document, or the docstrings of a Python file."""
    text = path.read_text()
    if path.suffix != ".py":
        return text
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(n) or "" for n in ast.walk(ast.parse(text)) if isinstance(n, nodes)]
    return "\n\n".join(found)


def commands_of(path: Path) -> Iterator[list[str]]:
    """The words of each shell command in the document's blocks of code, comments and continuations resolved."""
    text = text_of(path)
    if path.suffix == ".md":
        blocks = re.findall(r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$', text, re.M | re.S)
        shown = [block for language, title, block in blocks if language in SHELLS and title != "fails"]
        lines = [line for block in shown for line in block.split("\n")]
    elif path.suffix == ".py":
        lines = [line for line in text.split("\n") if re.match(r"\s*(python|slime|make) ", line)]
    else:
        lines = text.split("\n")
    joined = "\n".join(lines).replace("\\\n", " ").split("\n")
    for line in joined:
        line = line.removeprefix("run ")  # of a recipe's host.sh
        if re.match(r"\s*(\"?\$PY\"?|python|slime|make|bash) ", line):
            words = shlex.split(line.replace('"$@"', "").replace("[", "").replace("]", ""), comments=True)
            words = list(itertools.takewhile(lambda word: word not in ENDS_OF_COMMANDS, words))
            yield words[2:] if words[1:3] == ["-m", "slime"] else words


LOOPS = {"train.py": True, "train": True, "train_async.py": False, "train-async": False}
"""What starts a loop, as `python FILE` or `slime COMMAND` -> whether it is the synchronous one."""


def loop_of(words: list[str]) -> str | None:
    """The key of `LOOPS` that a command is, its flags behind it; None for another command."""
    second = words[1] if len(words) > 1 else ""
    return second if second in LOOPS and second.endswith(".py") == (words[0] != "slime") else None
