"""The tables of docs/sample_record.md are the records themselves: every field and status, in their own words."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest

from slime.core.sample import Sample, Status
from slime.rollout.client.call import FORWARDED_SAMPLING_PARAMS
from tests.support.documents import ROOT

DOCUMENT = (ROOT / "docs" / "sample_record.md").read_text()


def rows_of(kind: type[Any]) -> list[str]:
    """A line of a table for each field: its name, its type if it has one, the text below it."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    rows = []
    for field, below in zip(node.body, node.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign | ast.Assign):
            continue
        assert isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant), (
            f"{ast.unparse(field)} has no text"
        )
        text = " ".join(str(below.value.value).split()).replace("|", "\\|")
        if isinstance(field, ast.AnnAssign):
            kind_of = ast.unparse(field.annotation).replace("|", "\\|")
            rows.append(f"| `{ast.unparse(field.target)}` | `{kind_of}` | {text} |")
        else:
            rows.append(f"| `{ast.literal_eval(field.value)}` | {text} |")
    return rows


@pytest.mark.parametrize("kind", [Sample, Status])
def test_every_field_is_there_in_its_own_words(kind: type[Any]) -> None:
    table = "\n".join(rows_of(kind))
    assert table in DOCUMENT, f"docs/sample_record.md lacks\n{table}"


def test_every_sampling_parameter_is_there() -> None:
    told = set(DOCUMENT.split("`"))
    assert told >= FORWARDED_SAMPLING_PARAMS, FORWARDED_SAMPLING_PARAMS - told
