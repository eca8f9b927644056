"""What the command line resolves is what Megatron's configuration objects hold: one source for each value."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.core.errors import ConfigError
from slime.core.hf_config import read_hf_config
from slime.models import architecture
from slime.settings import Args, parse_args
from slime.settings.megatron import FIXED
from slime.training.model.megatron_config import ddp_config, fixed, optimizer_config, transformer_config
from slime.training.step.optimizer import _scheduler


@pytest.fixture
def resolve(tiny_qwen3: Path, tmp_path: Path) -> Any:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "1"}\n')

    def parse(*flags: str) -> Args:
        base = ["--rm-type", "math", "--rollout-batch-size", "2", "--num-rollout", "5", "--n-samples-per-prompt", "2"]
        return parse_args(["--hf-checkpoint", str(tiny_qwen3), "--prompt-data", str(prompts), *base, *flags])

    return parse


def test_what_the_trainer_fixes_is_read_from_the_list_that_flags_are_checked_against(
    resolve: Any, tiny_qwen3: Path
) -> None:
    megatron = resolve().megatron
    built = {
        TransformerConfig: transformer_config(megatron, architecture(read_hf_config(str(tiny_qwen3)))),
        DistributedDataParallelConfig: ddp_config(megatron),
        OptimizerConfig: optimizer_config(megatron),
    }
    reached = {name for config in built for name in fixed(config)}
    assert reached == set(FIXED), "a fixed setting that no configuration object takes fixes nothing"
    for config, made in built.items():
        assert all(getattr(made, name) == value for name, value in fixed(config).items()), config


def test_what_is_said_of_data_parallelism_arrives(resolve: Any) -> None:
    said = ("--overlap-grad-reduce", "--ddp-bucket-size", "5000", "--ddp-pad-buckets-for-high-nccl-busbw")
    made = ddp_config(resolve(*said).megatron)
    assert (made.overlap_grad_reduce, made.bucket_size, made.pad_buckets_for_high_nccl_busbw) == (True, 5000, True)
    assert made.grad_reduce_in_fp32 and made.use_distributed_optimizer, "what is fixed stays"


@pytest.mark.parametrize(
    "flags",
    [
        "--use-megatron-fsdp",
        "--nccl-ub",
        "--num-distributed-optimizer-instances 2",
        "--data-parallel-sharding-strategy optim",
    ],
)
def test_what_the_data_parallel_wrapper_cannot_do_here_is_refused(resolve: Any, flags: str) -> None:
    with pytest.raises(ConfigError, match="drop the flag"):
        resolve(*flags.split())


def test_every_setting_of_data_parallelism_is_passed_on_or_fixed() -> None:
    """Law 9: none is accepted and ignored; a new one of Megatron's is decided upon."""
    names = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    assert names - set(FIXED) == {"overlap_grad_reduce", "bucket_size", "pad_buckets_for_high_nccl_busbw"}


def test_the_architecture_is_that_of_the_settings(resolve: Any, tiny_qwen3: Path) -> None:
    hf_config = read_hf_config(str(tiny_qwen3))
    megatron, built = resolve().megatron, transformer_config(resolve().megatron, architecture(hf_config))
    for name, value in architecture(hf_config).items():
        assert megatron[name] == value and getattr(built, name, value) == value, name


def test_the_schedule_has_the_resolved_lengths(resolve: Any) -> None:
    args = resolve("--lr-warmup-fraction", "0.3", "--lr-decay-style", "cosine", "--weight-decay", "0.2")
    schedule = _scheduler(_Optimizer(), args.megatron)
    assert (schedule.lr_warmup_steps, schedule.lr_decay_steps) == (2, 5), "0.3 of 5 steps, rounded up"
    assert (args.megatron["lr_warmup_iters"], args.megatron["lr_decay_iters"]) == (2, 5)
    assert schedule.start_wd == schedule.end_wd == 0.2


def test_two_warm_ups_are_refused(resolve: Any) -> None:
    with pytest.raises(ConfigError, match="lr_warmup_fraction"):
        resolve("--lr-warmup-fraction", "0.3", "--lr-warmup-iters", "1")


class _Optimizer:
    """What a schedule asks of an optimizer."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []
