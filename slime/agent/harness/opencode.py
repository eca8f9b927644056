"""opencode, by npm's `opencode-ai`. It speaks OpenAI's chat completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from slime.agent.harness import Harness, Place


class OpenCodeHarness(Harness):
    """Without sharing or updates."""

    name = "opencode"
    package = "opencode-ai@1.18.33"

    def command(self, prompt: str, place: Place) -> Sequence[str]:
        return ("opencode", "run", "--model", f"slime/{place.model}", prompt)

    def files(self, place: Place) -> Mapping[str, str]:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "slime",
            "options": {"baseURL": f"{place.url}/v1", "apiKey": place.key},
            "models": {place.model: {"name": place.model}},
        }
        model = f"slime/{place.model}"
        settings = {"provider": {"slime": provider}, "model": model, "small_model": model}
        return {
            f"{place.home}/.config/opencode/opencode.json": json.dumps(
                {**settings, "autoupdate": False, "share": "disabled"}
            )
        }
