"""An agent that searches before it answers, with OpenAI's SDK and a local index. The reward is the answer's F1.

    python -m examples.run agent_search

The index is BM25 (Robertson and Zaragoza, 2009) over passages about invented people, so only a search gives the answer.
To use your own passages, set `custom: {corpus: FILE}` in `--custom-config-path`; the file has one JSON object with
`text` per line. The example needs no network.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from examples.agent_openai_loop import client_of, solve
from slime.agent.execution import execution
from slime.core.sample import Sample
from slime.rewards.graders.answers import TokenF1, words
from slime.rollout.sample_metrics import count_tool_call, expect_tools

FLAGS = "--custom-generate-function-path examples.agent_search:generate"
NUM_FOUND = 2
K1, B = 1.2, 0.75
HOW = "Search before you answer, then answer in one word."
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Passages that hold these words.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]


def people() -> list[tuple[str, str, str]]:
    """Returns the names, towns and trades of invented people."""
    rng = random.Random(0)
    names = [f"{first} {last}" for first in ("Orla", "Bram", "Ines", "Tove") for last in ("Finch", "Moss", "Varga")]
    return [(n, rng.choice(["Tarn", "Hollin", "Skerry"]), rng.choice(["painter", "baker", "pilot"])) for n in names]


def rows() -> list[dict[str, Any]]:
    """Returns the dataset: questions about each person's town and trade."""
    asked = [(f"Where was {name} born?", town) for name, town, _ in people()]
    asked += [(f"What was the trade of {name}?", trade) for name, _, trade in people()]
    system = {"role": "system", "content": HOW}
    return [{"prompt": [system, {"role": "user", "content": question}], "label": label} for question, label in asked]


class Index:
    """A BM25 index over passages."""

    def __init__(self, passages: list[str]) -> None:
        self.passages = passages
        self.counts = [Counter(words(passage)) for passage in passages]
        self.mean = sum(count.total() for count in self.counts) / len(passages)
        held = Counter(word for count in self.counts for word in count)
        self.idf = {word: math.log(1 + (len(passages) - n + 0.5) / (n + 0.5)) for word, n in held.items()}

    def search(self, query: str) -> list[str]:
        """Returns the best passages that share a word with the query."""
        scores = [sum(self._score(word, count) for word in words(query)) for count in self.counts]
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[:NUM_FOUND]
        return [self.passages[i] for i in best if scores[i] > 0]

    def _score(self, word: str, count: Counter[str]) -> float:
        longer = K1 * (1 - B + B * count.total() / self.mean)
        return self.idf.get(word, 0.0) * count[word] * (K1 + 1) / (count[word] + longer)


@cache
def index(file: str | None) -> Index:
    """Returns the index of a file of passages, or of the invented passages."""
    if file:
        return Index([json.loads(line)["text"] for line in Path(file).read_text().splitlines()])
    return Index([f"{name}, a {trade}, was born in {town}." for name, town, trade in people()])


def search(found: Index, function: Any) -> str:
    """Returns the result of a tool call as text."""
    try:
        query = json.loads(function.arguments)["query"]
        return "\n".join(found.search(query)) if function.name == "search" else "error: no such tool"
    except (ValueError, KeyError, TypeError, AttributeError):
        return 'error: give {"query": "words"}'


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """`--custom-generate-function-path`: one session, one reward."""
    expect_tools(sample)
    found = index(getattr(args, "corpus", None))

    async def searched(call: Any) -> str:
        result = search(found, call.function)
        count_tool_call(sample, failed=result.startswith("error:"))
        return result

    async with execution(sampling_params) as agent, client_of(agent) as client:
        said = await solve(client, [dict(m) for m in sample.prompt], TOOLS, searched)  # type: ignore[arg-type]
        reward = TokenF1().grade(Sample(response=said, label=sample.label), 1.0)
        return agent.samples(sample, reward=reward)
