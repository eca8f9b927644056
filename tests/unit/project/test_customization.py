"""Every hook is documented, and its example is what the document says."""

from __future__ import annotations

import re
from pathlib import Path

from slime.settings.hook_contracts import CONTRACTS, load_hook

TEXT = (Path(__file__).parents[3] / "docs" / "customization.md").read_text()
ROW = re.compile(r"^\| `--(?P<flag>[a-z-]+)`(?P<group> with `--group-rm`)? \|.*\| `(?P<example>[^`]+)` \|$", re.M)


def test_each_hook_has_a_row_with_an_example_that_satisfies_its_contract() -> None:
    rows = {(m["flag"].replace("-", "_"), m["group"] is not None): m["example"] for m in ROW.finditer(TEXT)}
    assert {(c.flag, kind == "group_rm") for kind, c in CONTRACTS.items()} == set(rows)
    for kind, contract in CONTRACTS.items():
        path = rows[contract.flag, kind == "group_rm"]
        assert load_hook(path, kind) is load_hook(path.replace(":", "."), kind)
