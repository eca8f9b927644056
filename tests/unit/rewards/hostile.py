"""User graders that misbehave; named by path in the tests."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import pickle
import resource
import threading
import time
from pathlib import Path
from typing import Any

from slime.core.sample import PER_TOKEN, Sample

ENDS = {"leave": SystemExit, "interrupt": KeyboardInterrupt, "cancel": asyncio.CancelledError}
"""What is meant to end more than a grading."""
LIMITS = ("AS", "FSIZE", "CORE")
NUM_TOGETHER = 40
together, meeting = threading.Barrier(NUM_TOGETHER), asyncio.Barrier(NUM_TOGETHER)


def act(args: Any, sample: Sample) -> Any:
    """Does what the response says."""
    match sample.response:
        case "hang":
            while True:
                time.sleep(1)
        case "stuck":  # in C, where no signal is looked at and no other thread runs
            return float(sum(itertools.repeat(0)))
        case "gate":  # until the test opens it
            while not Path(sample.metadata["gate"]).exists():
                time.sleep(0.01)
        case "meet":  # as many others as asked for
            folder = Path(sample.metadata["folder"])
            (folder / str(sample.index)).touch()
            while len(list(folder.iterdir())) < sample.metadata["num"]:
                time.sleep(0.01)
        case "raise":
            raise RuntimeError("as told")
        case "leave" | "interrupt" | "cancel" as name:
            raise ENDS[name]("as told")
        case "none":
            return None
        case "nan":
            return float("nan")
        case "huge":
            return {"x": "a" * 10_000_000}
        case "giant":
            return {"score": 1.0, "text": "a" * 2**30}
        case "memory":
            return float(len("a" * (8 << 30)))
        case "exit":
            os._exit(3)
        case "print":
            print("x" * 100_000, flush=True)
        case "garbage":
            for descriptor in range(3, 20):
                with contextlib.suppress(OSError):
                    os.write(descriptor, b"garbage" * 1000)
            time.sleep(1)
        case "flood":
            for descriptor in range(3, 20):
                with contextlib.suppress(OSError):
                    os.write(descriptor, b"flood" * 1_000_000)
        case "heir":
            leave_an_heir(Path(sample.metadata["heir"]), Path(sample.metadata["over"]))
            time.sleep(3600)
        case "environment":
            return {name: float(name in os.environ) for name in ("PATH", "WANDB_API_KEY", "HF_TOKEN", "JUDGE_KEY")}
        case "args":
            return float(args["seven"])
        case "search":  # for a text, in all that a function is given
            text = sample.metadata["text"]
            found = {"args": float(text.encode() in pickle.dumps(args)), "seen": float("lr" in args.megatron)}
            return {**found, "environment": float(any(text in value for value in os.environ.values()))}
    return 1.0


def leave_an_heir(heir: Path, over: Path) -> None:
    """A child outside the group that holds the pipes until `over` is there; it shows itself as `heir`."""
    if os.fork() == 0:
        os.setsid()
        heir.touch()
        end = time.monotonic() + 600
        while not over.exists() and time.monotonic() < end:
            time.sleep(0.05)
        os._exit(0)


def limits(args: Any, sample: Sample) -> dict[str, float]:
    """Those of this process; with a file to count the tries in, it ends itself."""
    if sample.metadata:
        with open(sample.metadata["file"], "a") as file:
            file.write("x")
        os._exit(3)
    return {name: float(resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]) for name in LIMITS}


def judge(args: Any, sample: Sample) -> float:
    """Notes what it was told, and scores only what is a number."""
    sample.metadata["judge"] = sample.response
    if sample.response == "unkeepable":
        sample.metadata["judge"] = {1, 2}
    if sample.response == "endless":
        sample.metadata["judge"] = "a" * 100_000
    return float(sample.response)


def judge_all(args: Any, samples: list[Sample]) -> list[float]:
    """The same for a group, but for its first sample."""
    return [0.0, *(judge(args, sample) for sample in samples[1:])]


async def act_async(args: Any, sample: Sample) -> Any:
    """The same, waiting on the event loop."""
    if sample.response == "hang":
        await asyncio.sleep(3600)
    if sample.response == "block":
        time.sleep(3600)
    if sample.response in ENDS:
        return act(args, sample)
    if sample.response == "meet":
        await meeting.wait()
    await asyncio.sleep(0.2)
    return {"score": 0.5}


async def act_in_thread(args: Any, sample: Sample) -> float:
    """Blocks in a thread until so many others do."""
    await asyncio.to_thread(together.wait)
    return 1.0


def group(args: Any, samples: list[Sample]) -> list[float]:
    """Rank of the response length; one too few for a group of three."""
    lengths = [float(len(s.response)) for s in samples]
    return lengths[:-1] if len(lengths) == 3 else lengths


def group_with_gap(args: Any, samples: list[Sample]) -> list[float | None]:
    """No reward for the first sample of the group."""
    return [None, *(float(s.index or 0) for s in samples[1:])]


def show(args: Any, sample: Sample) -> dict[str, str]:
    """What it sees of a sample, and whether its numbers are Python's own."""
    numbers = {name: getattr(sample, name) for name in PER_TOKEN}
    kinds = {name: sorted({type(n).__name__ for n in values or ()}) for name, values in numbers.items()}
    lists = all(values is None or type(values) is list for values in numbers.values())
    seen = json.dumps({**sample.to_dict(), "lists": lists, "kinds": kinds}, sort_keys=True)
    return {"seen": hashlib.sha256(seen.encode()).hexdigest()}
