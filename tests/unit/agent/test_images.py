"""Laws of images in agents' conversations: an image may come in any turn, and a sample has those of its own path.

transformers' own processor and template are the oracle of ids and patches.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import anthropic
import numpy as np
import openai
import pytest
from PIL import Image

from slime.agent.chat import ModelChats
from slime.agent.messages import Message, Picture
from slime.agent.session import Session
from slime.agent.template import ConversationTemplate
from slime.core.errors import DataError
from slime.core.files import ImageFolder
from slime.core.sample import Sample
from slime.data import images as limits
from slime.data.chat import ChatRenderer
from slime.rollout.client.call import Generation
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.context import EXECUTION, Models, RolloutContext, RunningExecution, current, use
from slime.rollout.types import Chat, Progress
from tests.support.agent_histories import Player
from tests.support.agent_room import END, Room, agent_room
from tests.support.chat_templates import with_template
from tests.support.command_line import QWEN3_VL
from tests.support.vision import (
    CHATML_TEMPLATE,
    COLOURS,
    IMAGE,
    IMAGE_PROCESSOR,
    conversation_images,
    data_uri,
    drawn,
    published_processor,
    small_processor,
)

RED, BLUE = (drawn(40, 24, [COLOURS[name]]) for name in ("red", "blue"))
WIDE = drawn(56, 20, [COLOURS["green"], COLOURS["white"]])
TOOLS: Any = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]
PARAMS = {"temperature": 1.0, "max_new_tokens": 1000}
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@cache
def seeing_tokenizer() -> Any:
    return with_template("qwen3", CHATML_TEMPLATE)


def in_room(folder: Path, work: Callable[[Room], Awaitable[Any]], **settings: Any) -> Any:
    async def run() -> Any:
        async with agent_room(template=CHATML_TEMPLATE, image_folder=folder, **settings) as room:
            return await work(room)

    return asyncio.run(run())


def samples_of(room: Room) -> list[Sample]:
    return room.adapter.finish_session(room.key, Sample(index=0, group_index=0), reward=1.0)


# ---- the three APIs, with their own SDKs ---------------------------------------------------------------------------


async def over_chat(room: Room) -> None:
    shown: Any = {"type": "image_url", "image_url": {"url": data_uri(RED), "detail": "high"}}
    result: Any = [{"type": "text", "text": "Here:"}, {"type": "image_url", "image_url": {"url": data_uri(WIDE)}}]
    async with openai.AsyncOpenAI(base_url=f"{room.url}/v1", api_key=room.key, max_retries=0) as client:
        history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is "}, shown]}]
        for more in (lambda call: {"role": "tool", "tool_call_id": call, "content": result}, None):
            made = await client.chat.completions.create(model="m", messages=history, tools=TOOLS)
            message = made.choices[0].message
            history.append(message.model_dump(exclude_none=True))
            if more is not None and message.tool_calls:
                history.append(more(message.tool_calls[0].id))
        history.append({"role": "user", "content": [shown, {"type": "text", "text": "again?"}]})
        await client.chat.completions.create(model="m", messages=history, tools=TOOLS)


async def over_responses(room: Room) -> None:
    shown: Any = {"type": "input_image", "image_url": data_uri(RED), "detail": "auto"}
    tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
    output = [{"type": "input_text", "text": "Here:"}, {"type": "input_image", "image_url": data_uri(WIDE)}]
    async with openai.AsyncOpenAI(base_url=f"{room.url}/v1", api_key=room.key, max_retries=0) as client:
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "What is "}, shown]}]
        for number in range(2):
            made = await client.responses.create(model="m", input=items, tools=tools)
            items += [item.model_dump(exclude_none=True) for item in made.output]
            if not number:
                items.append({"type": "function_call_output", "call_id": items[-1]["call_id"], "output": output})
        items.append({"role": "user", "content": [shown, {"type": "input_text", "text": "again?"}]})
        await client.responses.create(model="m", input=items, tools=tools)


def claude_image(file: bytes) -> Any:
    data = base64.b64encode(file).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


async def over_messages(room: Room) -> None:
    tools: Any = [{"name": "look", "description": "", "input_schema": {"type": "object"}}]
    async with anthropic.AsyncAnthropic(base_url=room.url, api_key=room.key, max_retries=0) as client:
        asked = [{"type": "text", "text": "What is "}, claude_image(RED)]
        history: list[Any] = [{"role": "user", "content": asked}]
        for number in range(2):
            counted = await client.messages.count_tokens(model="m", messages=history, tools=tools)
            made = await client.messages.create(model="m", max_tokens=99, messages=history, tools=tools)
            assert counted.input_tokens == made.usage.input_tokens
            history.append({"role": "assistant", "content": [block.model_dump() for block in made.content]})
            if not number:
                content = [{"type": "text", "text": "Here:"}, claude_image(WIDE)]
                use = history[-1]["content"][-1]["id"]
                result = {"type": "tool_result", "tool_use_id": use, "content": content}
                history.append({"role": "user", "content": [result]})
        history.append({"role": "user", "content": [claude_image(RED), {"type": "text", "text": "again?"}]})
        await client.messages.create(model="m", max_tokens=99, messages=history, tools=tools)


def the_conversation() -> list[dict[str, Any]]:
    """What each of the functions above says, in transformers' form."""

    def opened(file: bytes) -> Any:
        return {"type": "image", "image": Image.open(io.BytesIO(file))}

    return [
        {"role": "user", "content": [{"type": "text", "text": "What is "}, opened(RED)]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": [{"type": "text", "text": "Here:"}, opened(WIDE)]},
        {"role": "assistant", "content": "Green."},
        {"role": "user", "content": [opened(RED), {"type": "text", "text": "again?"}]},
        {"role": "assistant", "content": "Red."},
    ]


@pytest.mark.parametrize("talk", [over_chat, over_responses, over_messages])
def test_a_conversation_has_the_ids_and_the_patches_of_transformers_own_processor(
    talk: Callable[[Room], Awaitable[None]], tmp_path: Path
) -> None:
    """Law: with images of a user and of a tool, in the first turn and later. The processor is the oracle."""

    async def work(room: Room) -> None:
        room.says(CALL, "Green.", "Red.")
        await talk(room)
        assert [len(body.get("image_data", ())) for body in room.model.requests] == [1, 2, 3]
        [sample] = samples_of(room)
        text = room.tokenizer.apply_chat_template(the_conversation(), tools=TOOLS, tokenize=False)
        files = [Image.open(io.BytesIO(file)) for file in (RED, WIDE, RED)]
        oracle = published_processor(room.tokenizer)(text=[text], images=files, return_tensors="np")
        ids = oracle["input_ids"][0].tolist()
        assert sample.tokens == ids[: len(sample.tokens)] and len(ids) - len(sample.tokens) == 1, "a line break"
        kept = [ImageFolder(tmp_path).read(digest) for digest in sample.images]
        patches, grids = small_processor(room.tokenizer).patches(kept)
        assert np.array_equal(patches, oracle["pixel_values"]) and np.array_equal(grids, oracle["image_grid_thw"])
        assert sample.images[0] == sample.images[2] != sample.images[1]
        assert room.adapter._template.images is not None and len(list(tmp_path.iterdir())) == 2
        assert sample.response.count(IMAGE) == 2, "the text has one placeholder for each image"

    in_room(tmp_path, work)


# ---- branches ------------------------------------------------------------------------------------------------------


def seeing_template(folder: Path, **kwargs: Any) -> ConversationTemplate:
    tokenizer = seeing_tokenizer()
    images = conversation_images(tokenizer, folder)
    chat = ChatRenderer(tokenizer, kwargs=kwargs, media_ids=[images.token_id, *images.other_ids])
    return ConversationTemplate(chat, [tokenizer.convert_tokens_to_ids(END)], images)


@pytest.mark.parametrize("kwargs", [{}, {"add_vision_id": True}])
def test_each_branch_has_the_images_of_its_own_history(kwargs: dict[str, Any], tmp_path: Path) -> None:
    """Law: in retries, edits, dropped histories and lost answers, also where the model samples a placeholder."""
    template, tokenizer = seeing_template(tmp_path, **kwargs), seeing_tokenizer()
    pictures = tuple(Picture(0, f"{number:032x}", num) for number, num in enumerate((1, 4, 6)))
    forks: Counter[str] = Counter()
    for seed in range(40):
        player = Player(template, tokenizer, len(tokenizer), seed, pictures=pictures)
        player.play(8)
        forks += player.check()
        assert player.refused <= 1, "a system message that begins in the middle"
    assert {"retry", "edited", "compaction", "sub-agent", "placeholder"} <= set(forks), forks
    assert "template" not in forks, forks


def test_an_image_that_is_numbered_keeps_its_number_in_a_long_conversation(tmp_path: Path) -> None:
    """Law: tokens are those of the whole conversation, though a template numbers its images."""
    template = seeing_template(tmp_path, add_vision_id=True)
    session, history = Session(template), list[Message]()
    for number in range(40):
        history.append(Message("user", f"{number}?", images=(Picture(0, f"{number:032x}", 2),)))
        opened = session.open_turn(history)
        history.append(Message("assistant", f"It is {number}."))
        ids = seeing_tokenizer().encode(f"It is {number}.{END}", add_special_tokens=False)
        session.end_turn(opened, history[-1], Generation(tuple(ids), (-1.0,) * len(ids), "stop", 1, ""))
    [branch] = session.branches
    text = seeing_tokenizer().decode(branch.readable(0, len(branch.tokens)))
    assert text + "\n" == template.chat.render([m.for_template() for m in history], add_generation_prompt=False).text
    assert "Picture 40: <|vision_start|><|image_pad|><|vision_end|>39?" in text


def test_a_sampled_placeholder_is_spelled_where_images_follow_it(tmp_path: Path) -> None:
    """Law: an engine would read it as an image. The old branch is trained; the new one has it in ordinary tokens."""

    async def work(room: Room) -> None:
        room.says(f"See {IMAGE}!", "Yes.", "Red.")
        image = room.tokenizer.convert_tokens_to_ids(IMAGE)
        async with openai.AsyncOpenAI(base_url=f"{room.url}/v1", api_key=room.key, max_retries=0) as client:
            history: list[Any] = [{"role": "user", "content": "What?"}]
            shown = [{"type": "image_url", "image_url": {"url": data_uri(RED)}}]
            for content in ("Sure?", shown, None):
                made = await client.chat.completions.create(model="m", messages=history)
                history += [made.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": content}]
        asked = [body["input_ids"].count(image) for body in room.model.requests]
        assert asked == [0, 1, 1], "text in the second request, and the image in the third"
        first, second = samples_of(room)
        assert (first.images, len(second.images)) == ([], 1)
        assert second.metadata["agent"]["branch"] == "placeholder"
        assert [sum(sample.loss_mask or ()) > 0 for sample in (first, second)] == [True, True]
        text = room.tokenizer.decode(second.tokens)
        assert text.startswith(room.tokenizer.decode(first.tokens)), "the same text in other ids"

    in_room(tmp_path, work)


# ---- the same image again, and what is refused -----------------------------------------------------------------------


def test_an_image_that_is_sent_again_is_decoded_once_and_is_the_same_in_another_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, read = conversation_images(seeing_tokenizer(), tmp_path), list[int]()
    monkeypatch.setattr(limits, "_read_within_limits", lambda content: read.append(len(content)) or real(content))
    first = images.of_uri(data_uri(RED))
    assert images.of_uri(data_uri(RED)) is first and len(read) == 1
    for mode, form, options in (
        ("RGB", "PNG", {"compress_level": 9}),
        ("RGBA", "PNG", {}),
        ("RGB", "BMP", {}),
        ("RGB", "WEBP", {"lossless": True}),
    ):
        out = io.BytesIO()
        Image.open(io.BytesIO(RED)).convert(mode).save(out, form, **options)
        assert images.of_bytes(out.getvalue()) == first, form
    assert images.of_pil(Image.open(io.BytesIO(RED))) == first == images.of_digest(first.digest)
    assert images.of_bytes(BLUE).digest != first.digest and len(list(tmp_path.iterdir())) == 2


real = limits._read_within_limits


def test_an_image_stands_upright_as_its_camera_says(tmp_path: Path) -> None:
    """Law: as with transformers' `load_image`."""
    from transformers.image_utils import load_image

    image, exif, out = Image.open(io.BytesIO(WIDE)), Image.Exif(), io.BytesIO()
    exif[limits.ORIENTATION] = 6
    image.save(out, "PNG", exif=exif)
    images = conversation_images(seeing_tokenizer(), tmp_path)
    for found in (images.of_bytes(out.getvalue()).digest, ImageFolder(tmp_path).put(limits.as_png(out.getvalue())[0])):
        kept = Image.open(io.BytesIO(ImageFolder(tmp_path).read(found)))
        assert kept.size == (20, 56)
        assert kept.tobytes() == load_image(data_uri(out.getvalue())).tobytes()


LARGE = io.BytesIO()
Image.new("1", (8192, 4097)).save(LARGE, "PNG")
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(evil) run\n%%EOF\n"
"""A program, which PIL would pass to Ghostscript."""
WRONG: dict[str, tuple[str, str]] = {
    "remote": ("https://example.org/a.png", "slime downloads no images"),
    "file": ("file:///etc/passwd", "slime downloads no images"),
    "not base64": ("data:image/png;base64,%%%", "is not valid base64"),
    "no base64": ("data:image/png,abc", "must begin like data:image/png;base64,"),
    "broken": (
        "data:image/png;base64,iVBORw0KGgo=",
        "these 8 bytes are not an image in PNG, JPEG, WEBP, GIF or BMP format",
    ),
    "eps": ("data:image/png;base64," + base64.b64encode(EPS).decode(), "bytes are not an image in PNG"),
    "cut": (data_uri(RED[:60]), "PIL cannot read these 60 bytes"),
    "large": (data_uri(LARGE.getvalue()), "has 8192 x 4097 pixels, but may have at most 33,554,432"),
    "long": (data_uri(drawn(1601, 8, [(0, 0, 0)])), "cannot read an image of 1601 x 8 pixels"),
}


def test_an_image_that_cannot_be_read_is_refused_in_the_shape_of_each_api(tmp_path: Path) -> None:
    """Law: HTTP 400 names the field and the reason; the conversation goes on without it."""

    async def work(room: Room) -> None:
        client = openai.AsyncOpenAI(base_url=f"{room.url}/v1", api_key=room.key, max_retries=0)
        claude = anthropic.AsyncAnthropic(base_url=room.url, api_key=room.key, max_retries=0)
        for uri, why in WRONG.values():
            part: Any = {"type": "image_url", "image_url": {"url": uri}}
            with pytest.raises(openai.BadRequestError) as chat:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": [part]}])
            said = chat.value.response.json()["error"]
            assert said["message"].startswith("messages[0].content[0].image_url.url: ") and why in said["message"], said
            item: Any = {"role": "user", "content": [{"type": "input_image", "detail": "auto", "image_url": uri}]}
            with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.content\[0\]\.image_url: "):
                await client.responses.create(model="m", input=[item])
            if uri.startswith("data:image/png;base64,"):
                source: Any = {"type": "base64", "media_type": "image/png", "data": uri.partition(",")[2]}
            else:
                source, why = {"type": "url", "url": uri}, "must be base64: slime downloads no images"
            block: Any = {"type": "image", "source": source}
            with pytest.raises(anthropic.BadRequestError) as claudes:
                await claude.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": [block]}])
            body = claudes.value.response.json()
            assert body["error"]["type"] == "invalid_request_error" and why in body["error"]["message"], body
        for role in ("system", "assistant"):
            shown: Any = {"role": role, "content": [{"type": "image_url", "image_url": {"url": data_uri(RED)}}]}
            asked: Any = {"role": "user", "content": "What?"}
            with pytest.raises(openai.BadRequestError, match="image"):
                await client.chat.completions.create(model="m", messages=[shown, asked])
        files: Any = [{"role": "user", "content": [{"type": "input_image", "detail": "auto", "file_id": "f"}]}]
        with pytest.raises(openai.BadRequestError, match="files are not stored; send image_url"):
            await client.responses.create(model="m", input=files)
        sound: Any = [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]
        with pytest.raises(openai.BadRequestError, match="because the model reads text and images only"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": sound}])
        assert not room.adapter.session(room.key).branches and not room.model.requests
        room.says("fine")
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "What?"}])

    in_room(tmp_path, work)


