"""The house rules that no linter knows, with their exceptions in one file that may only shrink."""

from __future__ import annotations

import ast
import functools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.style
ROOT = Path(__file__).parents[3]
EXCEPTIONS = Path(__file__).with_name("exceptions.txt")
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_LOOP_LINES = 800, 60, 100
FOLDERS = ("slime", "recipes", "examples", "tests", "benchmarks")
LOOPS = ("train.py", "train_async.py")
PRINT_ALLOWED = ("slime/cli/", "recipes/", "examples/", "benchmarks/", "tests/", "train.py", "train_async.py")
"""What people run and read; everything else logs."""
SWITCHED_OFF = re.compile(r"#\s*fmt:\s*(off|on|skip)\b")
"""The formatter is on everywhere."""
UNTYPED_SETTINGS = {
    "slime/rollout/filters.py": "stands where a user's function may stand, with its signature",
    "slime/rollout/generate.py": "stands where a user's function may stand, with its signature",
    "slime/rollout/loop.py": "stands where a user's function may stand, with its signature",
    "slime/rollout/sft.py": "stands where a user's function may stand, with its signature",
    "slime/rollout/workflows/rejection.py": "stands where a user's function may stand, with its signature",
    "slime/rollout/workflows/teacher.py": "stands where a user's function may stand, with its signature",
}
"""Files where `args: Any` may stand: the boundary to users' code. The list may only shrink."""


def sources() -> list[Path]:
    """Every Python file of the project."""
    files = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))]
    return files + [ROOT / name for name in LOOPS if (ROOT / name).exists()]


@functools.cache
def violations() -> frozenset[str]:
    """Every broken rule."""
    return frozenset(_violations())


def _violations() -> Iterator[str]:
    """`<rule> <file>[::<name>]` of each broken rule; no line numbers, so that an exception survives other edits."""
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        num_lines = text.count("\n")
        if num_lines > (MAX_LOOP_LINES if name in LOOPS else MAX_FILE_LINES):
            yield f"long-file {name}"
        tree = ast.parse(text)
        if ast.get_docstring(tree) is None and text.strip():
            yield f"no-docstring {name}"
        if "fmt:" in text and any(SWITCHED_OFF.match(token.string) for token in comments(path)):
            yield f"formatter-off {name}"
        ours = name.startswith("slime/")
        for node in ast.walk(tree):
            yield from _of_node(node, name, ours)


def comments(path: Path) -> list[tokenize.TokenInfo]:
    """The comments of a file."""
    with tokenize.open(path) as file:
        return [token for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.COMMENT]


def untyped_settings() -> dict[str, list[str]]:
    """File -> functions that take `args: Any`."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "slime").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                kinds = [ast.unparse(a.annotation) for a in given if a.arg == "args" and a.annotation is not None]
                if "Any" in kinds:
                    found.setdefault(path.relative_to(ROOT).as_posix(), []).append(node.name)
    return found


def _of_node(node: ast.AST, name: str, ours: bool) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES:
            yield f"long-function {name}::{node.name}"
    elif isinstance(node, ast.Assert) and ours and node.msg is None:
        yield f"mute-assert {name}"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
        if not name.startswith(PRINT_ALLOWED):
            yield f"print {name}"
    elif isinstance(node, ast.ImportFrom | ast.Import) and not ours:
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        if name.startswith("tests/") and "unittest.mock" in modules:
            yield f"mock {name}"


def exceptions() -> set[str]:
    """The exceptions that stand."""
    lines = (line.strip() for line in EXCEPTIONS.read_text().splitlines())
    return {line for line in lines if line and not line.startswith("#")}


def test_no_new_exception() -> None:
    new = sorted(violations() - exceptions())
    assert not new, "break these up or say them another way; the list of exceptions may only shrink:\n" + "\n".join(new)


def test_no_exception_that_is_no_longer_needed() -> None:
    gone = sorted(exceptions() - violations())
    assert not gone, f"remove from {EXCEPTIONS.name}:\n" + "\n".join(gone)


def test_settings_are_typed() -> None:
    """Law: a typo in the name of a setting is found by the type checker, except where users' functions are called."""
    found = {
        f"{file}: {', '.join(names)}" for file, names in untyped_settings().items() if file not in UNTYPED_SETTINGS
    }
    assert not found, "take the record of the settings that are read, not args: Any:\n" + "\n".join(sorted(found))
    gone = UNTYPED_SETTINGS.keys() - untyped_settings().keys()
    assert not gone, f"remove from UNTYPED_SETTINGS: {sorted(gone)}"


@pytest.mark.parametrize("folder", ["core", "settings", "observability", "buffer"])
def test_light_rooms_never_name_a_heavy_import_at_module_level(folder: str) -> None:
    heavy = {"torch", "transformers", "ray", "megatron", "sglang"}
    for path in (ROOT / "slime" / folder).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found = {n.split(".")[0] for n in names} & heavy
            assert not found, f"{path.relative_to(ROOT)} imports {sorted(found)}"
