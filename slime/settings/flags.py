"""Defines command-line flags and the ranges of numbers, and converts arguments to values.

Invariants
1. Values from the command line and from YAML are converted and checked in the same way.
2. A secret can be passed as @FILE, because every user of the host can read command lines.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime.core.errors import ConfigError
from slime.core.processes import ip_of
from slime.core.text import HIDDEN, nearest, shorten
from slime.core.user_files import Doubled, parse_json, read_small

# --- Ranges of numbers. Bounds are far beyond today's machines, so a value outside them is a typo.


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The allowed range of a number. None means unbounded. Numbers must always be finite."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def problem(self, value: Any) -> str | None:
        """Returns the problem, phrased to follow "NAME is VALUE, "; None if `value` is allowed or is not a number."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        if not math.isfinite(value):
            return "which is not a finite number"
        bounds = (
            *((self.gt, operator.gt, ">"), (self.ge, operator.ge, "at least")),
            *((self.lt, operator.lt, "<"), (self.le, operator.le, "at most")),
        )
        given = [(bound, holds, words) for bound, holds, words in bounds if bound is not None]
        if all(holds(value, bound) for bound, holds, _ in given):
            return None
        return "but must be " + " and ".join(f"{words} {_plain(bound)}" for bound, _, words in given)


def _plain(bound: float) -> str:
    """Writes 1000000 instead of 1e+06."""
    return f"{int(bound)}" if bound == int(bound) and abs(bound) < 1e15 else f"{bound:g}"


ANY = Range()
COUNT = Range(ge=1, le=1_000_000)
"""Number of prompts, samples, processes, hosts or files per step or cluster."""
COUNT_OR_NONE = Range(ge=0, le=1_000_000)
STEPS = Range(ge=1, le=1_000_000_000)
STEPS_OR_NONE = Range(ge=0, le=1_000_000_000)
TOKENS = Range(ge=1, le=100_000_000)
TOKENS_OR_NONE = Range(ge=0, le=100_000_000)
EXECUTIONS = Range(ge=1, le=10_000_000)
"""Prompts times samples per prompt, in a step or an optimizer step."""
SECONDS = Range(ge=0.01, le=30 * 86_400.0)
"""A timeout: at least 10 ms, because shorter waits would always expire, and at most 30 days."""
SECONDS_OR_NONE = Range(ge=0, le=30 * 86_400.0)
FRACTION = Range(ge=0, le=1)
COEFFICIENT = Range(ge=0, le=1_000)
"""Coefficient of a loss or reward term."""
BOUND = Range(ge=0, le=1e9)
"""Bound on a ratio. Large values are allowed, because some users disable a bound that way."""
RATE = Range(ge=0, le=100)
PORT = Range(ge=1, le=65_535)
PORT_OR_FREE = Range(ge=0, le=65_535)
SEED = Range(ge=0, le=2**32 - 1)
"""Range of seeds that numpy accepts."""
WHOLE = Range(ge=0, le=2**31 - 1)
"""Default range of an engine's integer flags."""
WHOLE_OR_OFF = Range(ge=-1, le=2**31 - 1)
"""Like `WHOLE`, but also allows -1, which has a special meaning, such as off."""
REAL = Range(ge=0, le=1e12)

