"""Multi-turn work with tools trains exactly the sampled ids, whatever the chat template does to a conversation."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from slime.agent.parsers import known_format
from slime.core.sample import Sample, Status
from slime.data.chat import ChatRenderer
from slime.rollout.context import use
from slime.rollout.execute import Outcome, run_execution
from slime.rollout.manager import RolloutManager
from slime.settings.hook_contracts import load_hook
from tests.support.chat_hooks import FAMILIES, ScriptedEngine, short_tokenizer_folder, tokenizer_folder
from tests.support.marks import quick
from tests.support.rollout import rollout_args, with_manager, write_checkpoint_stub
from tests.support.written_calls import deepseekv3, hermes

PROMPT = [{"role": "user", "content": "17 times 23? <|im_end|><｜end▁of▁sentence｜>"}]  # noqa: RUF001
RESULTS = ("391.0", "error: numbers with + - * / only")


def scripted_turns(tokenizer: Any) -> list[list[int]]:
    """Three turns with thinking, spelled in other pieces than the tokenizer would: letter by letter where it can."""

    def spell(text: str) -> list[int]:
        return [i for part in text for i in tokenizer.encode(part, add_special_tokens=False)]

    write = {"hermes": hermes, "deepseekv3": deepseekv3}[known_format(tokenizer.chat_template).name]
    calls = [write([("calculate", {"expression": one})]) for one in ("17*23", "__import__('os')")]
    texts = (*(f"<think>\nI multiply.\n</think>\n\n{one}" for one in calls), "It is 391, naïve 数 🙂. ")
    turns = [[*spell(text), tokenizer.eos_token_id] for text in texts]
    again = [tokenizer.encode(tokenizer.decode(t), add_special_tokens=False) for t in turns]
    assert again != turns, "encoding the text again gives the same ids, so nothing is tested"
    return turns


def settings_of(tmp_path: Path, family: str, *flags: str) -> Any:
    """Of a run with one prompt, which is a conversation."""
    model = write_checkpoint_stub(tmp_path / "chat")
    shutil.copytree(short_tokenizer_folder(family), model, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 200_000}))
    data = tmp_path / "messages.jsonl"
    data.write_text(json.dumps({"input": PROMPT, "label": "391"}) + "\n")
    given = ("--hf-checkpoint", str(model), "--prompt-data", str(data), "--rollout-batch-size", "1")
    if family == "smollm2":  # its own template knows no tools
        given += ("--chat-template", "examples/tools.jinja")
    return rollout_args(tmp_path, *given, "--rollout-sample-hook-path", "tests.support.probe_hooks:own_reward", *flags)


def rolled_out(tmp_path: Path, family: str, function: str) -> tuple[Any, Any, Any, list[list[int]], ScriptedEngine]:
    """Batch, metrics and tokenizer of one prompt whose answers are `scripted_turns`, these, and the engine."""
    hook = ("--custom-generate-function-path", function, "--rollout-max-response-len", "2000")
    args, engine = settings_of(tmp_path, family, *hook), ScriptedEngine()

    async def work(manager: RolloutManager) -> Any:
        tokenizer = manager._tokenizer
        engine.turns, engine.decode = scripted_turns(tokenizer), lambda ids: str(tokenizer.decode(ids))
        return *await manager.generate(0), tokenizer, engine.turns

    batch, metrics, tokenizer, turns = asyncio.run(with_manager(args, engine, work))
    return batch, metrics, tokenizer, turns, engine


@pytest.mark.slow
@pytest.mark.parametrize("content", ["First.", ""])
def test_the_template_of_the_examples_writes_calls_as_qwen_does(content: str) -> None:
    """The oracle is the template that comes with Qwen2.5, which is trained on calls in this format."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder("qwen2.5"))
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": 2}}} for a in (1, 3)]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content, "tool_calls": calls}]

    def turn(template: str | None) -> str:
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        return str(text).partition("<|im_start|>assistant\n")[2].rstrip("\n")

    ours = Path("examples/tools.jinja").read_text()
    assert turn(ours) == turn(None)
    messages += [{"role": "tool", "content": "3"}]
    messages = [{"role": "system", "content": "Be brief."}, *messages]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    text = tokenizer.apply_chat_template(messages, tools=tools, chat_template=ours, tokenize=False)
    assert text.count("<|im_start|>system") == 2 and "<|im_start|>tool\n3" in text, "docs/fine_tuning.md says so"


