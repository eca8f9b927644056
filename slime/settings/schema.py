"""The flags of Megatron, SGLang and the router, read from JSON files that `slime.cli.schemas` writes.

Nothing here imports an engine: parsing a command line has to be instant.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from slime.core.hf_config import read_hf_config
from slime.core.topology import EngineLayout
from slime.settings.flags import Flag, range_of

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


# What the settings ask `slime.models`, which knows the families of models: the architecture of a checkpoint.
#
# That room stands above the settings, so it is named by its import path alone, here and nowhere else in this package.

MODELS = "slime.models"
"""The module whose `architecture` and `load_family` are called; neither imports torch."""


def architecture_of(hf_checkpoint: str, model_family: str | None = None) -> dict[str, Any]:
    """Megatron settings by field name, from the checkpoint's config.json. `model_family`: as `--model-family`.

    Raises `ConfigError` for a checkpoint that cannot be read or is not trained.
    """
    models: Any = importlib.import_module(MODELS)
    if model_family is not None:
        models.load_family(model_family)
    settings: dict[str, Any] = models.architecture(read_hf_config(hf_checkpoint))
    return settings


def layout_problem_of(hf_checkpoint: str, layout: EngineLayout) -> str | None:
    """Why an engine cannot hold a checkpoint in this layout, in a half sentence; None if it can."""
    models: Any = importlib.import_module(MODELS)
    problem: str | None = models.layout_problem(read_hf_config(hf_checkpoint), layout)
    return problem


def mtp_problem_of(hf_checkpoint: str) -> str | None:
    """Why a checkpoint has no layer of multi-token prediction that is trained, in a half sentence; None if it has."""
    models: Any = importlib.import_module(MODELS)
    problem: str | None = models.mtp_problem(read_hf_config(hf_checkpoint))
    return problem


def has_output_norms(hf_checkpoint: str) -> bool:
    """Whether attention and MLP of a checkpoint end with a norm. Raises `ConfigError` for an unknown family."""
    models: Any = importlib.import_module(MODELS)
    return bool(models.family_of(read_hf_config(hf_checkpoint)).output_norms)


def prefix_problem_of(hf_checkpoint: str) -> str | None:
    """Why samples of a checkpoint cannot share a prefix, in a half sentence; None if they can."""
    models: Any = importlib.import_module(MODELS)
    problem: str | None = models.prefix_problem(read_hf_config(hf_checkpoint))
    return problem


def images_problem_of(hf_checkpoint: str) -> str | None:
    """Why a checkpoint reads no images that are trained on, in a half sentence; None if it does."""
    models: Any = importlib.import_module(MODELS)
    problem: str | None = models.images_problem(read_hf_config(hf_checkpoint))
    return problem


def model_type_of(hf_checkpoint: str) -> str | None:
    """The `model_type` of a checkpoint, by which its family is known; None for a folder without a config.json."""
    path = Path(hf_checkpoint) / "config.json"
    if not path.is_file():
        return None
    state = path.stat()
    return _model_type(str(path), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=16)
def _model_type(path: str, mtime_ns: int, num_bytes: int) -> str | None:
    """Read once for each state of the file."""
    model_type = read_hf_config(str(Path(path).parent)).get("model_type")
    return None if model_type is None else str(model_type)


def contradictions(architecture: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """One message per Megatron flag whose value is not the checkpoint's. `given`: explicit settings by field name."""
    out = []
    for name, value in given.items():
        if name in architecture and not _equal(value, architecture[name]):
            out.append(
                f"got {_spellings(name)} {value} because of a flag, but this checkpoint is trained with "
                f"{architecture[name]}, as its config.json and the engine's arithmetic have it; drop the flag"
            )
    return out


def _equal(given: Any, stored: Any) -> bool:
    """Whether two values mean the same; a number that went through float32 is still the number."""
    if isinstance(given, float) and isinstance(stored, float):
        return math.isclose(given, stored, rel_tol=_FLOAT32_ROUNDING)
    return bool(given == stored)


_FLOAT32_ROUNDING = 2.0**-23
"""Checkpoints that another framework wrote hold 1e-5 as 9.999999747378752e-06."""


def _spellings(name: str) -> str:
    """A setting of Megatron as its flags are written."""
    flag = next((flag for flag in flags_of_owner("megatron") if flag.dest == name), None)
    return "--" + name.replace("_", "-") if flag is None else " or ".join((*flag.names, *flag.off_names))
