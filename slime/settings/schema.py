"""The flags of Megatron, SGLang and the router, read from JSON files that `slime.cli.schemas` writes.

Nothing here imports an engine: parsing a command line has to be instant.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from slime.settings.flags import Flag
from slime.settings.ranges import range_of

SCHEMA_DIR = Path(__file__).parent / "schemas"

PREFIX = {"megatron": "--", "sglang": "--sglang-", "router": "--router-"}

OWNED: dict[str, dict[str, str]] = {
    "megatron": {
        "params_dtype": "use --bf16, --fp16 or --no-bf16.",
        "pipeline_dtype": "use --bf16, --fp16 or --no-bf16.",
        "autocast_dtype": "use --bf16, --fp16 or --no-bf16.",
        "train_iters": "use --num-rollout and --num-steps-per-rollout.",
        "use_cpu_initialization": "weights always come from the checkpoint.",
    },
    "sglang": {
        "model_path": "use --hf-checkpoint.",
        "tp_size": "use --rollout-num-gpus-per-engine.",
        "device": "use --device.",
        "host": "servers listen on addresses of the run.",
        "port": "ports are allocated per run.",
        "nccl_port": "ports are allocated per run.",
        "dist_init_addr": "addresses are allocated per run.",
        "nnodes": "an engine spans the hosts that placement gives it.",
        "node_rank": "an engine spans the hosts that placement gives it.",
        "base_gpu_id": "placement decides it.",
        "gpu_id_step": "placement decides it.",
        "random_seed": "use --rollout-seed.",
        "weight_version": "the weight sync counts versions.",
        "skip_server_warmup": "an engine serves after its first verified weight sync only.",
        "skip_tokenizer_init": "slime sends and receives token ids already.",
        "enable_memory_saver": "use --offload-rollout.",
        "use_ray": "slime places the engines.",
        "disaggregation_mode": "use --prefill-num-servers, or worker_type in --sglang-config.",
        "disaggregation_bootstrap_port": "ports are allocated per run.",
    },
    "router": {
        "worker_urls": "workers join after their first verified weight sync.",
        "prometheus_port": "ports are allocated per run.",
        "prometheus_host": "the router listens on an address of the run.",
        "mini_lb": "this release starts the standard router.",
        "pd_disaggregation": "use --prefill-num-servers, or worker_type in --sglang-config.",
        "prefill": "workers join after their first verified weight sync.",
        "decode": "workers join after their first verified weight sync.",
        "service_discovery": "workers join after their first verified weight sync.",
    },
}
"""Settings that slime makes itself, and what to use instead: giving them is an error."""

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password", "oracle_password", "control_plane_api_keys")


@cache
def load(owner: str) -> dict[str, Any]:
    """The stored schema of megatron, sglang or router."""
    data: dict[str, Any] = json.loads((SCHEMA_DIR / f"{owner}.json").read_text())
    return data


@cache
def flags_of_owner(owner: str) -> tuple[Flag, ...]:
    """All flags of one owner with their prefix, those that slime sets itself included."""
    prefix = PREFIX[owner]
    out = []
    for entry in load(owner)["flags"]:
        choices = entry.get("choices")
        default = entry["default"]
        out.append(
            Flag(
                dest=entry["dest"],
                owner=owner,
                names=tuple(prefix + n.replace("_", "-") for n in entry["names"]),
                kind=entry["kind"],
                default=tuple(default) if isinstance(default, list) else default,
                doc=entry["doc"],
                group=owner,
                off_names=tuple(prefix + n.replace("_", "-") for n in entry.get("off_names", ())),
                nargs=entry.get("nargs"),
                append=entry.get("append", False),
                choices=tuple(choices) if choices else None,
                limits=range_of(owner, entry["dest"], entry["kind"]),
                optional=entry.get("optional", entry["default"] is None),
                secret=entry["dest"] in SECRETS,
                configs=tuple(entry.get("configs", ())),
            )
        )
    return tuple(out)


def owned_spellings() -> dict[str, str]:
    """Spelling -> what to use instead, for every setting that slime makes itself."""
    out: dict[str, str] = {}
    for owner, fields in OWNED.items():
        for flag in flags_of_owner(owner):
            if flag.dest in fields:
                out |= {name: fields[flag.dest] for name in (*flag.names, *flag.off_names)}
    return out