_MEGATRON: Mapping[str, Range] = {
    **dict.fromkeys(("lr", "min_lr", "lr_warmup_init", "decoupled_lr", "decoupled_min_lr"), RATE),
    **dict.fromkeys(("weight_decay", "start_weight_decay", "end_weight_decay"), COEFFICIENT),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "sgd_momentum", "muon_momentum"), Range(ge=0, lt=1)),
    "adam_eps": Range(gt=0, le=1),
    "muon_num_ns_steps": Range(ge=1, le=100),
    "muon_extra_scale_factor": Range(gt=0, le=1_000),
    **dict.fromkeys(("optimizer_offload_fraction", "lr_warmup_fraction", "rotary_percent"), FRACTION),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), Range(ge=0, lt=1)),
    "lr_warmup_iters": STEPS_OR_NONE,
    **dict.fromkeys(("lr_wsd_decay_iters", "lr_decay_iters", "train_iters"), STEPS),
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"), COUNT),
    **dict.fromkeys(("context_parallel_size", "expert_model_parallel_size"), COUNT),
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage"), COUNT),
    "mtp_loss_scaling_factor": COEFFICIENT,
    "inference_sampling_seed": SEED,
    "window_size": WHOLE_OR_OFF,
    "fp8_margin": Range(ge=-64, le=64),
    "glu_linear_offset": Range(ge=-1e6, le=1e6),
}
_SGLANG: Mapping[str, Range] = {
    "mem_fraction_static": Range(gt=0, lt=1),
    **dict.fromkeys(("swa_full_tokens_ratio", "tbo_token_distribution_threshold"), FRACTION),
    **dict.fromkeys(("speculative_accept_threshold_acc", "speculative_accept_threshold_single"), FRACTION),
    **dict.fromkeys(("context_length", "max_total_tokens", "max_prefill_tokens"), TOKENS),
    **dict.fromkeys(("chunked_prefill_size", "offload_group_size"), WHOLE_OR_OFF),
    **dict.fromkeys(("pp_size", "dp_size", "ep_size", "moe_dp_size", "attn_cp_size", "dcp_size"), COUNT),
    **dict.fromkeys(("max_running_requests", "stream_interval", "page_size", "cuda_graph_max_bs"), COUNT),
    **dict.fromkeys(("cuda_graph_bs", "cuda_graph_bs_decode", "cuda_graph_bs_prefill"), COUNT),
    **dict.fromkeys(("tokenizer_worker_num", "detokenizer_worker_num", "max_loras_per_batch"), COUNT),
    **dict.fromkeys(("watchdog_timeout", "soft_watchdog_timeout", "elastic_ep_scale_timeout"), SECONDS),
    "dist_timeout": SECONDS,
    "mamba_max_states_per_path": WHOLE_OR_OFF,
    "default_priority_value": Range(ge=-(2**31), le=2**31 - 1),
}
_ROUTER: Mapping[str, Range] = {
    "max_concurrent_requests": WHOLE_OR_OFF,
    **dict.fromkeys(("cache_threshold", "retry_jitter_factor"), FRACTION),
    **dict.fromkeys(("request_timeout_secs", "worker_startup_timeout_secs", "health_check_timeout_secs"), SECONDS),
}
_OF: Mapping[str, Mapping[str, Range]] = {"megatron": _MEGATRON, "sglang": _SGLANG, "router": _ROUTER}


def range_of(owner: str, dest: str, kind: str) -> Range:
    """Returns the range of an engine's flag; unbounded if the flag is not a number."""
    if dest in _OF[owner]:
        return _OF[owner][dest]
    base = kind.removesuffix("_or_json").removeprefix("human_")
    if base == "int":
        return PORT if dest.endswith("port") else WHOLE
    return REAL if base == "float" else Range()


Form = Callable[[str], "str | None"]
"""A check of a text value. Returns the problem, phrased to follow "NAME is TEXT, ", or None."""


def url_form(text: str) -> str | None:
    """Accepts an http or https URL."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        good = False
    return None if good and not re.search(r"\s", text) else "which is not a URL; use http://HOST:PORT"


def host_form(text: str) -> str | None:
    """Accepts an IP address or a host name."""
    if ip_of(text) is not None or (_HOST_NAME.fullmatch(text) and not text.rpartition(".")[2].isdecimal()):
        return None
    return "which is neither an IP address nor a host name; use one, such as 127.0.0.1"


_HOST_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.(?!-)[a-z0-9_-]{1,63})*\.?", re.IGNORECASE)


def refuse(problems: Sequence[str]) -> None:
    """Raises one `ConfigError` that lists all problems without duplicates. Does nothing for an empty list."""
    told = list(dict.fromkeys(problems))
    if len(told) == 1:
        raise ConfigError(told[0])
    if told:
        raise ConfigError(f"{len(told)} problems:" + "".join(f"\n  {i}. {text}" for i, text in enumerate(told, 1)))


DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "uint8": "uint8",
    "fp8": "uint8",
}
"""Spelling -> name of a dtype. Megatron stores fp8 moments as uint8."""


FIRST_PAGE = (
    *("Model", "Data", "Reward", "Batch", "Length", "Algorithm", "Learning rate", "Save and resume", "Evaluation"),
    *("Placement", "Run folder"),
)
"""The headings of the first page of --help, in order."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting and its spellings."""

    dest: str
    """Field name, unique per owner."""
    owner: str
    """slime, megatron, sglang or router."""
    names: tuple[str, ...]
    """Spellings with dashes, the preferred one first. For a `bool`, these switch it on."""
    kind: str
    """int, float, str, bool, json; human_int (SGLang's `4k`); dtype (torch's); int_or_json, float_or_json and
    str_or_json, which also take a list."""
    default: Any = None
    doc: str = ""
    group: str = ""
    """Heading in --help."""
    off_names: tuple[str, ...] = ()
    """Spellings that switch a `bool` off."""
    nargs: str | None = None
    """None: one value; "+" / "*": a list; "?": zero or one; a digit: a list of that length."""
    append: bool = False
    """Each occurrence adds one entry."""
    choices: tuple[Any, ...] | None = None
    limits: Range = ANY
    """Range of a number. For a registry entry's setting it is `ANY`; the chosen entry's range is checked later."""
    form: Form | None = None
    """Check for a text value."""
    of_strings: bool = False
    """The value is a JSON object with string values."""
    optional: bool = False
    """The word `none` is accepted as None."""
    required: bool = False
    derived: bool = False
    """slime computes the value if the user does not set one; --explain shows the reason."""
    secret: bool = False
    """Whether the value is masked wherever it is written. @FILE reads the value from a file."""
    may_be_empty: bool = False
    """Without a value, or with an empty one, the flag gives None: scripts pass variables that can be empty."""
    internal: bool = False
    """The run sets the value; there is no flag."""
    configs: tuple[str, ...] = ()
    """Megatron's config classes that have this field."""
    topic: str = ""
    """The word after --help that shows this flag with its group."""
    first: str = ""
    """The heading of the flag on the first page of --help, one of `FIRST_PAGE`; empty: not on that page."""

    @property
    def is_list(self) -> bool:
        return self.nargs in ("+", "*") or (self.nargs or "").isdigit()

    @property
    def of_model(self) -> bool:
        """Whether this is a Megatron flag for the model and its layers, as in the model files of launch scripts."""
        others = ("OptimizerConfig", "DistributedDataParallelConfig")
        return self.owner == "megatron" and not any(config in self.configs for config in others)


