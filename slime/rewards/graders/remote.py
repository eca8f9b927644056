"""Remote reward: POSTs prompt, response, label and metadata as JSON to `--rm-url`; the answer is the reward.

The service answers a number, or an object: with `reward` or `score` alone that number, otherwise the whole object.
Connection errors and 429 or 5xx are tried again with a growing pause until the pool's limit; other 4xx are not.
"""

from __future__ import annotations

import asyncio
from typing import Any

from slime.core.errors import ConfigError, EngineError
from slime.core.sample import Sample
from slime.rewards.graders import GraderOptions

RETRY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0


def reward_of(answer: Any) -> Any:
    """A lone `reward` or `score` is unwrapped; all else stays as the service gave it."""
    if isinstance(answer, dict) and len(answer) == 1:
        return next((answer[key] for key in ("reward", "score") if key in answer), answer)
    return answer


async def grade(sample: Sample, options: GraderOptions) -> Any:
    """Returns the service's reward. Raises `EngineError` if it refuses; retries end with the pool's time limit."""
    import aiohttp

    if not options.rm_url:
        raise ConfigError("got --rm-type remote_rm without an address; set --rm-url")
    payload = {
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "metadata": sample.metadata,
    }
    timeout = aiohttp.ClientTimeout(total=options.timeout_s)
    pause_s = FIRST_PAUSE_S
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            try:
                async with session.post(options.rm_url, json=payload) as response:
                    if response.status == 200:
                        return reward_of(await response.json(content_type=None))
                    if response.status not in RETRY_STATUSES:
                        text = (await response.text())[:200]
                        raise EngineError(f"the reward service answered {response.status}: {text}")
            except aiohttp.ClientConnectionError:
                pass  # a restarting service: try again until the pool's limit
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
