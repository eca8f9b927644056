"""`slime schemas`: writes or checks the flags of the installed engines.

    slime schemas --write     after installing a different version of an engine
    slime schemas             prints the differences; exit code 1 if there are any

slime ships the flags of the versions that it supports (slime/settings/schemas/*.json). `--write` stores those of
another version in the user's cache.

The command line is parsed from these files, so parsing imports no engine. Megatron's flags are all fields of its config
classes, plus the launch flags that scripts use (`slime.training.model.megatron_config.config_kwargs` is the inverse).
Fields that a command line cannot express (callables, process groups) are listed as omitted. The flags of SGLang and the
router come from their argument parsers, under their own names; reading the files adds --sglang- and --router-. A
deprecated flag keeps its name, so that the engine receives what the user wrote.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import inspect
import json
import sys
import textwrap
import typing
from pathlib import Path
from typing import Any

from slime.core.engine_interface import WINDOW
from slime.core.engine_interface import installed as installed_version
from slime.settings.schema import PACKAGES, SCHEMA_DIR, file_name, made_here


def build_all() -> dict[str, dict[str, Any]]:
    """Returns owner -> schema of the installed package. Slow, because it imports all packages."""
    import torch

    if not torch.cuda.is_available():  # a host with GPUs may have the CPU build of torch
        from slime.compat.sglang_cpu import activate

        activate("cpu")
    return {"megatron": build(), "sglang": build_sglang(), "router": build_router()}


def dump(schema: dict[str, Any]) -> str:
    """Returns the text of a schema file, with one flag per line for readable diffs."""
    head = {k: v for k, v in schema.items() if k != "flags"}
    flags = ",\n".join(json.dumps(f, sort_keys=True) for f in schema["flags"])
    return json.dumps(head)[:-1] + ', "flags": [\n' + flags + "\n]}\n"


def differences(installed: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the settings that differ between the files and the installed packages."""
    out = []
    for owner, schema in installed.items():
        path = place_of(owner)
        stored = json.loads(path.read_text()) if path.exists() else {"flags": []}
        old = {f["dest"]: f for f in stored["flags"]}
        new = {f["dest"]: f for f in json.loads(dump(schema))["flags"]}
        out += [f"{owner}: {dest}" for dest in sorted(old.keys() | new.keys()) if old.get(dest) != new.get(dest)]
    return out


def place_of(owner: str) -> Path:
    """Returns the file with the flags of the installed version."""
    version = installed_version(PACKAGES[owner]) if owner in PACKAGES else None
    brought = owner not in PACKAGES or str(version) in WINDOW[PACKAGES[owner]]
    return (SCHEMA_DIR if brought else made_here()) / file_name(owner, version)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="update the files")


def run(options: argparse.Namespace) -> int:
    """Prints the differences; returns 1 if there are any and `--write` is not given."""
    installed = build_all()
    changed = differences(installed)
    if options.write:
        for owner, schema in installed.items():
            place_of(owner).parent.mkdir(parents=True, exist_ok=True)
            place_of(owner).write_text(dump(schema))
    print(f"{len(changed)} settings differ" + "".join(f"\n  {line}" for line in changed))
    return 0 if options.write else int(bool(changed))


# --- Megatron

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
"""Field -> Megatron-LM's other spellings that set the field, and spellings that switch it off."""


def _launch(dest: str, kind: str, doc: str, *, default: Any = None, choices: list[str] | None = None) -> dict[str, Any]:
    value = {"optional": True} if default is None else {"default": default}
    return {"dest": dest, "kind": kind, "doc": doc, **value, **({"choices": choices} if choices else {})}


LAUNCH = (
    _launch("train_iters", "int", "Optimizer steps of the whole run; derived."),
    _launch(
        "lr_decay_style",
        "str",
        "Shape of the learning-rate decay.",
        default="linear",
        choices=["constant", "linear", "cosine", "inverse-square-root", "WSD"],
    ),
    _launch("lr_decay_iters", "int", "Steps of the decay; derived from train_iters."),
    _launch("lr_warmup_iters", "int", "Steps of linear warm-up.", default=0),
    _launch("lr_warmup_fraction", "float", "Share of lr_decay_iters to warm up over."),
    _launch("lr_warmup_init", "float", "Learning rate that warm-up starts from.", default=0.0),
    _launch(
        "lr_wsd_decay_style",
        "str",
        "Shape of the last phase of WSD.",
        default="exponential",
        choices=["exponential", "linear", "cosine", "minus_sqrt"],
    ),
    _launch("lr_wsd_decay_iters", "int", "Steps of the last phase of WSD."),
    _launch("start_weight_decay", "float", "First weight decay of a schedule."),
    _launch("end_weight_decay", "float", "Last weight decay of a schedule."),
    _launch(
        "weight_decay_incr_style",
        "str",
        "Shape of the weight-decay schedule.",
        default="constant",
        choices=["constant", "linear", "cosine"],
    ),
    _launch("seq_length", "int", "Nominal sequence length; packing ignores it.", default=4096),
    _launch("max_position_embeddings", "int", "Longest position; from the checkpoint."),
    _launch("vocab_size", "int", "Vocabulary; from the checkpoint."),
    _launch(
        "untie_embeddings_and_output_weights",
        "bool",
        "Embedding and output layer have separate weights; from the checkpoint.",
        default=False,
    ),
    _launch("position_embedding_type", "str", "Position embedding.", default="rope", choices=["rope"]),
    _launch("rope_scaling", "json", "HF's rope_scaling object; from the checkpoint."),
    _launch(
        "group_query_attention", "bool", "Fewer key/value heads than query heads; from the checkpoint.", default=False
    ),
)
"""Megatron-LM launch flags that are not fields of a config class, and that slime reads."""