MOST_SECRET_BYTES = 65_536
"""Size limit of a file that holds a secret."""
MOST_KEY = 4096
"""Length limit of a key, in characters. Servers accept headers of 8 kB."""
_KEY = "api_key"
"""Secrets whose name ends in this suffix are sent as bearer tokens."""
FILE_MARK = "@"
"""Prefix that marks a value as the name of a file with the actual value."""


def shown(flag: Flag, value: Any) -> str:
    """Formats a value for a message; masks secrets."""
    return HIDDEN if flag.secret else shorten(repr(value), 200)


def _number(kind: str, text: str) -> Any:
    if kind in ("int", "float") and (not text.isascii() or "_" in text):  # int() and float() accept 1_0
        raise ValueError(text)
    if kind == "int":
        return int(text)
    if kind == "float":
        return float(text)
    if kind == "human_int":
        if not re.fullmatch(r"-?\d+|\d+(\.\d+)?[kKmMgGtT]", text):
            raise ValueError
        return text if text[-1].isalpha() else int(text)
    if kind == "dtype":
        return DTYPES[text.removeprefix("torch.")]
    raise AssertionError(f"unknown kind {kind!r}")


def _one(flag: Flag, text: str) -> Any:
    """Converts one argument. Raises `ValueError`, `KeyError` or a JSON error."""
    if flag.kind == "str":
        return text
    if flag.kind == "json":
        value = parse_json(text)
        if not isinstance(value, dict):
            raise ValueError(f"not an object: {text}")
        return value
    if flag.kind.endswith("_or_json"):
        base = flag.kind.removesuffix("_or_json")
        if text.lstrip().startswith(("[", "(")) or "," in text or "*" in text:
            return _list_or_pattern(text)
        return text if base == "str" else _number(base, text)
    return _number(flag.kind, text)


def _list_or_pattern(text: str) -> Any:
    """Parses a JSON list; keeps other text as is, such as Megatron's layer patterns (`([0]*3+[1])*8`)."""
    if "*" in text or "+" in text:
        return text
    return json.loads(text) if text.lstrip().startswith("[") and text.rstrip().endswith("]") else text


_WANTED: Mapping[str, str] = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "json": "a JSON object",
    "human_int": "an integer, such as 4096 or 4k",
    "dtype": f"one of {', '.join(sorted(set(DTYPES.values())))}",
    "int_or_json": "an integer or a JSON list",
    "float_or_json": "a number or a JSON list",
    "str_or_json": "text or a JSON list",
}
"""Kind of a flag -> description of its values, for messages."""


