"""Layouts that can be trained pass; those that cannot are refused before a process starts, naming the sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.settings import parse_args
from tests.support.command_line import refused
from tests.support.published import SYNCED

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
        ("--enable-cuda-graph", "rows of any length"),
        ("--cuda-graph-impl local", "rows of any length"),
        ("--fine-grained-activation-offloading --offload-modules core_attn", "do not offload single activations"),
        ("--recompute-granularity selective --recompute-modules moe_act", "recompute_modules moe_act does not exist"),
        ("--recompute-granularity selective --recompute-modules mlp mla_up_proj", "mla_up_proj does not exist"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(base: list[str], flags: str, said: str) -> None:
    assert said in refused([*base, *flags.split()])


def test_sparse_attention_takes_long_samples_under_context_parallelism(base: list[str]) -> None:
    config, _ = SYNCED["GLM-5"]
    (Path(base[1]) / "config.json").write_text(json.dumps(config))
    flags = (
        f"--actor-num-gpus-per-node 2 --context-parallel-size 2 --rollout-max-response-len {config['index_topk'] + 1}"
    )
    assert parse_args([*base, *flags.split()]).megatron["context_parallel_size"] == 2
