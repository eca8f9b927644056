"""The model's architecture as settings of Megatron: the checkpoint says it, and no flag may say otherwise.

A flag that says the same in other words is taken; one that says something else is refused, but for those that do
nothing in a model of its kind, which are listed as without effect.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from slime.settings.families import architecture_of, contradictions
from slime.settings.fields import Need
from slime.settings.resolver import Resolver

NEEDS: Mapping[str, Need] = {
    "kv_channels": Need(
        lambda m: not m.get("multi_latent_attention"),
        "attention with one size of a head; latent attention has --qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim",
    ),
    "moe_router_pre_softmax": Need(
        lambda m: m.get("moe_router_score_function", "softmax") == "softmax",
        "a softmax router; the one of this checkpoint is a sigmoid",
    ),
}
"""Settings of Megatron that the checkpoint says -> when they act, by its other ones."""

CHOICES: Mapping[str, tuple[Any, ...]] = {"moe_router_dtype": ("fp32",)}
"""Settings of Megatron for which a checkpoint has a default -> what a flag may say in its place: how exactly something
is computed, not what."""

_PATTERNS: Mapping[str, Callable[[int, int], bool]] = {
    "moe_layer_freq": lambda frequency, layer: layer % frequency == 0,
    "linear_attention_freq": lambda frequency, layer: (layer + 1) % frequency != 0,
}
"""Settings with one entry per layer -> what a frequency means for a layer."""


def take_architecture(resolver: Resolver) -> tuple[list[str], dict[str, str]]:
    """Settles what the checkpoint says. Returns (contradictions with flags, setting -> why it has no effect).

    Raises `ConfigError` for a checkpoint that cannot be trained.
    """
    architecture = architecture_of(resolver.hf_checkpoint, resolver.model_family)
    explicit, idle = {}, {}
    for name, stored in architecture.items():
        value = stored
        if resolver.was_given(f"megatron.{name}"):
            given = resolver.given(f"megatron.{name}")
            need = NEEDS.get(name)
            if _says(name, given, architecture) == _says(name, stored, architecture):
                pass
            elif given in CHOICES.get(name, ()):
                value = given
            elif need is not None and not need.acts(architecture):
                idle[f"megatron.{name}"] = f"{given}, which needs {need.text}"
            else:
                explicit[name] = given
        resolver.fix("megatron", name, value, "HF config" if value is stored else "command line")
    return contradictions(architecture, explicit), idle


def _says(name: str, value: Any, architecture: Mapping[str, Any]) -> Any:
    """A value, or a layer pattern with one entry per layer: that of `[0]*3+[1]*75`, or of a frequency."""
    of_frequency = _PATTERNS.get(name)
    if of_frequency is None:
        return list(value) if isinstance(value, tuple) else value
    if isinstance(value, int) and value > 0:
        return [int(of_frequency(value, layer)) for layer in range(architecture["num_layers"])]
    if not isinstance(value, str):
        return value
    try:
        return _evaluated(ast.parse(value.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        return value


def _evaluated(node: ast.expr) -> Any:
    """Lists of numbers, added and repeated; nothing else is computed. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and 0 <= node.value <= _MOST:
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_evaluated(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
            return left * right
    raise ValueError("no pattern of layers")


_MOST = 10_000
"""No model has more layers; a longer list is not made."""
