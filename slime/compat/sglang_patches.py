"""Applies the changes to stock SGLang that a server needs, depending on its arguments.

Each change is a module of this package. `slime.serving.launch` calls `patch_sglang` in the server and each of its child
processes, then checks that every hook took effect.
"""

from __future__ import annotations

import os

from slime.compat import (
    register,
    sglang_0_5_16,
    sglang_aborted_requests,
    sglang_config_names,
    sglang_memory_gate,
    sglang_pipeline_stages,
    sglang_quantised,
    sglang_routed_experts,
    sglang_security,
    sglang_token_versions,
    sglang_trainer_kernels,
    sglang_update_sessions,
    sglang_version_prefixes,
    sglang_weight_stream,
)
from slime.compat.sglang_cpu import activate, forked_children


def value_of(arguments: list[str], flag: str, default: str) -> str:
    """Returns the value of `flag` in `arguments`, or `default`."""
    for i, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
        if argument == flag and i + 1 < len(arguments):
            return arguments[i + 1]
    return default


def patch_sglang(arguments: list[str], *, token_versions: bool) -> None:
    """Applies the patches and registers the hooks that a server with these arguments needs.

    Call it before importing SGLang. `token_versions`: whether responses contain each token's weight version.
    """
    on_cpu = bool(activate(value_of(arguments, "--device", "cuda")))
    model_path = value_of(arguments, sglang_config_names.PATH_FLAG, "")
    if unnamed := sglang_config_names.unnamed_type(model_path):
        sglang_config_names.register(unnamed)
    sglang_security.know_scheme()
    quantised = sglang_quantised.is_quantised(value_of(arguments, sglang_quantised.PATH_FLAG, ""))
    for module, needed in (
        (forked_children, on_cpu),
        (sglang_0_5_16, True),
        (sglang_memory_gate, sglang_memory_gate.GATE_ENV in os.environ),
        (sglang_aborted_requests, True),
        (sglang_update_sessions, True),
        (sglang_weight_stream, True),
        (sglang_token_versions, token_versions),
        (sglang_version_prefixes, token_versions),
        (sglang_routed_experts, sglang_routed_experts.FLAG in arguments),
        (sglang_pipeline_stages, int(value_of(arguments, sglang_pipeline_stages.FLAG, "1")) > 1),
        (sglang_quantised, quantised),
        (sglang_config_names, sglang_config_names.model_type_of(model_path) in sglang_config_names.FROM_CONFIG),
    ):
        if needed:
            register(module.HOOKS)
    if sglang_trainer_kernels.KERNELS_ENV in os.environ:
        register(sglang_trainer_kernels.HOOKS)
        register(sglang_trainer_kernels.CPU_HOOKS if on_cpu else sglang_trainer_kernels.GPU_HOOKS)
    if sglang_version_prefixes.DP_FLAG in arguments:
        register(sglang_version_prefixes.FLUSH_HOOKS)
    if value_of(arguments, sglang_0_5_16.DRAFT_FLAG, ""):
        register(sglang_0_5_16.DRAFT_HOOKS)
