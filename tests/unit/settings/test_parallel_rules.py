"""Layouts that can be trained pass; those that cannot are refused before a process starts, naming the sizes."""

from __future__ import annotations

import pytest

from slime.settings import parse_args
from tests.support.command_line import refused

PP2 = "--pipeline-model-parallel-size 2"


@pytest.mark.parametrize(
    "flags",
    [
        f"--actor-num-gpus-per-node 2 {PP2}",
        f"--actor-num-gpus-per-node 4 {PP2} --context-parallel-size 2",
        f"--actor-num-gpus-per-node 2 {PP2} --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1",
    ],
)
def test_a_layout_that_divides_is_taken(base: list[str], flags: str) -> None:
    megatron = parse_args([*base, *flags.split()]).megatron
    assert megatron["pipeline_model_parallel_size"] == 2
    assert megatron["expert_tensor_parallel_size"] == 1, "experts are whole"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--actor-num-gpus-per-node 3 --context-parallel-size 2", "context_parallel_size 2"),
        ("--virtual-pipeline-model-parallel-size 2", "needs pipeline stages"),
        (f"--actor-num-gpus-per-node 2 {PP2} --virtual-pipeline-model-parallel-size 2", "2 layers"),
        ("--actor-num-gpus-per-node 2 --expert-model-parallel-size 2", "0 experts"),
        ("--variable-seq-lengths", "drop the flag"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(base: list[str], flags: str, said: str) -> None:
    assert said in refused([*base, *flags.split()])