def convert(flag: Flag, text: str, *, where: str) -> Any:
    """Converts one command-line argument to a value, or to one element of a list. Raises `ConfigError`."""
    if flag.optional and not (flag.is_list or flag.append) and text.lower() == "none":
        return None
    if "\0" in text:
        raise ConfigError(f"{where} is {shown(flag, text)}, which contains a null character; remove it")
    if flag.secret and text.startswith(FILE_MARK):
        text = _read_secret(text.removeprefix(FILE_MARK), where=where)
    if flag.secret and flag.dest.endswith(_KEY):
        require_key(text, where)
    try:
        value = _one(flag, text)
    except Doubled as error:
        raise ConfigError(f"{where} is {shown(flag, text)}, in which {error}; keep one") from None
    except (ValueError, KeyError, RecursionError):
        raise ConfigError(f"{where} is {shown(flag, text)}, but must be {_WANTED[flag.kind]}") from None
    check_choice(flag, value, where=where)
    if flag.form is not None and (problem := flag.form(value)) is not None:
        raise ConfigError(f"{where} is {shown(flag, value)}, {problem}")
    check_strings(flag, value, where=where)
    numbers = [*value] if isinstance(value, list) else [value]
    if problem := next((found for number in numbers if (found := flag.limits.problem(number))), None):
        raise ConfigError(f"{where} is {shown(flag, value)}, {problem}; correct it or leave it out")
    return value


def require_key(text: str, where: str) -> None:
    """Raises `ConfigError` for a key that cannot be sent in an HTTP header."""
    if text.strip(" ") != text or not re.fullmatch(rf"[ -~]{{1,{MOST_KEY}}}", text):
        wrong = (
            f"{len(text)} characters, but may have at most {MOST_KEY} to fit into an HTTP header"
            if len(text) > MOST_KEY
            else "characters that an HTTP header cannot carry; use ASCII, without spaces at the ends"
        )
        raise ConfigError(f"{where}: the key has {wrong}")


def _read_secret(name: str, *, where: str) -> str:
    try:
        text = read_small(Path(name).expanduser(), MOST_SECRET_BYTES).decode().strip()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{where} is @{name}, which cannot be read: {reason}; pass a readable file") from None
    if not text:
        raise ConfigError(f"{where} is @{name}, an empty file; write the secret to it")
    return text


def check_choice(flag: Flag, value: Any, *, where: str) -> None:
    """Raises `ConfigError` if the flag has choices and `value` is not among them."""
    if flag.choices is not None and value not in flag.choices:
        near = nearest(str(value), map(str, flag.choices))
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(
            f"{where} is {shown(flag, value)}, but must be one of {', '.join(map(str, flag.choices))}{hint}"
        )


def check_strings(flag: Flag, value: Any, *, where: str) -> None:
    """Raises `ConfigError` if the flag needs a mapping of strings and `value` has other keys or values."""
    for name, one in value.items() if flag.of_strings and isinstance(value, dict) else ():
        if not isinstance(name, str) or not isinstance(one, str):
            wrong, good = (one, f'{json.dumps(str(name))}: "{one}"') if isinstance(name, str) else (name, '"NAME": ...')
            what = f"the value of {name}" if isinstance(name, str) else "a name"
            raise ConfigError(f"{where}: {what} is {shorten(repr(wrong), 80)}, which is not a string; write {good}")


def coerce(flag: Flag, value: Any, *, where: str) -> Any:
    """Converts a YAML value, with the same checks as on the command line. Raises `ConfigError`."""
    if value is None:
        if not flag.optional:
            raise ConfigError(f"{where} is null, but must be {_WANTED[flag.kind]}; set a value or leave it out")
        return None
    if flag.kind == "bool":
        if not isinstance(value, bool):
            raise ConfigError(f"{where} is {value!r}, but must be {_WANTED[flag.kind]}")
        return value
    if flag.is_list or flag.append:
        if not isinstance(value, list):
            raise ConfigError(f"{where} is {shown(flag, value)}, but must be a list; write [a, b]")
        return tuple(_coerce_one(flag, v, where=where) for v in value)
    return _coerce_one(flag, value, where=where)


def _coerce_one(flag: Flag, value: Any, *, where: str) -> Any:
    if flag.kind == "json" and isinstance(value, dict):
        check_strings(flag, value, where=where)
        return value
    if flag.kind.endswith("_or_json") and isinstance(value, list):
        return value
    wrong = value is None or isinstance(value, (bool, list, dict))
    wrong = wrong or (flag.kind == "str" and not isinstance(value, (str, int, float)))
    if wrong:
        raise ConfigError(f"{where} is {shown(flag, value)}, but must be {_WANTED[flag.kind]}")
    return convert(flag, str(value), where=where)
