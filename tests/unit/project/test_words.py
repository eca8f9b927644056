"""One word for each thing: the glossary's names exist, and words that it replaced stay out of the code's names."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GLOSSARY = ROOT / "docs" / "glossary.md"

REPLACED = {
    "publish": "weight sync",
    "published": "synced",
    "publisher": "weight sync",
    "publishing": "weight sync",
    "publication": "weight sync",
    "publications": "weight syncs",
    "signals": "log_probs",
    "nucleus": "top_p set",
    "poison": "non_finite",
    "poisoned": "non_finite",
    "gap": "mismatch",
    "gaps": "mismatch",
    "piece": "shard",
    "pieces": "shards",
    "copies": "reference, teacher, old policy: by name",
    "company": "reference, teacher, old policy: by name",
    "reaper": "guardian",
    "targets": "advantages and returns",
    "cut": "split",
    "cuts": "splits",
    "hold": "pause",
}
"""A part of a name -> what to call it."""
REPLACED_NAMES = {"model_shape": "architecture", "megatron_shape": "architecture"}
"""A run of parts -> what to call it: tensors have shapes, models architectures."""
ALLOWED = {
    "PR_SET_CHILD_SUBREAPER": "the name that Linux gives it",
    "lora_target_modules": "the name that PEFT gives it",
}
"""Names that keep such a word, each with the reason."""


def parts_of(identifier: str) -> list[str]:
    """The words of snake_case, CamelCase and CAPITALS, in lower case."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", identifier)
    return [part for part in spaced.lower().split("_") if part]


@functools.cache
def identifiers() -> dict[str, str]:
    """Every name that the sources define, and files and folders -> where."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "slime").rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        found.setdefault(path.stem, place)
        for name in _defined(ast.parse(path.read_text())):
            found.setdefault(name, place)
    return found


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def test_replaced_words_stay_out_of_names() -> None:
    wrong = []
    for name, place in identifiers().items():
        if name in ALLOWED:
            continue
        parts = parts_of(name)
        found = {part: REPLACED[part] for part in parts if part in REPLACED}
        joined = "_".join(parts)
        found |= {run: word for run, word in REPLACED_NAMES.items() if run in joined}
        wrong += [f"{place}: {name}: not {old!r}, say {new}" for old, new in found.items()]
    assert not wrong, "one word for each thing (docs/glossary.md):\n" + "\n".join(sorted(wrong))


def test_replaced_words_stay_out_of_documents() -> None:
    """Those that mean nothing else in English."""
    words = re.compile(r"\b(publication|publish the weights|weights are published|nucleus|poison|reaper)", re.I)
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    wrong = [f"{p.name}: {m[0]}" for p in texts if p != GLOSSARY for m in words.finditer(p.read_text())]
    assert not wrong, "one word for each thing (docs/glossary.md):\n" + "\n".join(wrong)


def test_no_exception_that_is_no_longer_needed() -> None:
    assert not ALLOWED.keys() - identifiers().keys(), "remove them from ALLOWED"


@pytest.mark.parametrize(
    ("name", "parts"),
    [("num_copiesLeft", ["num", "copies", "left"]), ("HTTPServer", ["http", "server"]), ("_HOLD_S", ["hold", "s"])],
)
def test_names_are_taken_apart(name: str, parts: list[str]) -> None:
    assert parts_of(name) == parts


def test_the_glossary_names_what_is_there() -> None:
    """Law: a word stands once; its code exists, and so does its metric."""
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    sources = "\n".join(p.read_text() for p in sorted((ROOT / "slime").rglob("*.py")))
    words = set(re.findall(r"\w+", sources)) | {p.stem for p in (ROOT / "slime").rglob("*.py")}
    rows = [line.split("|")[1:-1] for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in row] for row in rows if row[0].strip() != "word"]
    assert len(rows) > 30, "the glossary was not understood"
    terms = [term for row in rows for term in row[0].split(", ")]
    assert len(terms) == len(set(terms)), "a word stands twice"
    missing = []
    for row in rows:
        for name in re.findall(r"`([^`]+)`", row[2]):
            if re.fullmatch(r"\w+", name) and name not in words:
                missing.append(f"{row[0]}: no {name} in slime/")
        prefixes = [name.rpartition("/")[0] for name in re.findall(r"`([^`]+)`", row[3])]
        for name, prefix in zip(re.findall(r"`([^`]+)`", row[3]), prefixes, strict=True):
            if f"`{name}`" not in metrics and not (prefix and f"`{prefix}/" in metrics):
                missing.append(f"{row[0]}: no metric {name} in docs/metrics.md")
    assert not missing, "\n".join(missing)
