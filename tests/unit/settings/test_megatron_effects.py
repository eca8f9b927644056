"""A flag of Megatron that does not act in this trainer, or on this model, is listed; every one has its kind."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from slime.settings import parse_args
from slime.settings.all_flags import components
from slime.settings.megatron import ACTING, CONDITIONS, FIXED, UNSUPPORTED, need_of
from slime.settings.schema import OWNED, architecture_of, flags_of_owner
from tests.support.command_line import QWEN3, listed, refused

NUM_UNREAD = 124
"""Flags that act on nothing in the pinned Megatron. If it changes: look at what the trainer does with the new flags."""


def test_a_flag_that_is_listed_nowhere_acts_on_nothing(base: list[str]) -> None:
    """Law: a flag acts, acts under a condition or is fixed, each in one list; any other is without effect."""
    stored = {flag.dest: flag for flag in flags_of_owner("megatron")}
    lists = (ACTING, CONDITIONS.keys(), FIXED.keys() | UNSUPPORTED.keys())
    counts = Counter(name for names in lists for name in names)
    assert counts.keys() - stored.keys() <= {"muon_coefficient_type", "muon_nesterov", "muon_scalar_optimizer"}, "newer"
    twice = {name for name, count in counts.items() if count > 1}
    assert twice == {"moe_router_load_balancing_type"}, "fixed, and the same step is computed whatever it says"
    for name, (value, _) in UNSUPPORTED.items():
        assert stored[name].default == value, name
    elsewhere = OWNED["megatron"].keys() | components().own.keys() | architecture_of(base[1]).keys()
    unread = [name for name in stored if name not in CONDITIONS.keys() | elsewhere and need_of(name) is not None]
    assert len(unread) == NUM_UNREAD


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--seq-length 8192", "seq_length 8192, which needs sequences of equal length"),
        ("--no-attention-softmax-in-fp32", "attention_softmax_in_fp32 False, which needs Megatron's own attention"),
        ("--attention-backend flash", "which needs Transformer Engine"),
        ("--overlap-param-gather", "True, which changes nothing: the weight sync reads weights between steps"),
        ("--moe-shared-expert-overlap", "True, which needs Transformer Engine"),
        ("--transformer-impl transformer_engine", "which needs Transformer Engine"),
        ("--muon-momentum 0.9", "muon_momentum 0.9, which needs --optimizer muon"),
        ("--sgd-momentum 0.8", "sgd_momentum 0.8, which needs an optimizer other than Adam and Muon"),
        ("--moe-router-load-balancing-type seq_aux_loss", "which needs --moe-aux-loss-coeff"),
        ("--exp-avg-dtype bf16", "exp_avg_dtype bfloat16, which needs --use-precision-aware-optimizer"),
        ("--optimizer-offload-fraction 0.5", "0.5, which needs --optimizer-cpu-offload"),
        ("--moe-router-topk 3", "moe_router_topk 3, which needs an MoE checkpoint"),
        ("--moe-ffn-hidden-size 64", "moe_ffn_hidden_size 64, which needs an MoE checkpoint"),
        ("--moe-router-dtype fp32", "moe_router_dtype fp32, which needs an MoE checkpoint"),
        ("--moe-layer-freq 2", "moe_layer_freq 2, which needs an MoE checkpoint"),
        ("--q-lora-rank 99", "q_lora_rank 99, which needs a checkpoint with latent attention"),
        ("--v-head-dim 64", "v_head_dim 64, which needs a checkpoint with latent attention"),
        ("--linear-key-head-dim 64", "which needs a checkpoint with linear-attention layers"),
        ("--recompute-num-layers 1", "recompute_num_layers 1, which needs --recompute-granularity full"),
        ("--recompute-granularity selective --recompute-method uniform", "which needs --recompute-granularity full"),
        ("--recompute-modules mlp", "which needs --recompute-granularity selective"),
        ("--lr-decay-iters 5", "lr_decay_iters 5, which needs a schedule of fixed length"),
        ("--lr-wsd-decay-style linear", "lr_wsd_decay_style linear, which needs --lr-decay-style WSD"),
        ("--lr-decay-style cosine --lr-wsd-decay-iters 5", "which needs --lr-decay-style WSD"),
        ("--min-lr 1e-7", "min_lr 1e-07, which needs learning-rate decay"),
        ("--lr-warmup-init 1e-7", "which needs a warm-up"),
        ("--initial-loss-scale 1024", "which needs --fp16"),
        ("--sequence-parallel", "which needs --tensor-model-parallel-size above 1"),
        ("--no-batch-p2p-comm", "which needs pipeline stages"),
        ("--bucket-size 1000", "which needs --overlap-grad-reduce"),
        ("--cpu-offloading-num-layers 1", "which needs Transformer Engine"),
        ("--dsa-indexer-topk 2", "dsa_indexer_topk 2, which needs a feature of Megatron"),
    ],
)
def test_a_flag_of_megatron_that_acts_on_nothing_is_listed(base: list[str], flags: str, said: str) -> None:
    args = parse_args([*base, *flags.split()])
    assert said in listed(args)
    assert said in refused([*base, *flags.split(), "--strict"])
    assert args.megatron["moe_router_load_balancing_type"] == "none", "told as it runs"


def test_a_flag_of_megatron_at_its_default_asks_for_nothing(base: list[str]) -> None:
    assert not parse_args([*base, "--attention-softmax-in-fp32", "--seq-length", "4096", "--strict"]).idle


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--exp-avg-sq-dtype fp16", "choose float32 or bfloat16"),
        ("--main-params-dtype bf16", "choose float32 or float16"),
        ("--no-decoupled-weight-decay", "which decouple it"),
    ],
)
def test_what_an_optimizer_that_holds_its_state_cannot_do_is_refused(base: list[str], flags: str, said: str) -> None:
    assert said in refused([*base, "--use-precision-aware-optimizer", *flags.split()])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--optimizer-cpu-offload", "use --optimizer adam"),
        ("--use-precision-aware-optimizer", "use --optimizer adam"),
        ("--no-decoupled-weight-decay", "which decouple it"),
        ("--muon-tp-mode replicated", "choose duplicated or distributed or blockwise"),
        ("--muon-scale-mode rms", "choose spectral or unit_rms_norm or shape_scaling"),
        ("--muon-fp32-matmul-prec low", "choose medium or high or highest"),
        ("--muon-num-ns-steps 0", "muon-num-ns-steps"),
    ],
)
def test_what_muon_cannot_do_is_refused(base: list[str], flags: str, said: str) -> None:
    assert said in refused([*base, "--optimizer", "muon", *flags.split()])
    assert "choose adam or muon" in refused([*base, "--optimizer", "sgd"])


def test_flags_of_muon_act_under_every_megatron(base: list[str]) -> None:
    """Law: scripts for an older or newer Megatron run; its name for the same setting is accepted."""
    for name in ("--muon-nesterov", "--muon-use-nesterov"):
        flags = "--optimizer muon --muon-momentum 0.9 --muon-num-ns-steps 6 --muon-scale-mode unit_rms_norm --strict"
        megatron = parse_args([*base, *flags.split(), name]).megatron
        assert megatron.get("muon_nesterov", megatron.get("muon_use_nesterov")) is True
        assert megatron["muon_tp_mode"] == "duplicated"


@pytest.mark.parametrize(
    "flags", ["--window-size 5 0", "--qk-l2-norm", "--main-grads-dtype bf16", "--softmax-scale 0.1"]
)
def test_a_flag_of_megatron_that_asks_for_another_model_is_refused(base: list[str], flags: str) -> None:
    assert "drop the flag" in refused([*base, *flags.split()])


@pytest.mark.parametrize(
    "flags",
    [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity selective --recompute-modules mlp",
        "--lr-decay-style cosine --lr-decay-iters 5 --min-lr 1e-7",
        "--lr-warmup-fraction 0.5 --lr-decay-iters 4 --lr-warmup-init 1e-7",
        "--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-wsd-decay-style linear",
        "--fp16 --initial-loss-scale 1024",
        "--actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel",
        "--overlap-grad-reduce --bucket-size 1000",
        "--moe-token-dispatcher-type alltoall",
    ],
)
def test_a_flag_of_megatron_whose_condition_holds_acts(base: list[str], flags: str) -> None:
    assert not parse_args([*base, *flags.split(), "--strict"]).idle


def test_flags_of_experts_act_on_experts(base: list[str]) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
    (Path(base[1]) / "config.json").write_text(json.dumps({**QWEN3, **experts, "model_type": "qwen3_moe"}))
    words = "--moe-router-topk 3 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type allgather --strict"
    assert parse_args([*base, *words.split()]).megatron["moe_token_dispatcher_type"] == "allgather"
    assert "which has 3" in refused([*base, "--moe-router-topk", "2"])
    assert "which has None" in refused([*base, "--moe-router-dtype", "fp64"])
    args = parse_args([*base, "--moe-router-dtype", "fp32"])
    assert (args.megatron["moe_router_dtype"], args.origins["megatron.moe_router_dtype"]) == ("fp32", "command line")
    deepep = [*base, "--moe-token-dispatcher-type", "flex", "--moe-enable-deepep"]
    args = parse_args(deepep)
    assert args.megatron["moe_token_dispatcher_type"] == "alltoall" and not args.megatron["moe_enable_deepep"]
    assert listed(args).count("DeepEP") == 2 and "DeepEP" in refused([*deepep, "--strict"])


def test_offloading_of_layers_is_refused(base: list[str]) -> None:
    assert "needs Transformer Engine" in refused([*base, "--cpu-offloading"])
