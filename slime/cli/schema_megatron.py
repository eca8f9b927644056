"""Megatron's settings as data: every field of the installed config classes plus the launch flags that scripts use.

`python -m slime.cli.schemas --write` stores what `build()` returns; the command line is parsed from that file, so no
flag of Megatron costs an import of Megatron. `slime.training.model.megatron_config.config_kwargs` goes the other way.

What cannot be written on a command line (callables, process groups, recipes) is left out and listed as such.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import textwrap
import typing
from typing import Any

ALIASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "add_bias_linear": ((), ("disable-bias-linear",)),
    "apply_rope_fusion": ((), ("no-rope-fusion",)),
    "async_tensor_model_parallel_allreduce": ((), ("no-async-tensor-model-parallel-allreduce",)),
    "average_in_collective": (("ddp-average-in-collective",), ()),
    "barrier_with_L1_time": ((), ("no-barrier-with-level-1-timing",)),
    "bias_activation_fusion": (("bias-swiglu-fusion",), ("no-bias-swiglu-fusion", "no-bias-gelu-fusion")),
    "bucket_size": (("ddp-bucket-size",), ()),
    "check_for_nan_in_grad": (("check-for-nan-in-loss-and-grad",), ("no-check-for-nan-in-loss-and-grad",)),
    "fp4": (("fp4-format",), ()),
    "fp8": (("fp8-format",), ()),
    "gated_linear_unit": (("swiglu",), ()),
    "grad_reduce_in_fp32": (("accumulate-allreduce-grads-in-fp32",), ()),
    "layernorm_epsilon": (("norm-epsilon",), ()),
    "layernorm_zero_centered_gamma": (("apply-layernorm-1p",), ()),
    "num_layers_in_first_pipeline_stage": (("decoder-first-pipeline-num-layers",), ()),
    "num_layers_in_last_pipeline_stage": (("decoder-last-pipeline-num-layers",), ()),
    "num_moe_experts": (("num-experts",), ()),
    "overlap_p2p_comm": (("overlap-p2p-communication",), ("no-overlap-p2p-communication",)),
    "pad_buckets_for_high_nccl_busbw": (("ddp-pad-buckets-for-high-nccl-busbw",), ()),
    "perform_initialization": ((), ("no-initialization",)),
    "use_mamba_mem_eff_path": ((), ("disable-mamba-mem-eff-path",)),
    "use_te_rng_tracker": (("te-rng-tracker",), ()),
}
"""Field -> Megatron-LM's spellings that set it and that switch it off, where they differ from the field's name."""

LAUNCH: tuple[dict[str, Any], ...] = (
    {"dest": "train_iters", "kind": "int", "optional": True, "doc": "Optimizer steps of the whole run; derived."},
    {
        "dest": "lr_decay_style",
        "kind": "str",
        "default": "linear",
        "choices": ["constant", "linear", "cosine", "inverse-square-root", "WSD"],
        "doc": "Shape of the learning-rate decay.",
    },
    {"dest": "lr_decay_iters", "kind": "int", "optional": True, "doc": "Steps of the decay; derived from train_iters."},
    {"dest": "lr_warmup_iters", "kind": "int", "default": 0, "doc": "Steps of linear warm-up."},
    {
        "dest": "lr_warmup_fraction",
        "kind": "float",
        "optional": True,
        "doc": "Share of lr_decay_iters to warm up over.",
    },
    {"dest": "lr_warmup_init", "kind": "float", "default": 0.0, "doc": "Learning rate that warm-up starts from."},
    {
        "dest": "lr_wsd_decay_style",
        "kind": "str",
        "default": "exponential",
        "choices": ["exponential", "linear", "cosine", "minus_sqrt"],
        "doc": "Shape of the last phase of WSD.",
    },
    {"dest": "lr_wsd_decay_iters", "kind": "int", "optional": True, "doc": "Steps of the last phase of WSD."},
    {"dest": "start_weight_decay", "kind": "float", "optional": True, "doc": "First weight decay of a schedule."},
    {"dest": "end_weight_decay", "kind": "float", "optional": True, "doc": "Last weight decay of a schedule."},
    {
        "dest": "weight_decay_incr_style",
        "kind": "str",
        "default": "constant",
        "choices": ["constant", "linear", "cosine"],
        "doc": "Shape of the weight-decay schedule.",
    },
    {"dest": "seq_length", "kind": "int", "default": 4096, "doc": "Nominal sequence length; packing ignores it."},
    {
        "dest": "max_position_embeddings",
        "kind": "int",
        "optional": True,
        "doc": "Longest position; from the checkpoint.",
    },
    {"dest": "vocab_size", "kind": "int", "optional": True, "doc": "Vocabulary; from the checkpoint."},
    {
        "dest": "untie_embeddings_and_output_weights",
        "kind": "bool",
        "default": False,
        "doc": "Embedding and output layer have weights of their own; from the checkpoint.",
    },
    {
        "dest": "position_embedding_type",
        "kind": "str",
        "default": "rope",
        "choices": ["rope"],
        "doc": "Position embedding.",
    },
    {"dest": "rope_scaling", "kind": "json", "optional": True, "doc": "HF's rope_scaling object; from the checkpoint."},
    {
        "dest": "group_query_attention",
        "kind": "bool",
        "default": False,
        "doc": "Fewer key/value heads than query heads; from the checkpoint.",
    },
)
"""Megatron-LM launch flags that are not fields of a config class, and that slime reads."""


def _annotation(hint: Any) -> dict[str, Any] | None:
    """Kind, list-ness and choices of a type; None for what cannot be written on a command line."""
    import torch

    members = [a for a in typing.get_args(hint) if a is not type(None)]
    is_union = typing.get_origin(hint) is typing.Union
    out: dict[str, Any] = {"optional": is_union and type(None) in typing.get_args(hint)}
    if is_union and len(members) > 1:
        base = next((m for m in members if m in (int, float, str)), None)
        return {**out, "kind": f"{base.__name__}_or_json"} if base else None
    if is_union:
        hint = members[0]
    origin = typing.get_origin(hint)
    simple = {bool: "bool", int: "int", float: "float", str: "str", torch.dtype: "dtype"}
    if hint in simple:
        return {**out, "kind": simple[hint]}
    if origin is typing.Literal:
        return {**out, "kind": "str", "choices": list(typing.get_args(hint))}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {**out, "kind": "str", "choices": [m.name for m in hint]}
    element = (typing.get_args(hint) or (None,))[0]
    if origin is list and element in simple:
        return {**out, "kind": simple[element], "nargs": "+"}
    if origin is tuple and element in simple:
        return {**out, "kind": simple[element], "nargs": str(len(typing.get_args(hint)))}
    return None


def _plain(value: Any) -> Any:
    """A default as JSON data."""
    if isinstance(value, enum.Enum):
        return value.name
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    return value


def _docs(cls: type) -> dict[str, str]:
    """Field -> the string literal below it, over all base classes."""
    out: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef), f"{base} is not a class"
        for one, two in zip(node.body, node.body[1:], strict=False):
            if isinstance(one, ast.AnnAssign) and isinstance(two, ast.Expr) and isinstance(two.value, ast.Constant):
                name = getattr(one.target, "id", "")
                out[name] = " ".join(str(two.value.value).split())
    return out


def _entry(field: dataclasses.Field[Any], shape: dict[str, Any], doc: str) -> dict[str, Any]:
    """The schema entry of one field."""
    dashed = field.name.replace("_", "-")
    extra_on, extra_off = ALIASES.get(field.name, ((), ()))
    for name in field.metadata.get("argparse_meta", {}).get("arg_names", ()):
        negative = shape["kind"] == "bool" and name.startswith(("--no-", "--disable-"))
        extra_on, extra_off = (extra_on, (*extra_off, name[2:])) if negative else ((*extra_on, name[2:]), extra_off)
    off = () if shape["kind"] != "bool" or dashed.startswith(("no-", "disable-")) else (f"no-{dashed}",)
    default = field.default if field.default is not dataclasses.MISSING else []
    entry: dict[str, Any] = {
        "dest": field.name,
        "kind": shape["kind"],
        "names": list(dict.fromkeys((dashed, *extra_on))),
    }
    entry |= {"default": _plain(default), "doc": doc, "configs": []}
    optional = {"off_names": list(dict.fromkeys((*off, *extra_off))), "optional": shape["optional"] or default is None}
    optional |= {"choices": shape.get("choices"), "nargs": shape.get("nargs")}
    return entry | {k: v for k, v in optional.items() if v}


def config_classes() -> dict[str, type]:
    """The config classes whose settings are flags, in the order in which a shared field is described."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    classes = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig, MLATransformerConfig)
    return {c.__name__: c for c in classes}


def build() -> dict[str, Any]:
    """The schema of the installed Megatron-core. Imports Megatron (seconds)."""
    from importlib.metadata import version

    entries: dict[str, dict[str, Any]] = {}
    omitted: set[str] = set()
    for class_name, cls in config_classes().items():
        hints, docs = typing.get_type_hints(cls), _docs(cls)
        for field in dataclasses.fields(cls):
            shape = None if field.name.startswith("_") else _annotation(hints[field.name])
            if shape is None:
                omitted.add(field.name)
                continue
            entry = entries.setdefault(field.name, _entry(field, shape, docs.get(field.name, "")))
            entry["configs"].append(class_name)
    for launch in LAUNCH:
        assert launch["dest"] not in entries, f"{launch['dest']} is a config field by now; drop it from LAUNCH"
        dashed = launch["dest"].replace("_", "-")
        off = {"off_names": [f"no-{dashed}"]} if launch["kind"] == "bool" else {}
        entries[launch["dest"]] = {"names": [dashed], "default": None, "configs": []} | launch | off
    ordered = sorted(entries.values(), key=lambda e: e["dest"])
    return {"package": f"megatron-core {version('megatron-core')}", "omitted": sorted(omitted), "flags": ordered}
