"""One word for each thing: the glossary's names exist, and words that it replaced stay out of the code's names."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.style
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
STEP_FORM = re.compile(r"(?:\bsteps?[ _]|ckpt[-_]step |steps: )$", re.IGNORECASE)
OTHER_STEP_TEXT = {
    "data_source_": "the public slime's file name",
    "eval_": "the file name of a recorded evaluation",
    "": "only the number: a cell of a table, an axis",
}
"""Text before a step's number that is not `step `, each with the reason."""
ALLOWED = {
    "PR_SET_CHILD_SUBREAPER": "the name that Linux gives it",
    "lora_target_modules": "the name that PEFT gives it",
}
"""Names that keep such a word, each with the reason."""
TRANSLATED = {
    r"(?<!there )\b(?:is|are) no (?!longer\b|more\b|less\b)": "say 'is not a ...'",
    r"\bdo write such\b|\bbecause it should be\b": "say 'is ..., but must be ...'",
    r"\bshall\b": "say 'is to', or what happens",
    r"\banew\b": "say 'again'",
    r"\btold\b": "say 'reported', 'listed' or 'given'",
    r"\b(?:of|from|by) yours\b": "say 'your own ...'",
    r"\bof slime's(?=[.,;:)]| (?:or|and|that|than|is|own)\b)": "say 'slime's ...'",
    r"\bthe contrary\b": "say 'contradicts'",
    r"\b(?:that|which) nobody (?:named|checks)\b|\bnames one of its own\b": "say what is missing",
    r"\bdo: give\b": "say 'give'",
}
"""A pattern of prose -> what to write."""
REPLACED_IN_PROSE = (
    r"\b(?:publications?|publish(?:es|ed|ing|ers?)?|nucleus|poison\w*|reapers?|gaps?|cuts?|cutting|pieces?"
    r"|copies of the (?:policy|model|weights)|the critic's targets|targets of the critic)\b"
)
"""Those of `REPLACED` that are not plain English for something else."""


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


@functools.cache
def prose() -> list[tuple[str, str]]:
    """(place, text): comments, docstrings and messages of the code, and the documents."""
    found = []
    for path in [*sorted((ROOT / "slime").rglob("*.py")), ROOT / "train.py", ROOT / "train_async.py"]:
        place = path.relative_to(ROOT).as_posix()
        found += [(f"{place}:{line}", text) for line, text in _spoken(path)]
    for path in documents():
        text = path.read_text()
        if path == GLOSSARY:  # its last column is what others say
            text = re.sub(r"^(\|.*\|)[^|\n]*\|$", r"\1", text, flags=re.M)
        found.append((path.relative_to(ROOT).as_posix(), re.sub(r"`[^`\n]+`", "", text)))  # names keep their words
    return found


def documents() -> list[Path]:
    """What people read before and beside the code."""
    own = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return own + sorted((ROOT / "docs").rglob("*.md"))


def _spoken(path: Path) -> Iterator[tuple[int, str]]:
    """Comments, and strings of more than one word without what they format."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            text = re.sub(r"\{[^{}]*\}", "", token.string) if token.type == tokenize.STRING else token.string
            if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in text.strip()):
                yield token.start[0], text


def found_in_prose(pattern: str) -> list[str]:
    """Place and words around each hit."""
    found = []
    for place, text in prose():
        for hit in re.finditer(pattern, text, re.I):
            around = " ".join(text[max(0, hit.start() - 40) : hit.end() + 40].split())
            found.append(f"{place}: {hit[0]!r} in {around!r}")
    return found


@pytest.mark.parametrize("pattern", TRANSLATED, ids=TRANSLATED.values())
def test_sentences_that_sound_translated_stay_out(pattern: str) -> None:
    wrong = found_in_prose(pattern)
    assert not wrong, f"{TRANSLATED[pattern]}:\n" + "\n".join(wrong)


def test_replaced_words_stay_out_of_prose() -> None:
    wrong = found_in_prose(REPLACED_IN_PROSE)
    assert not wrong, "one word for each thing (docs/glossary.md):\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "hit"),
    [
        ("x is no folder", True),
        ("there is no folder", False),
        ("it is no longer there", False),
        ("these are no weights", True),
        ("do write such a value", True),
        ("what it shall be", True),
        ("a class of yours", True),
        ("a setting of slime's or of Megatron", True),
        ("small uses of slime's hooks", False),
        ("errors are told once", True),
        ("x is empty; do: give --load", True),
        ("x is empty; give --load", False),
    ],
)
def test_what_sounds_translated_is_found(text: str, hit: bool) -> None:
    assert any(re.search(pattern, text, re.I) for pattern in TRANSLATED) is hit


def test_lines_of_documents_are_wrapped() -> None:
    """Tables and code keep their lines."""
    kept = re.compile(r"^```.*?^```$|^\|[^\n]*$|^!\[[^\n]*$", re.S | re.M)
    long = []
    for path in documents():
        text = kept.sub(lambda found: "\n" * found[0].count("\n"), path.read_text())
        long += [f"{path.name}:{n}" for n, line in enumerate(text.splitlines(), 1) if len(line) > 120]
    assert not long, f"wrap them at 120 columns: {long}"


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


def _steps_in_texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (text before, expression) for each step's number in an f-string, and (text, "%") for logging formats."""
    for node in ast.walk(ast.parse(path.read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else ()
        for before, part in itertools.pairwise([ast.Constant(""), *parts]):
            text = str(before.value) if isinstance(before, ast.Constant) else "{}"
            found = ast.unparse(part.value) if isinstance(part, ast.FormattedValue) else ""
            if re.search(r"rollout_id\b|(^|[._])step\b", found) and "_name(" not in found:
                yield text, found
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (
                (match[0], "%") for match in re.finditer(r"\b(rollout|train|eval|perf|iter\w*) %[ds]", node.value)
            )


def test_a_step_is_named_in_one_form() -> None:
    """Law: messages say `step N` with N = `rollout_id`, and never "rollout N" or "N + 1 of ..."."""
    wrong = []
    for path in [*sorted((ROOT / "slime").rglob("*.py")), ROOT / "train.py", ROOT / "train_async.py"]:
        for text, expression in _steps_in_texts(path):
            named = STEP_FORM.search(text) or text in OTHER_STEP_TEXT
            next_one = "+ 1" not in expression or text.endswith("continue with step ")
            evaluation = re.search(r"\beval(uation)?\b[^.;]*\bstep $", text)
            if not named or not next_one or evaluation:
                wrong.append(f"{path.relative_to(ROOT)}: {text[-40:]!r} {expression}")
    assert not wrong, wrong


@pytest.mark.parametrize(
    "line",
    [
        'f"rollout {rollout_id}"',
        'f"eval at step {rollout_id}"',
        'f"step {step + 1} of 6"',
        'log.info("train %d", step)',
    ],
)
def test_another_form_of_a_step_is_found(line: str, tmp_path: Path) -> None:
    (path := tmp_path / "mine.py").write_text(line)
    ((text, expression),) = _steps_in_texts(path)
    fits = STEP_FORM.search(text) and "+ 1" not in expression and not text.startswith("eval ")
    assert not fits