def test_images_are_read_where_agents_occupy_all_threads(tmp_path: Path) -> None:
    """Law: agents that wait for an answer in asyncio's threads do not keep their images from being read."""

    async def work(room: Room) -> None:
        loop, ended = asyncio.get_running_loop(), threading.Event()
        loop.set_default_executor(ThreadPoolExecutor(1))
        agent = loop.run_in_executor(None, ended.wait)
        room.says("Red.")
        shown = {"type": "image_url", "image_url": {"url": data_uri(RED)}}
        body, headers = {"messages": [{"role": "user", "content": [shown]}]}, {"Authorization": f"Bearer {room.key}"}
        try:
            async with (
                aiohttp.ClientSession(headers=headers) as client,
                client.post(f"{room.url}/v1/chat/completions", json=body) as answer,
            ):
                assert answer.status == 200
        finally:
            ended.set()
            await agent

    in_room(tmp_path, work)


# ---- current().chat --------------------------------------------------------------------------------------------------


def written_model(folder: Path, model_type: str | None = None) -> Path:
    """A checkpoint with the settings of a Qwen3-VL that has the room's tokenizer, or of another model."""
    folder.mkdir()
    config = {**QWEN3_VL, "image_token_id": seeing_tokenizer().convert_tokens_to_ids(IMAGE)}
    (folder / "config.json").write_text(json.dumps(config if model_type is None else {"model_type": model_type}))
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR))
    return folder


