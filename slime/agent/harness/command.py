"""Any command line: a program that reads a base URL and a key from its environment, as the SDKs do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime.agent.harness import Harness, Place


@dataclass(frozen=True)
class CommandHarness(Harness):
    """`words` are the command; the prompt stands for `{prompt}` in them, or at the end."""

    name = "command"
    words: tuple[str, ...] = ()

    def command(self, prompt: str, place: Place) -> Sequence[str]:
        if any("{prompt}" in word for word in self.words):
            return tuple(word.replace("{prompt}", prompt) for word in self.words)
        return (*self.words, prompt)

    def environment(self, place: Place) -> Mapping[str, str]:
        return {
            "OPENAI_BASE_URL": f"{place.url}/v1",
            "OPENAI_API_KEY": place.key,
            "ANTHROPIC_BASE_URL": place.url,
            "ANTHROPIC_API_KEY": place.key,
            "SLIME_MODEL": place.model,
        }