def _annotation(hint: Any) -> dict[str, Any] | None:
    """Returns kind, nargs and choices of a type; None if a command line cannot express the type."""
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
    if isinstance(value, enum.Enum):
        return value.name
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    return value


def _docs(cls: type) -> dict[str, str]:
    """Returns field -> the string literal below the field, including base classes."""
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
    """Returns the config classes with flags. A field of several classes is described by the first one."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    classes = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig, MLATransformerConfig)
    return {c.__name__: c for c in classes}


def build() -> dict[str, Any]:
    """Returns the schema of the installed Megatron-core. The import takes seconds."""
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
        assert launch["dest"] not in entries, f"{launch['dest']} is now a config field; drop it from LAUNCH"
        dashed = launch["dest"].replace("_", "-")
        off = {"off_names": [f"no-{dashed}"]} if launch["kind"] == "bool" else {}
        entries[launch["dest"]] = {"names": [dashed], "default": None, "configs": []} | launch | off
    ordered = sorted(entries.values(), key=lambda e: e["dest"])
    return {"package": f"megatron-core {version('megatron-core')}", "omitted": sorted(omitted), "flags": ordered}


# --- SGLang and the router

_KINDS = {"int": "int", "float": "float", "str": "str", "nullable_str": "str", "human_readable_int": "human_int"}


def _sglang_entry(action: argparse.Action) -> dict[str, Any] | None:
    """Returns the schema entry of one parser action; None if the action is not a setting."""
    if not action.option_strings or action.dest in ("help", "version") or type(action).__name__ == "DeprecatedAction":
        return None
    names = [n.removeprefix("--") for n in action.option_strings if n.startswith("--")]
    deprecated = type(action).__name__.startswith("Deprecated")
    off_names: list[str] = []
    if action.nargs == 0:
        kind = "bool"
        if isinstance(action, argparse.BooleanOptionalAction):
            off_names, names = [n for n in names if n.startswith("no-")], [n for n in names if not n.startswith("no-")]
    else:
        # A value with its own parser (JSON, graph descriptions) is passed on as text.
        kind = _KINDS.get(getattr(action.type, "__name__", "str"), "str")
    default = action.default if isinstance(action.default, (bool, int, float, str)) else None
    if default == argparse.SUPPRESS or deprecated:
        default = None
    entry: dict[str, Any] = {"dest": names[0].replace("-", "_") if deprecated else action.dest, "kind": kind}
    entry |= {"names": names, "default": default, "doc": " ".join((action.help or "").split())}
    optional: dict[str, Any] = {
        "off_names": off_names,
        "nargs": None if action.nargs in (0, None) else str(action.nargs),
    }
    optional |= {"choices": _choices(action), "deprecated": deprecated}
    optional |= {"append": type(action).__name__ == "_AppendAction"}
    return entry | {k: v for k, v in optional.items() if v}


def _choices(action: argparse.Action) -> list[Any] | None:
    """Returns the choices in the parser's order. Sorts a set, so that every host writes the same file."""
    if not action.choices:
        return None
    words = list(action.choices)
    return sorted(words) if isinstance(action.choices, (set, frozenset)) or "parser" in action.dest else words


def _entries(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    found = [e for e in map(_sglang_entry, parser._actions) if e is not None]
    return sorted(found, key=lambda e: e["dest"])


def build_sglang() -> dict[str, Any]:
    """Returns the schema of the installed SGLang. The import takes seconds, and on a CPU needs slime's stand-ins."""
    from importlib.metadata import version

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    return {"package": f"sglang {version('sglang')}", "flags": _entries(parser)}


def build_router() -> dict[str, Any]:
    from importlib.metadata import version

    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    return {"package": f"sglang-router {version('sglang-router')}", "flags": _entries(parser)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="compare the flag schemas with the installed engines")
    add_flags(parser)
    sys.exit(run(parser.parse_args()))