def in_chat(folder: Path, work: Callable[[Room, Chat], Awaitable[Any]], judge: Path | None = None, **args: Any) -> Any:
    """Runs `work` in an execution of a run with images, whose checkpoint has the room's tokenizer. `judge`: the
    checkpoint of a second model of that name.
    """
    tokenizer = seeing_tokenizer()
    model = written_model(folder / "model")
    settings = {"hf_checkpoint": str(model), "multimodal_keys": {}, "run_dir": str(folder), "agent_tool_format": None}
    settings |= {"agent_max_turns": 99, "apply_chat_template": False, **args}

    async def inside(room: Room) -> Any:
        room.client.chats = ModelChats(str(model), tokenizer, {})
        context = RolloutContext(
            args=SimpleNamespace(**settings),  # type: ignore[arg-type]
            client=room.client,
            tokenizer=tokenizer,
            graders=None,
            progress=Progress(),
            loop=asyncio.get_running_loop(),
            models=Models(default=room.client, judge=EngineClient(room.model.url)),
        )
        context.models["judge"].chats = ModelChats(str(judge), tokenizer, {})
        try:
            with use(context):
                EXECUTION.set(RunningExecution(PARAMS))
                return await work(room, current().chat)
        finally:
            await context.models["judge"].close()

    return in_room(folder / "images", inside)


