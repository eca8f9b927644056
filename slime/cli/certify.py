"""`slime certify`: measures whether trainer and engines agree, whether runs are reproducible, and what both cost.

    slime certify --hf-checkpoint DIR [--steps 5] [--json FILE] [flags of the run, e.g. its layout]

It executes three short runs on generated prompts with a reward that depends only on the sampled tokens:

- exact: with `--true-on-policy` if the model and the flags allow it, and with `--deterministic-mode`. On a GPU, engines
  sample with a seed per execution (`--sglang-enable-deterministic-inference`).
- again: with the flags of exact. On a CPU, where SGLang cannot sample with seeds, it trains on the samples of the first
  run.
- plain: without these flags, to measure what they cost.

The mismatch is the largest difference between the log-probs of trainer and engine. Two runs are equal if all samples,
all training metrics, the exported weights, and in every step the weights and optimizer states of all ranks
(`train/state_digest`) are bitwise equal. The exit code is 1 if the mismatch of an exact
run is not 0, or if the two runs differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError, SlimeError
from slime.core.text import slime_command
from slime.observability.run_folder import host_facts, versions
from slime.settings.command_line import flag_value, parse_args
from slime.settings.flag_parser import OVERRIDE

MISMATCH = "train/train_rollout_logprob_abs_diff"
DEFAULTS: Mapping[str, str] = {
    "rollout_batch_size": "8",
    "n_samples_per_prompt": "8",
    "rollout_max_response_len": "256",
    "lr": "1e-6",
    "lr_decay_style": "constant",
}
"""Setting -> its value in the three runs if the command line does not set it."""
NUM_PROMPTS = 1024


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --hf-checkpoint DIR [--steps N] [--json FILE] [--keep DIR] [flags of the run]"
    parser.add_argument("--steps", type=int, default=5, help="steps of each run (default 5; 3 or more)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--keep", type=Path, help="keep the three run folders in this folder")


def run(options: argparse.Namespace) -> int:
    """Executes the runs and prints the certificate. Raises `ConfigError` for settings that no run accepts."""
    if options.steps < 3:
        raise ConfigError(f"--steps is {options.steps}, but the first step is not timed; use 3 or more")
    if options.keep is None:
        with tempfile.TemporaryDirectory(prefix="slime-certify-") as folder:
            return _certify(Path(folder), options)
    options.keep.mkdir(parents=True, exist_ok=True)
    return _certify(options.keep.resolve(), options)


def _certify(folder: Path, options: argparse.Namespace) -> int:
    _write_prompts(folder / "prompts.jsonl")
    words = [*options.words, *_added(options, folder)]
    args = parse_args(words)
    exact = ["--deterministic-mode", "--log-state-digest", "--mismatch-limit", "1e9"]
    reason = _why_not_exact([*words, "--true-on-policy"])
    exact += [] if reason else ["--true-on-policy"]
    triton = reason is None or args.sglang.get("attention_backend") == "triton"
    replayed = args.device != "cuda" or not triton
    exact += [] if replayed else ["--sglang-enable-deterministic-inference"]
    first = _run(folder / "exact", [*words, *exact])
    replay = ["--load-debug-rollout-data", str(folder / "exact" / "rollouts" / "{rollout_id}.jsonl.zst")]
    again = _run(folder / "again", [*words, *exact, *(replay if replayed else ())], recorded=not replayed)
    plain = _run(folder / "plain", words)
    found = _figures(first, again, plain, replayed=replayed, reason=reason)
    found |= {"command": ["slime", "certify", *options.words], "versions": versions(), "host": host_facts()}
    print(_told(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found["repeats"] and (reason or found["exact"]["mismatch_max"] == 0.0) else 1


def _added(options: argparse.Namespace, folder: Path) -> list[str]:
    """Flags of all three runs."""
    given = options.words
    chosen = {name: value for name, value in DEFAULTS.items() if flag_value(given, name) is None}
    own = {
        "prompt_data": str(folder / "prompts.jsonl"),
        "input_key": "prompt",
        "num_rollout": str(options.steps),
        "custom_rm_path": "slime.cli.certify:reward_of",
        "save_interval": str(options.steps),
        "save_hf": str(folder / "hf"),
    }
    flags = [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", value)]
    return [*flags, OVERRIDE, *(w for name, value in own.items() for w in (f"--{name.replace('_', '-')}", value))]


def _write_prompts(path: Path) -> None:
    rows = (
        {"prompt": f"Question {n}: how much is {n * 37 % 101} + {n * 53 % 211}? Answer:"} for n in range(NUM_PROMPTS)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


async def reward_of(_args: Any, sample: Any, **_: Any) -> float:
    """A reward that looks random but depends only on the sampled tokens."""
    tokens = sample.tokens[len(sample.tokens) - sample.response_length :]
    return float(sum(int(token) * (i + 1) for i, token in enumerate(tokens)) % 2)


def _why_not_exact(words: Sequence[str]) -> str | None:
    try:
        parse_args(list(words))
    except ConfigError as error:
        lines = [line for line in str(error).splitlines() if "true" in line.replace("-", "_")]
        if not lines:
            raise
        return lines[0].strip()
    return None


@dataclass(frozen=True, slots=True)
class _Run:
    steps: list[dict[str, float]]
    samples: str
    """A digest of all sampled tokens, log-probs and rewards."""
    weights: str
    """A digest of the exported weights."""


def _run(folder: Path, words: Sequence[str], *, recorded: bool = True) -> _Run:
    """Executes one run. Raises `SlimeError` with the end of its log if it fails."""
    outputs = [OVERRIDE, "--run-dir", str(folder), "--save-hf", str(folder / "hf")]
    if recorded:
        outputs += ["--save-debug-rollout-data", str(folder / "rollouts" / "{rollout_id}.jsonl.zst")]
    log = folder.with_suffix(".log")
    print(f"{folder.name}: {slime_command('train')} ... ({log})", file=sys.stderr, flush=True)
    with log.open("w") as file:
        command = [sys.executable, "-m", "slime", "train", *words, *outputs]
        code = subprocess.run(command, stdout=file, stderr=file, check=False).returncode
    if code:
        raise SlimeError(f"the run {folder.name!r} failed (exit code {code}):\n{log.read_text()[-3000:]}")
    return _Run(_steps_of(folder), _digest_of_samples(folder / "rollouts"), _digest(folder / "hf", "*.safetensors"))


def _steps_of(folder: Path) -> list[dict[str, float]]:
    steps: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for axis in ("rollout/step", "train/step"):
            if axis in row:
                steps.setdefault(int(row[axis]), {}).update(row)
    return [steps[step] for step in sorted(steps)]


def _digest(folder: Path, pattern: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob(pattern)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _digest_of_samples(folder: Path) -> str:
    """Digest of the samples in order, without request ids and times."""
    from slime.rollout.recordings import load_rollout

    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.jsonl.zst")):
        samples = [sample for group in load_rollout(path)[1] for sample in group]
        for sample in sorted(samples, key=lambda s: s.index or 0):
            digest.update(repr((sample.index, sample.tokens, sample.rollout_log_probs, sample.reward)).encode())
    return digest.hexdigest()


def _figures(first: _Run, again: _Run, plain: _Run, *, replayed: bool, reason: str | None) -> dict[str, Any]:
    differ = [
        f"{name} of step {step}"
        for step, (a, b) in enumerate(zip(first.steps, again.steps, strict=True))
        for name in sorted(a.keys() | b.keys())
        if name.startswith("train/") and a.get(name) != b.get(name)
    ]
    differ += [] if replayed or first.samples == again.samples else ["the samples"]
    differ += [] if first.weights == again.weights else ["the exported weights"]
    speeds = {name: _speed(run.steps) for name, run in (("exact", first), ("plain", plain))}
    return {
        "true_on_policy": reason is None,
        "why_not": reason,
        "repeats": not differ,
        "differ": differ,
        "replayed": replayed,
        "exact": {**_mismatch(first.steps), **speeds["exact"]},
        "plain": {**_mismatch(plain.steps), **speeds["plain"]},
        "speed": {name: speeds["exact"][name] / speeds["plain"][name] for name in speeds["exact"]},
    }


def _mismatch(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {
        "mismatch_max": max(step[f"{MISMATCH}_max"] for step in steps),
        "mismatch_mean": sum(step[f"{MISMATCH}_current"] for step in steps) / len(steps),
        "num_tokens": sum(step["rollout/response_tokens"] for step in steps),
    }


def _speed(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Response tokens per second, excluding the first step, which compiles kernels."""
    timed = steps[1:]
    tokens = sum(step["rollout/response_tokens"] for step in timed)
    names = {"train_tokens_per_s": "perf/train_time", "generate_tokens_per_s": "perf/rollout_time"}
    return {name: tokens / sum(step[of] for step in timed) for name, of in names.items()}


def _told(found: Mapping[str, Any]) -> str:
    """The certificate as a table."""
    exact, plain = found["exact"], found["plain"]
    again = "the second run trained on the same samples" if found["replayed"] else "the second run sampled again"
    repeats = f"bitwise equal ({again})" if found["repeats"] else f"NOT equal: {', '.join(found['differ'][:5])}"
    title = "exact" if found["true_on_policy"] else "deterministic"
    lines = [
        f"{'':28}{title:>16}{'plain':>16}",
        *(
            f"{label:28}{exact[name]:>16.6g}{plain[name]:>16.6g}{_share(found, name)}"
            for label, name in (
                ("worst mismatch (nats)", "mismatch_max"),
                ("mean mismatch (nats)", "mismatch_mean"),
                ("compared tokens", "num_tokens"),
                ("trained tokens/s", "train_tokens_per_s"),
                ("generated tokens/s", "generate_tokens_per_s"),
            )
        ),
        f"two runs: {repeats}",
    ]
    return "\n".join([*lines, *([f"not exact: {found['why_not']}"] if found["why_not"] else [])])


def _share(found: Mapping[str, Any], name: str) -> str:
    return f"   {found['speed'][name]:.2f} of plain" if name in found["speed"] else ""
