"""An adapter in front of a scripted engine that speaks SGLang's `/generate`: what agents are tested against."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from slime.agent.adapters import Adapter, AgentAdapter
from slime.agent.template import ConversationTemplate
from slime.data.chat import ChatRenderer
from slime.rollout.client.engine_client import REQUEST_SCOPE, EngineClient, RequestScope
from slime.rollout.context import RolloutContext, use
from slime.rollout.types import Progress
from tests.support.chat_hooks import short_tokenizer_folder
from tests.support.chat_templates import with_template
from tests.support.fake_engine import FakeEngine, serve
from tests.support.rollout import rollout_args, write_checkpoint_stub
from tests.support.vision import conversation_images, small_processor

END = "<|im_end|>"


@dataclass
class ScriptedModel(FakeEngine):
    """Says one text after the other, in the ids of a tokenizer, each with the end of a turn."""

    script: deque[str] = field(default_factory=deque)
    tokenizer: Any = None
    processor: Any = None
    """Says how many tokens an image has; None if requests have none."""

    async def _sample(self, body: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
        said = self.tokenizer.encode(self.script.popleft(), add_special_tokens=False)
        ids = [*said, self.tokenizer.convert_tokens_to_ids(END)]
        most = body["sampling_params"]["max_new_tokens"]
        ids = self._upto_stop(ids, body["sampling_params"].get("stop") or ())
        kept, sampled = ids[:most], self._sampled.get(body["rid"], [])
        for token in kept:
            if stop.is_set():
                kept = list(sampled)
                break
            sampled.append(token)
            if self.tick_s:
                await asyncio.sleep(self.tick_s)
        ended = "stop" if kept[-1:] == ids[-1:] else "length"
        finish = {"type": "abort" if stop.is_set() else ended}
        return {
            "text": self.tokenizer.decode([i for i in kept if i != ids[-1]]),
            "output_ids": kept,
            "meta_info": {
                "finish_reason": finish,
                "weight_version": self.weight_version,
                "prompt_tokens": len(body["input_ids"]) + self._num_unfolded(body),
                "cached_tokens": 0,
                "output_token_logprobs": [[-0.5, token, None] for token in kept],
            },
        }

    def _num_unfolded(self, body: dict[str, Any]) -> int:
        """How many placeholders an engine adds, which reads one for each image."""
        sizes = [Image.open(io.BytesIO(base64.b64decode(u.partition(",")[2]))).size for u in body.get("image_data", ())]
        if sizes:
            assert body["input_ids"].count(self.processor.token_id) == len(sizes)
        return sum(self.processor.num_tokens(*size) - 1 for size in sizes)

    def _upto_stop(self, ids: list[int], stops: Sequence[str]) -> list[int]:
        """As SGLang with `no_stop_trim`: the token that completes a stop string is the last."""
        for num in range(1, len(ids)):
            if any(stop in self.tokenizer.decode(ids[:num]) for stop in stops):
                return ids[:num]
        return ids


@dataclass
class Room:
    """What a test of an agent needs."""

    adapter: Adapter
    url: str
    key: str
    model: ScriptedModel
    client: EngineClient
    tokenizer: Any

    def says(self, *texts: str) -> None:
        """What the model will answer next."""
        self.model.script.extend(texts)

    @property
    def read(self) -> list[str]:
        """What the engine was given, request by request, as text."""
        return [self.tokenizer.decode(body["input_ids"]) for body in self.model.requests]


def turns_with_calls(call: str) -> str:
    """A chat template that writes tools, and a call `c` so."""
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ "
        "m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ).replace("CALL", call)


@asynccontextmanager
async def agent_room(
    *, family: str = "qwen3", template: str | None = None, image_folder: Path | None = None, **settings: Any
) -> AsyncIterator[Room]:
    """`template`: instead of the family's. `image_folder`: where images are stored; None: the model is text-only.
    `settings`: of the adapter.
    """
    tokenizer = with_template(family, template)
    model, images, media = ScriptedModel(tokenizer=tokenizer), None, list[int]()
    if image_folder is not None:
        model.processor, images = small_processor(tokenizer), conversation_images(tokenizer, image_folder)
        media = [images.token_id, *images.other_ids]
    chat = ChatRenderer(tokenizer, media_ids=media)
    conversations = ConversationTemplate(chat, [tokenizer.convert_tokens_to_ids(END)], images)
    async with serve(model):
        client = EngineClient(model.url)
        adapter = AgentAdapter(
            client,
            conversations,
            decode=lambda ids: str(tokenizer.decode(ids)),
            **{"sampling": {"temperature": 1.0, "max_new_tokens": 1000}, **settings},
        )
        url = await adapter.start()
        try:
            yield Room(adapter, url, adapter.open_session(), model, client, tokenizer)
        finally:
            await adapter.close()
            await client.close()


@asynccontextmanager
async def rollout(tmp_path: Path, *flags: str) -> AsyncIterator[tuple[Room, RolloutContext, RequestScope]]:
    """A scripted model, a rollout's context in front of it, and what ends the requests of its executions."""
    model = write_checkpoint_stub(tmp_path / "chat")
    shutil.copytree(short_tokenizer_folder("qwen3"), model, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 200_000}))
    args = rollout_args(tmp_path, "--hf-checkpoint", str(model), "--rollout-max-response-len", "900", *flags)
    async with agent_room() as room:
        loop, scope = asyncio.get_running_loop(), RequestScope()
        context = RolloutContext(args, room.client, room.tokenizer, None, Progress("rollout", 0, 1), loop)
        REQUEST_SCOPE.set(scope)
        with use(context):
            yield room, context, scope