def look() -> list[Any]:
    """Looks."""
    return ["Here:", Image.open(io.BytesIO(WIDE))]


def test_the_chat_has_the_samples_of_an_agent_over_http_that_shows_the_same(tmp_path: Path) -> None:
    """Law: a function of Python returns a PIL image, and messages have PIL images, bytes, paths or data URIs."""
    (tmp_path / "red.png").write_bytes(RED)
    forms = (Image.open(io.BytesIO(RED)), RED, tmp_path / "red.png", str(tmp_path / "red.png"), data_uri(RED))

    async def work(room: Room, chat: Chat) -> None:
        room.says(*[CALL, "Green.", "Red."] * (1 + len(forms)))
        await over_chat(room)
        [expected] = samples_of(room)
        for image in forms:
            assert room.client.chats is not None
            shown, chat = {"type": "image", "image": image}, room.client.chats.open(room.client, PARAMS)
            messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is "}, shown]}]
            reply = await chat.ask(messages, tools=TOOLS)
            messages += [reply.message, *await chat.run(reply, [look])]
            messages += [(await chat.ask(messages)).message]
            messages += [{"role": "user", "content": [shown, {"type": "text", "text": "again?"}]}]
            await chat.ask(messages)
            [sample] = chat.samples(Sample(index=0))
            assert (sample.tokens, sample.loss_mask) == (expected.tokens, expected.loss_mask)
            assert sample.images == expected.images
        assert [one["image_data"] for one in room.model.requests[:3]] == [
            one["image_data"] for one in room.model.requests[-3:]
        ]

    in_chat(tmp_path, work)


