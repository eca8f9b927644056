"""Cost of the Data Buffer with a large batch of long responses: memory, checkpoint size, and times to write and read.

    python -m benchmarks.buffer --output benchmarks/results/buffer.json

Responses have random ids, float32 log-probs as engines send them, and texts of words with an English-like distribution,
four characters per token. Bytes are per response token. Memory is the increase of the process after it has returned
unused pages to the system. Loading is measured for the state alone (`load`), and with all groups (`read`), which
training needs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from slime.buffer.data_buffer import DataBuffer
from slime.core.batch import TrainBatch, TrainSample
from slime.core.sample import Group

VOCAB, CHARACTERS_PER_TOKEN = 151_000, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16 * 1024)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    words = _words(random.Random(0))
    rng = np.random.default_rng(0)
    before = _resident()
    buffer = DataBuffer(None, n_samples_per_prompt=options.samples)
    began = time.perf_counter()
    for i in range(options.groups):
        (group,) = buffer.get_groups(1)
        _answer(group, options.tokens, rng, words)
        buffer.put_finished(group)
        del group
        print(f"\r{i + 1} of {options.groups} groups", end="", file=sys.stderr)
    filled_s = time.perf_counter() - began
    num_tokens = options.groups * options.samples * options.tokens
    result = {
        "command": " ".join(["python", "-m", "benchmarks.buffer", *sys.argv[1:]]),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "tokens": num_tokens,
        "made_s": round(filled_s, 1),
        "resident_bytes_per_token": round((_resident() - before) / num_tokens, 2),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data_buffer.json"
        began = time.perf_counter()
        write = buffer.begin_save(path)
        taken_s = time.perf_counter() - began
        write()
        result |= {"taken_s": round(taken_s, 3), "saved_s": round(time.perf_counter() - began, 1)}
        size = sum(one.stat().st_size for one in Path(folder).iterdir())
        result["checkpoint_bytes_per_token"] = round(size / num_tokens, 2)
        del buffer
        resumed = DataBuffer(None, n_samples_per_prompt=options.samples)
        began = time.perf_counter()
        resumed.load(path)
        result["loaded_s"] = round(time.perf_counter() - began, 2)
        groups = [record.group() for record in resumed.take_finished(options.groups)]
        result["read_s"] = round(time.perf_counter() - began, 1)
        began = time.perf_counter()
        samples = tuple(TrainSample.from_sample(s, reward=1.0) for group in groups for s in group.samples)
        batch = TrainBatch(0, samples)
        result["batch_s"] = round(time.perf_counter() - began, 1)
        assert len(batch.samples) == options.groups * options.samples
    text = json.dumps(result, indent=1)
    print(f"\n{text}")
    if options.output:
        options.output.write_text(text + "\n")


def _answer(group: Group, length: int, rng: np.random.Generator, words: list[str]) -> None:
    for sample in group.samples:
        sample.tokens = rng.integers(0, VOCAB, 512).tolist()
        log_probs = (-rng.exponential(0.5, length)).astype(np.float32)
        start = int(rng.integers(0, len(words) // 2))
        sample.append_response_tokens(
            rng.integers(0, VOCAB, length).tolist(),
            log_probs=log_probs.tolist(),
            weight_version=3,
            text=" ".join(words[start : start + length])[: length * CHARACTERS_PER_TOKEN],
            finish_reason="stop",
        )
        sample.reward = 1.0


def _words(rng: random.Random) -> list[str]:
    """Returns a long text in which few words are frequent and many are rare."""
    known = ["".join(rng.choices("etaoinshrdlucmfwyp", k=rng.randint(2, 9))) for _ in range(20_000)]
    weights = [1.0 / rank for rank in range(1, len(known) + 1)]
    return rng.choices(known, weights, k=200_000)


def _resident() -> int:
    """Returns the resident bytes of this process after it has returned unused pages to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()
