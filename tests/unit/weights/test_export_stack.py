"""Experts that leave as one stack are those that leave one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.models import table_for
from slime.models.common.table import Entry, FamilyTable
from slime.weights.hf_shards import export, export_stack
from tests.unit.weights.test_qwen_next_layout import MOE
from tests.unit.weights.test_tables_and_convert import CONFIGS


def stacks(table: FamilyTable) -> list[tuple[tuple[Entry, ...], torch.Tensor]]:
    """The experts of each row and layer, and random numbers for their parameter."""
    generator, out = torch.Generator().manual_seed(0), []
    for run in (run for run in table.runs if run[0].expert is not None):
        dim, shape = run[0].row.dim, list(run[0].row.shapes[0])
        assert dim is not None
        shape[dim] = sum(s[dim] for s in run[0].row.shapes)
        out.append((run, torch.randn(len(run), *shape, generator=generator)))
    return out


@pytest.mark.parametrize(
    "config", [CONFIGS[-1], MOE, {**MOE, "_stacked_experts": False}], ids=["own", "stacked", "next"]
)
def test_a_stack_leaves_as_its_experts_do(config: dict[str, Any]) -> None:
    """Law: the same names in the same order, the same bits, as contiguous as before, and views where those are."""
    table = table_for(config)
    assert [entry for run in table.runs for entry in run] == list(table.entries)
    assert len(stacks(table)) >= 2 * len(table.layers) - 2
    for run, stack in stacks(table):
        want = [pair for e, shard in zip(run, stack, strict=True) for pair in export(table, e.megatron, [shard])]
        if run[0].row.stacked:
            want = [(name, torch.stack([t for n, t in want if n == name])) for name in run[0].hf]
        got = list(export_stack(run, stack))
        assert [name for name, _ in got] == [name for name, _ in want]
        for (name, one), (_, other) in zip(got, want, strict=True):
            assert torch.equal(one, other) and one.stride() == other.stride(), name
            assert run[0].row.stacked or one.data_ptr() == other.data_ptr(), f"{name} is a copy"


def test_a_stack_of_another_shape_is_refused() -> None:
    ((run, stack), *_) = stacks(table_for(CONFIGS[-1]))
    with pytest.raises(AssertionError, match="config implies"):
        list(export_stack(run, stack[:-1]))