def test_what_is_no_image_is_an_error_of_the_chat(tmp_path: Path) -> None:
    async def work(room: Room, chat: Chat) -> None:
        for image, why in (
            (7, "must be a PIL image, bytes, a path or a data URI, but is int"),
            (None, "but is NoneType"),
            ("https://example.org/a.png", "slime downloads no images"),
            (tmp_path / "gone.png", "cannot be read"),
            (b"GIF89a?", "these 7 bytes are not an image in PNG"),
            (Image.new("1", (8192, 4097)), "has 8192 x 4097 pixels"),
        ):
            with pytest.raises(DataError, match=rf"^messages\[0\].content\[0\].image: .*{why}"):
                await chat.ask([{"role": "user", "content": [{"type": "image", "image": image}]}])
        with pytest.raises(DataError, match=r"image 00 of a sample is missing"):
            await chat.ask([{"role": "user", "content": [{"type": "image", "digest": "00"}]}])
        assert not room.model.requests

    in_chat(tmp_path, work)


QUESTION: list[Any] = [
    {"role": "user", "content": [{"type": "image", "image": RED}, {"type": "text", "text": "Is this red?"}]}
]


def test_a_judge_sees_images_with_its_own_processor_also_beside_a_policy_that_gets_none(tmp_path: Path) -> None:
    """Law: the judge's engine gets the picture, and ids with the placeholder of the judge's own checkpoint."""

    async def work(room: Room, chat: Chat) -> None:
        room.says("Yes.")
        reply = await current().models["judge"].chat(QUESTION)
        assert reply.text == "Yes."
        (asked,) = room.model.requests
        (uri,) = asked["image_data"]
        assert Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).tobytes() == as_rgb(RED)
        assert asked["input_ids"].count(room.tokenizer.convert_tokens_to_ids(IMAGE)) == 1
        assert reply.num_prompt_tokens == len(asked["input_ids"]) - 1 + room.model.processor.num_tokens(40, 24)

    in_chat(tmp_path, work, written_model(tmp_path / "judge"), multimodal_keys=None)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [("qwen3", "the model is text-only"), ("kimi_vl", "slime does not know how this model reads images")],
)
def test_a_judge_that_gets_no_images_says_why(tmp_path: Path, model_type: str, why: str) -> None:
    async def work(room: Room, chat: Chat) -> None:
        with pytest.raises(DataError, match=f"'image' is not supported, because {why}"):
            await current().models["judge"].chat(QUESTION)
        assert not room.model.requests

    in_chat(tmp_path, work, written_model(tmp_path / "judge", model_type))


def as_rgb(file: bytes) -> bytes:
    return Image.open(io.BytesIO(file)).convert("RGB").tobytes()


def test_an_image_for_a_run_without_images_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    """Law: of a tool's result, too; never dropped silently."""

    async def work(room: Room, chat: Chat) -> None:
        room.says(CALL)
        reply = await chat.ask("Look.", tools=TOOLS)
        with pytest.raises(DataError, match=r"the tool look returned an image, which .* set --multimodal-keys"):
            await chat.run(reply, [look])
        with pytest.raises(DataError, match="'image' is not supported, because this run has no images; set --multimod"):
            await chat.ask([{"role": "user", "content": [{"type": "image", "image": RED}]}])

    in_chat(tmp_path, work, multimodal_keys=None)
