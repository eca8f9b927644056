"""Multi-token prediction trained by reinforcement learning and served as the draft: the real loop on one GPU.

python -m benchmarks.mtp --out mtp.json --folder /tmp/mtp

Runs `train.py`, colocated, with SGLang's speculative decoding and --enable-mtp-training, for a tiny DeepSeek-V3 and a
tiny Qwen3-Next with random weights, side by side on one GPU. The vocabulary is small and the output layer has large
weights, so a token nearly determines the next token, and the layer, which starts from noise, can learn to predict it.
Per step: its loss, tokens per pass of the model (`rollout/spec_accept_length`), the log-prob difference of trainer and
engine. Every weight sync compares the digests of model and draft.

Then two engines, first one with the draft and then one without, sample continuations of a prompt many times from a
checkpoint from the middle of the run, whose draft is trained and whose answers still differ. The frequencies of the
second token after the most frequent first one, with the draft, are compared with the probabilities reported by the
engine without it (chi-square). The exit status is 1 unless the acceptance length rose, the loss fell, and the
statistic, over at least five tokens, is within ten standard deviations of its mean.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ENGINE = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.45,
    "max_total_tokens": 65536,
    "max_running_requests": 128,
    "disable_cuda_graph": True,
}
"""Without CUDA graphs: capturing takes a minute, and with a draft it imports DeepGEMM (SGLang 0.5.16)."""
SPECULATION = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3,
}
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "moe_intermediate_size": 128,
    "num_experts_per_tok": 2,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "rope_theta": 10000.0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 1,
    },
    "qwen3_next": {
        **COMMON,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "shared_expert_intermediate_size": 128,
    },
}
WIDTHS = {"embed_tokens": 1.0, "lm_head": 0.18}
"""Weights with a standard deviation above 0.02. Embeddings outweigh the layers, so a token has few successors."""
NARROW, NARROW_HEAD = 0.005, 0.002
"""Standard deviation of the MTP layer and its projection: small noise, which training soon outgrows."""


def tensors_of(config: Mapping[str, Any], seed: int) -> Iterator[tuple[str, Any]]:
    """Yields (HF name, bfloat16 tensor) of all weights, including multi-token prediction."""
    import torch

    from slime.models import table_for
    from slime.models.common.mtp import PREFIX, with_mtp

    table, generator = table_for(with_mtp(config)), torch.Generator().manual_seed(seed)
    zero_centred = config["model_type"] == "qwen3_next"
    made: dict[str, Any] = {}
    for name in table.hf_names:
        shape, entry = table.shape_of(name), table.entry_of_hf(name)
        if len(shape) == 1:
            plain = 0.0 if name.endswith("bias") or (zero_centred and "linear_attn.norm" not in name) else 1.0
            tensor = torch.full(shape, plain)
        else:
            std = next((width for part, width in WIDTHS.items() if part in name), 0.02)
            if entry.megatron.startswith(PREFIX):
                std = NARROW_HEAD if "eh_proj" in entry.megatron else NARROW
            tensor = torch.empty(shape).normal_(0, std, generator=generator)
        made[name] = tensor if entry.row.wide else tensor.bfloat16()
        yield name, made[name]
    yield from ((copy, made[source].clone()) for copy, source in table.duplicates.items())


def write(folder: Path, family: str, seed: int) -> Path:
    """Writes a checkpoint with a tokenizer."""
    from safetensors.torch import save_file

    from tests.support.tiny import write_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(SHAPES[family], indent=2))
    tensors = {name: tensor.contiguous() for name, tensor in tensors_of(SHAPES[family], seed)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def trained(family: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs train.py; returns its metrics by step, and the end of its output if it failed."""
    folder = options.folder / family
    checkpoint, prompts = folder / "model", folder / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"{i * 7919 % 9973} {i * 104729 % 8191}", "label": ""}) for i in range(512)]
    prompts.write_text("\n".join(lines) + "\n")
    words = f"--hf-checkpoint {checkpoint} --device cuda --colocate --bf16"
    words += f" --prompt-data {prompts} --input-key prompt --label-key label"
    words += f" --custom-rm-path benchmarks.rewards:parity --advantage-estimator grpo --num-rollout {options.rollouts}"
    words += " --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 64"
    words += f" --num-steps-per-rollout {options.updates} --max-tokens-per-gpu 16384 --lr {options.lr}"
    words += f" --enable-mtp-training --run-dir {folder / 'run'} --save-hf {folder / 'hf'}/{{rollout_id}}"
    words += f" --save-interval {options.tested}"
    for name, value in (ENGINE | SPECULATION | options.more.get(family, {})).items():
        words += f" --sglang-{name.replace('_', '-')}" + ("" if value is True else f" {value}")
    log = options.folder / f"{family}.log"
    with log.open("w") as output:
        command = [sys.executable, "train.py", *words.split()]
        code = subprocess.run(command, stdout=output, stderr=output, timeout=options.limit, env=os.environ).returncode
    metrics = folder / "run" / "metrics.jsonl"
    steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return {"exit_status": code, "steps": steps, "end_of_log": log.read_text()[-4000:] if code else ""}


