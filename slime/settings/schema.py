"""Loads the flags of Megatron, SGLang and the router from JSON files, and queries `slime.models` about checkpoints.

`slime.cli.schemas` writes the JSON files, so that a command line is parsed quickly, without importing an engine. The
import contract forbids importing `slime.models` directly, so this module loads it by its import path.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from slime.core.engine_interface import WINDOW, installed
from slime.core.hf_config import read_hf_config
from slime.core.topology import EngineLayout
from slime.settings.flags import Flag, range_of
from slime.settings.megatron import FIRST

SCHEMA_DIR = Path(__file__).parent / "schemas"

PREFIX = {"megatron": "--", "sglang": "--sglang-", "router": "--router-"}

_DTYPE = "use --bf16, --fp16 or --no-bf16."
_PORTS = "ports are allocated per run."
_HOSTS = "placement chooses the hosts of an engine."
_PLACEMENT = "placement determines it."
_JOIN = "workers join after their first verified weight sync."
_PAIRS = "use --prefill-num-servers, or worker_type in --sglang-config."

OWNED: dict[str, dict[str, str]] = {
    "megatron": {
        **dict.fromkeys(("params_dtype", "pipeline_dtype", "autocast_dtype"), _DTYPE),
        "train_iters": "use --num-rollout and --num-steps-per-rollout.",
        "use_cpu_initialization": "weights always come from the checkpoint.",
    },
    "sglang": {
        "model_path": "use --hf-checkpoint.",
        "tp_size": "use --rollout-num-gpus-per-engine.",
        "device": "use --device.",
        "host": "the run chooses the servers' addresses.",
        **dict.fromkeys(("port", "nccl_port", "disaggregation_bootstrap_port"), _PORTS),
        "dist_init_addr": "addresses are allocated per run.",
        **dict.fromkeys(("nnodes", "node_rank"), _HOSTS),
        **dict.fromkeys(("base_gpu_id", "gpu_id_step"), _PLACEMENT),
        "random_seed": "use --rollout-seed.",
        "weight_version": "weight syncs set the version.",
        "skip_server_warmup": "an engine serves only after its first verified weight sync.",
        "skip_tokenizer_init": "slime already sends and receives token ids.",
        "enable_memory_saver": "use --offload-rollout.",
        "use_ray": "slime places the engines.",
        "disaggregation_mode": _PAIRS,
    },
    "router": {
        **dict.fromkeys(("worker_urls", "prefill", "decode", "service_discovery"), _JOIN),
        "prometheus_port": _PORTS,
        "prometheus_host": "the run chooses the router's address.",
        "mini_lb": "this release starts the standard router.",
        "pd_disaggregation": _PAIRS,
    },
}
"""Settings that slime sets itself -> what to use instead. Setting one is an error."""

SECRETS = (
    "watermark_config",
    "watermark_key",
    "watermark_key_b",
    "api_key",
    "admin_api_key",
    "ssl_keyfile_password",
    "oracle_password",
    "control_plane_api_keys",
)


RENAMED = {
    "sglang": {
        "cuda-graph-bs": "cuda-graph-bs-decode",
        "cuda-graph-max-bs": "cuda-graph-max-bs-decode",
        "mamba-scheduler-strategy": "mamba-radix-cache-strategy",
        "nsa-prefill-backend": "dsa-prefill-backend",
        "nsa-decode-backend": "dsa-decode-backend",
    },
    "megatron": {"muon-use-nesterov": "muon-nesterov"},
}
"""Owner -> flag of an older version -> its newest name. Both are accepted, because launch scripts use both."""
SPELLED_OUT = {"router": {"request-timeout-secs": ("--sglang-router-request-timeout-secs",)}}
"""Owner -> flag -> other spellings, in full."""
PACKAGES = {"sglang": "sglang", "megatron": "megatron-core"}
"""Owner -> package that defines its flags, if slime supports several versions of the package."""


def file_name(owner: str, version: Version | None) -> str:
    return f"{owner}-{version}.json" if owner in PACKAGES else f"{owner}.json"


@cache
def load(owner: str) -> dict[str, Any]:
    """Returns the schema of megatron, sglang or router for the installed version of its package.

    `slime schemas --write` generates the schema of a version that slime does not ship. Without it, the nearest shipped
    version is used.
    """
    data: dict[str, Any] = json.loads(_file(owner).read_text())
    return data


def _file(owner: str) -> Path:
    if owner not in PACKAGES:
        return SCHEMA_DIR / file_name(owner, None)
    brought = {Version(v): SCHEMA_DIR / file_name(owner, Version(v)) for v in WINDOW[PACKAGES[owner]]}
    version = installed(PACKAGES[owner]) or max(brought)
    made = made_here() / file_name(owner, version)
    if version not in brought and made.is_file():
        return made
    nearest = max((v for v in brought if v <= version), default=min(brought))
    return brought[nearest]


def made_here() -> Path:
    """Returns the folder with the schemas that this user generated."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slime" / "schemas"