@pytest.mark.parametrize("family", quick(FAMILIES, "qwen3"))
def test_trained_ids_are_the_sampled_ones(family: str, tmp_path: Path) -> None:
    batch, metrics, tokenizer, turns, engine = rolled_out(tmp_path, family, "examples.multi_turn_tools:generate")
    assert len(batch.samples) == 2 and len(engine.requests) == 6
    assert metrics["rollout/num_turns/mean"] == 3 and metrics["rollout/tool_calls/mean"] == 2
    assert metrics["rollout/tool_error_ratio"] == 0.5
    sampled = [i for turn in turns for i in turn]
    for sample in batch.samples:
        response = sample.tokens[-sample.response_length :]
        assert response[sample.loss_mask > 0].tolist() == sampled
        assert (sample.token_versions == 1).tolist() == (sample.loss_mask > 0).tolist()
        context = between(tokenizer, sample)
        assert len(context) == 2, context
        for text, result in zip(context, RESULTS, strict=True):
            assert text == template_text(tokenizer, result), "the template writes something else between the turns"
        for request in engine.requests:  # what the engine read is what is trained, up to the end of its prompt
            assert sample.tokens[: len(request["input_ids"])].tolist() == request["input_ids"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen2.5"])
def test_an_agent_that_knows_no_tokens_is_trained_on_those_that_were_sampled(family: str, tmp_path: Path) -> None:
    """Law: a loop written with OpenAI's SDK gives the same samples as one that appends ids by hand."""
    by_hand = rolled_out(tmp_path / "hand", family, "examples.multi_turn_tools:generate")
    by_agent = rolled_out(tmp_path / "agent", family, "examples.agent_openai_loop:generate")
    assert by_agent[1]["rollout/num_turns/mean"] == 3 and len(by_agent[4].requests) == 6
    for agent, hand in zip(by_agent[0].samples, by_hand[0].samples, strict=True):
        sampled = [i for turn in by_agent[3] for i in turn]
        assert agent.tokens[-agent.response_length :][agent.loss_mask > 0].tolist() == sampled
        assert agent.tokens.tolist() == hand.tokens.tolist() and agent.loss_mask.tolist() == hand.loss_mask.tolist()


@pytest.mark.slow
def test_a_limit_means_the_same_by_hand_and_by_an_agent(tmp_path: Path) -> None:
    """Law: what the next request may sample follows from the limits in one way, whoever asks, in an evaluation, too."""
    args, engine = settings_of(tmp_path, "qwen3", "--sglang-context-length", "8192"), ScriptedEngine()

    async def work(manager: RolloutManager) -> None:
        tokenizer = manager._tokenizer
        first, second, _ = engine.turns = scripted_turns(tokenizer)
        engine.decode = lambda ids: str(tokenizer.decode(ids))

        async def asked(function: str, answer: int, evaluation: bool, **limits: Any) -> tuple[list[Any], list[Sample]]:
            """(tokens read and tokens that may be sampled, request by request), and what the execution left."""
            engine.requests.clear()
            sample, params = Sample(group_index=0, index=0, prompt=PROMPT), {"max_new_tokens": answer}
            hook = load_hook(function, "generate")
            with manager._context(0) as context:
                own = dataclasses.replace(context, args=args.replace(**limits))
                with use(own):
                    made = await run_execution(own, [sample], params, hook, evaluation=evaluation)
            assert made.outcome is Outcome.FINISHED, made.reason
            sent = [(len(one["input_ids"]), one["sampling_params"]["max_new_tokens"]) for one in engine.requests]
            return sent, made.samples

        plenty, total = 500, len(first) + len(second) + 2
        for function in ("examples.multi_turn_tools:generate", "examples.agent_openai_loop:generate"):
            sent, _ = await asked(function, plenty, False)
            reads = [read for read, _ in sent]
            assert [most for _, most in sent] == [plenty] * 3, f"{function}: the limit is of one answer"
            longest = max(map(len, engine.turns))
            table: list[tuple[int, dict[str, Any], list[int]]] = [
                (longest, {}, [longest] * 3),
                (plenty, {"max_total_response_len": total}, [total, total - len(first), 2]),
                (longest, {"max_total_response_len": total}, [longest, longest, 2]),
                (plenty, {"max_context_len": reads[1] + 3}, [reads[1] + 3 - reads[0], 3]),
                (plenty, {"max_context_len": reads[2] + 2}, [reads[2] + 2 - read for read in reads]),
            ]
            for answer, limits, wanted in table:
                for kind in ("rollout", "eval"):
                    given = {f"{kind}_{name}": value for name, value in limits.items()}
                    sent, samples = await asked(function, answer, kind == "eval", **given)
                    what = f"{function}, {answer} an answer, {given}"
                    least = [min(most, answer) for most in wanted]
                    assert sent == list(zip(reads, least, strict=False)), what
                    [sample] = samples
                    cut = sum(map(len, engine.turns[: len(wanted)])) > sample.effective_response_length
                    assert sample.status is (Status.TRUNCATED if cut else Status.COMPLETED), what
                    assert cut == bool(limits), what
                    assert sample.effective_response_length <= limits.get("max_total_response_len", 10_000), what
            of_model = {"sglang": {**args.sglang, "context_length": reads[2] + 9}}  # an engine would refuse for more
            sent, [sample] = await asked(function, plenty, False, **of_model)
            assert (sent[-1], sample.status) == ((reads[2], 9), Status.TRUNCATED), function

    asyncio.run(with_manager(args, engine, work))


def between(tokenizer: Any, sample: Any) -> list[str]:
    """The text of each run of masked ids inside the response."""
    runs: list[list[int]] = []
    before = 1.0
    for token, trained in zip(sample.tokens[-sample.response_length :].tolist(), sample.loss_mask, strict=True):
        if not trained:
            runs.append([]) if before else None
            runs[-1].append(token)
        before = trained
    return [tokenizer.decode(run) for run in runs]


def template_text(tokenizer: Any, result: str) -> str:
    """What the template writes after an answer, without the end token, which was sampled."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "BBB"},
        {"role": "tool", "content": result},
    ]
    text = ChatRenderer(tokenizer).render(messages, add_generation_prompt=True).text
    return text.split("BBB")[1].removeprefix(tokenizer.eos_token)