def sampled(checkpoint: Path, options: argparse.Namespace, name: str, extra: Mapping[str, Any]) -> list[Any]:
    """Starts an engine and samples many answers to one prompt."""
    from slime.rollout.client.engine_client import EngineClient
    from slime.serving.leased_ports import request
    from slime.serving.server import ServerSpec, SGLangServer

    spec = ServerSpec(str(checkpoint), dtype="bfloat16", device="cuda", extra=extra)
    server = SGLangServer(spec, log_path=options.folder / f"{name}-engine.log")
    params = {"temperature": 1.0, "max_new_tokens": 4, "ignore_eos": True}

    async def ask() -> list[Any]:
        client = EngineClient(server.url, request_timeout_s=300)
        try:
            return await asyncio.gather(*(client.generate([2, 40, 41, 42], params) for _ in range(options.samples)))
        finally:
            await client.close()

    try:
        server.start()
        server.wait_ready(timeout_s=300)
        version = {"new_version": "1", "abort_all_requests": False}
        request("POST", f"{server.url}/update_weight_version", version, timeout_s=30)
        return asyncio.run(ask())
    finally:
        server.stop()


def followers(checkpoint: Path, options: argparse.Namespace, family: str) -> dict[str, Any]:
    """Returns the second tokens after the most frequent first token with the draft, and their probabilities without."""
    plain = ENGINE | options.more.get(family, {})
    without = sampled(checkpoint, options, f"{family}-plain", plain)
    drafted = sampled(checkpoint, options, family, plain | SPECULATION)
    first = Counter(a.tokens[0] for a in without).most_common(1)[0][0]
    told: dict[int, list[float]] = {}
    for answer in without:
        if answer.tokens[0] == first:
            told.setdefault(answer.tokens[1], []).append(math.exp(answer.log_probs[1]))
    seen = Counter(a.tokens[1] for a in drafted if a.tokens[0] == first)
    return chi_square(seen, {token: sum(said) / len(said) for token, said in told.items()}, seen.total())


def chi_square(seen: Mapping[int, int], told: Mapping[int, float], num: int) -> dict[str, Any]:
    """Returns the statistic over tokens that are expected at least 20 times; all other tokens count as one token."""
    often = {token: p for token, p in told.items() if p * num >= 20}
    cells = [(seen[token], p * num) for token, p in often.items()]
    rest = 1.0 - sum(often.values())
    if rest * num >= 5:
        cells.append((num - sum(n for n, _ in cells), rest * num))
    statistic, freedom = sum((n - e) ** 2 / e for n, e in cells), max(1, len(cells) - 1)
    return {
        "samples": num,
        "cells": len(cells),
        "statistic": statistic,
        "sigmas": (statistic - freedom) / (2 * freedom) ** 0.5,
    }


def judged(record: Mapping[str, Any]) -> bool:
    """Returns whether a family's draft learned, and does not change the distribution."""
    lengths = [s["rollout/spec_accept_length"] for s in record["steps"] if "rollout/spec_accept_length" in s]
    losses = [s["train/mtp_loss"] for s in record["steps"] if "train/mtp_loss" in s]
    if record["exit_status"] or len(lengths) < 4 or len(losses) < 4:
        return False
    learned = lengths[-1] > lengths[0] + 0.2 and losses[-1] < losses[0] - 0.5
    found = record.get("followers", {"cells": 0, "sigmas": math.inf})
    return learned and found["cells"] >= 5 and abs(found["sigmas"]) < 10


def main() -> int:
    """Prints the record, and writes it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for models, logs and runs")
    parser.add_argument("--families", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--updates", type=int, default=4, help="optimizer steps per rollout")
    parser.add_argument("--tested", type=int, default=4, help="rollouts before the checkpoint to sample from")
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=400, help="time limit of one run, in seconds")
    parser.add_argument("--more", type=json.loads, default={}, help="family -> ServerArgs besides, as JSON")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)

    def of_family(family: str) -> dict[str, Any]:
        record = trained(family, options)
        if not record["exit_status"]:
            exported = (options.folder / family / "hf").glob("*/config.json")
            first = min(exported, key=lambda config: int(config.parent.name))
            record["followers"] = followers(first.parent, options, family)
        return record

    for family in options.families:  # here, because two threads that import transformers break each other's imports
        write(options.folder / family / "model", family, options.seed)
    with ThreadPoolExecutor(len(options.families)) as pool:
        records = dict(zip(options.families, pool.map(of_family, options.families), strict=True))
    good = {family: judged(record) for family, record in records.items()}
    options.out.write_text(json.dumps({"good": good, "families": records}, indent=1))
    for family, record in records.items():
        told = ("train/mtp_loss", "rollout/spec_accept_length", "train/train_rollout_logprob_abs_diff")
        print(family, "exit status", record["exit_status"], record.get("followers"), record["end_of_log"])
        for step in record["steps"]:
            print("  ", {name: round(step[name], 4) for name in told if name in step})
    return 0 if all(good.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