@cache
def flags_of_owner(owner: str) -> tuple[Flag, ...]:
    """Returns all flags of one owner, with prefixed spellings, including those that slime sets itself."""

    def spelled(names: list[str]) -> tuple[str, ...]:
        return tuple(PREFIX[owner] + name.replace("_", "-") for name in names)

    def flag(dest: str, kind: str, default: Any, names: list[str], **more: Any) -> Flag:
        more.pop("deprecated", None)
        return Flag(
            dest=dest,
            owner=owner,
            names=(*spelled(names), *SPELLED_OUT.get(owner, {}).get(names[0], ())),
            kind=kind,
            default=tuple(default) if isinstance(default, list) else default,
            group=owner,
            off_names=spelled(more.pop("off_names", [])),
            choices=tuple(more.pop("choices", [])) or None,
            limits=range_of(owner, dest, kind),
            optional=more.pop("optional", default is None),
            secret=dest in SECRETS,
            configs=tuple(more.pop("configs", [])),
            topic=owner,
            first=FIRST.get(dest, "") if owner == "megatron" else "",
            **more,
        )

    entries = load(owner)["flags"]
    known = {name for entry in entries for name in entry["names"]}
    pairs = RENAMED.get(owner, {}).items()
    more = {one: [other] for old, new in pairs for one, other in ((new, old), (old, new)) if other not in known}
    return tuple(flag(**entry | {"names": entry["names"] + more.get(entry["names"][0], [])}) for entry in entries)


def owned_spellings() -> dict[str, str]:
    """Returns spelling -> what to use instead, for every setting that slime sets itself."""
    out: dict[str, str] = {}
    for owner, fields in OWNED.items():
        for flag in flags_of_owner(owner):
            if flag.dest in fields:
                out |= {name: fields[flag.dest] for name in (*flag.names, *flag.off_names)}
    return out


MODELS = "slime.models"
"""Import path of the models package, which does not import torch."""


def _ask_models(question: str, hf_checkpoint: str, *more: Any) -> Any:
    return getattr(importlib.import_module(MODELS), question)(read_hf_config(hf_checkpoint), *more)


def architecture_of(hf_checkpoint: str, model_family: str | None = None) -> dict[str, Any]:
    """Returns the Megatron settings, by field name, that the checkpoint's config.json implies.

    `model_family` is the value of `--model-family`. Raises `ConfigError` for a checkpoint that cannot be read or
    trained.
    """
    if model_family is not None:
        importlib.import_module(MODELS).load_family(model_family)
    return _ask_models("architecture", hf_checkpoint)


def layout_problem_of(hf_checkpoint: str, layout: EngineLayout) -> str | None:
    """Returns why an engine cannot hold the checkpoint in this layout, as a clause for a message; None if it can."""
    return _ask_models("layout_problem", hf_checkpoint, layout)


def mtp_problem_of(hf_checkpoint: str) -> str | None:
    """Returns why the checkpoint has no trainable multi-token-prediction layer, as a clause for a message, or None."""
    return _ask_models("mtp_problem", hf_checkpoint)


def has_output_norms(hf_checkpoint: str) -> bool:
    """Returns whether attention and MLP outputs are normalised. Raises `ConfigError` for an unknown family."""
    return bool(_ask_models("family_of", hf_checkpoint).output_norms)


def prefix_problem_of(hf_checkpoint: str) -> str | None:
    """Returns why samples cannot share a prefix in this model, as a clause for a message; None if they can."""
    return _ask_models("prefix_problem", hf_checkpoint)


def kernels_problem_of(hf_checkpoint: str) -> str | None:
    """Returns why engines cannot use the trainer's kernels, as a clause for a message; None if they can."""
    return _ask_models("kernels_problem", hf_checkpoint)


def images_problem_of(hf_checkpoint: str) -> str | None:
    """Returns why this model cannot be trained on images, as a clause for a message; None if it can."""
    return _ask_models("images_problem", hf_checkpoint)


def model_type_of(hf_checkpoint: str) -> str | None:
    """Returns the checkpoint's `model_type`; None for a folder without config.json."""
    path = Path(hf_checkpoint) / "config.json"
    if not path.is_file():
        return None
    state = path.stat()
    return _model_type(str(path), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=16)
def _model_type(path: str, mtime_ns: int, num_bytes: int) -> str | None:
    """Reads `model_type`. Caches the result until the file's modification time or size changes."""
    model_type = read_hf_config(str(Path(path).parent)).get("model_type")
    return None if model_type is None else str(model_type)


def contradictions(architecture: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Returns one message per Megatron setting whose value differs from the checkpoint's."""
    out = []
    for name, value in given.items():
        if name in architecture and not _equal(value, architecture[name]):
            out.append(
                f"{_spellings(name)} {value} contradicts the checkpoint's config.json, which has {architecture[name]} "
                "and is also used by the engines; drop the flag"
            )
    return out


def _equal(given: Any, stored: Any) -> bool:
    """Returns whether two values are equal, up to rounding to float32."""
    if isinstance(given, float) and isinstance(stored, float):
        return math.isclose(given, stored, rel_tol=_FLOAT32_ROUNDING)
    return bool(given == stored)


_FLOAT32_ROUNDING = 2.0**-23
"""Tolerance, because other frameworks write 1e-5 as 9.999999747378752e-06."""


def _spellings(name: str) -> str:
    """Returns all spellings of a Megatron setting's flag, joined by "or"."""
    flag = next((flag for flag in flags_of_owner("megatron") if flag.dest == name), None)
    return "--" + name.replace("_", "-") if flag is None else " or ".join((*flag.names, *flag.off_names))
