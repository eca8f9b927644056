"""Plausible mistakes of a first day, as a table: the flags that differ from a command line that works, and the remedy.

`{name}` in a flag is a file or folder that `write_mistakes` makes. They go before those of the command line that works.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

TEMPLATE_WITHOUT_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class Mistake:
    """One row."""

    what: str
    flags: str
    """Appended to the command line that works."""
    remedies: tuple[str, ...]
    """All of these stand in the one message."""
    quick: bool = False
    """Tried by `make test` too; the others prove more of the same."""
    script: str = "train.py"


MISTAKES = (
    Mistake("the wrong input key", "--input-key prompt", ("'prompt'", "to one of input, label"), quick=True),
    Mistake("the wrong label key", "--label-key answer", ("'answer'", "--label-key to one of input, label")),
    Mistake("no label for a grader", "--label-key none", ("math", "--label-key to one of input, label")),
    Mistake("a CSV file", "--prompt-data {csv}", ("read_csv", ".parquet")),
    Mistake("a JSON array", "--prompt-data {json}", ("one JSON object per line", ".jsonl")),
    Mistake("rows that are no objects", "--prompt-data {strings}", ("each row as one JSON object",)),
    Mistake("an empty file", "--prompt-data {empty}", ("no rows", "correct the file")),
    Mistake("no such file", "--prompt-data nowhere.jsonl", ("does not exist", "pass a .jsonl or .parquet file")),
    Mistake("messages that nothing renders", "--prompt-data {messages}", ("add --apply-chat-template",)),
    Mistake("a base model", "--hf-checkpoint {base_model} --apply-chat-template", ("--chat-template FILE",)),
    Mistake("weights alone", "--hf-checkpoint {weights} --apply-chat-template", ("tokenizer.json", "whole checkpoint")),
    Mistake(
        "a template that refuses the messages",
        "--hf-checkpoint {no_system} --prompt-data {messages} --apply-chat-template",
        ("System role not supported",),
    ),
    Mistake("a prompt limit too low", "--rollout-max-prompt-len 2", ("shortest has 3 tokens", "raise that limit")),
    Mistake(
        "prompts longer than the context",
        "--prompt-data {long}",
        ("too long", "the model's context of 1024 minus a response of 8", "shorten the prompts"),
    ),
    Mistake(
        "a task with a base model",
        "--hf-checkpoint {base_model} --apply-chat-template --prompt-data rg:spell_backward",
        ("--chat-template FILE",),
    ),
    Mistake(
        "a task's messages that nothing renders",
        "--prompt-data rg:spell_backward?system=simple",
        ("its prompts are messages", "add --apply-chat-template"),
    ),
    Mistake(
        "a template that is not Jinja",
        "--apply-chat-template --chat-template {broken}",
        ("broken.jinja is not valid Jinja (line 2", "correct it"),
    ),
    Mistake(
        "a prompt limit for conversations",
        "--loss-type sft_loss --rollout-max-prompt-len 64 --prompt-data {talks}",
        ("rollout_max_prompt_len 64 cannot be applied", "drop that limit"),
    ),
    Mistake(
        "fine-tuning on text", "--loss-type sft_loss --prompt-data {texts}", ("column of message lists", "--input-key")
    ),
    Mistake(
        "nothing to learn from",
        "--loss-type sft_loss --prompt-data {messages}",
        ("can be trained; add an assistant message",),
    ),
    Mistake("a GPU that is not there", "--device cuda", ("--device cpu",)),
    Mistake(
        "more ranks than cores",
        "--actor-num-gpus-per-node 4096 --global-batch-size 4",
        ("cores", "--actor-num-gpus-per-node"),
    ),
    Mistake(
        "a response beyond the context", "--rollout-max-response-len 4096", ("1024 tokens", "lower --rollout-max-")
    ),
    Mistake("two lengths of the run", "--num-epoch 3", ("num_rollout 1", "set only one of the two")),
    Mistake("a used run folder", "--run-dir {used}", ("choose a new --run-dir", "--load"), quick=True),
    Mistake("TRL's learning rate", "--learning-rate 1e-5", ("use --lr",)),
    Mistake(
        "names of TRL, several",
        "--num-generations 8 --model m --use-lora --max_completion_length 16",
        ("--n-samples-per-prompt", "--hf-checkpoint", "--lora-rank", "--rollout-max-response-len"),
    ),
    Mistake("settings as verl writes them", "actor_rollout_ref.actor.optim.lr=1e-6", ("use --lr",)),
    Mistake("a misspelt flag", "--rollout-batchsize 4", ("did you mean --rollout-batch-size?",)),
    Mistake("a negative learning rate", "--lr -1e-5", ("--lr is -1e-05", "at least 0")),
    Mistake("a word for a number", "--lr fast", ("--lr is 'fast', but must be a number",)),
    Mistake(
        "a hub name", "--hf-checkpoint Qwen/Qwen3-0.6B", ("config.json does not exist", "hf download Qwen/Qwen3-0.6B")
    ),
    Mistake("an unknown grader", "--rm-type maths", ("maths", "math")),
    Mistake("a function that is not in its file", "--custom-rm-path {hook}:rewrad", ("--custom-rm-path", "rewrad")),
    Mistake("a batch that does not divide", "--global-batch-size 3", ("change one of the three",)),
    Mistake("one sample per prompt", "--n-samples-per-prompt 1", ("raise --n-samples-per-prompt",)),
    Mistake("held-out data that nothing evaluates", "--strict --eval-prompt-data held {data}", ("--eval-interval",)),
    Mistake("a warm-up that never ends", "--lr-warmup-iters 50 --lr-decay-style cosine", ("lower --lr-warmup-iters",)),
    Mistake("another model's shape", "--num-layers 24", ("--num-layers 24", "drop the flag")),
    Mistake("shared GPUs in the other loop", "--colocate", ("use train.py",), script="train_async.py"),
)


def write_mistakes(folder: Path, model: Path) -> dict[str, str]:
    """Writes what the rows name into `folder`, around a checkpoint that works; returns name -> path."""
    rows = [{"input": f"1+{i}", "label": str(1 + i)} for i in range(5)]
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]
    texts = {
        "data": ("data.jsonl", _lines(rows)),
        "csv": ("data.csv", "input,label\n1+1,2\n"),
        "json": ("data.json", json.dumps(rows)),
        "strings": ("strings.jsonl", _lines(["1+1", "1+2"])),
        "empty": ("empty.jsonl", ""),
        "messages": ("messages.jsonl", _lines([{"input": talk, "label": "2"}])),
        "long": ("long.jsonl", _lines([{"input": "1+" * 600, "label": "2"}])),
        "texts": ("texts.jsonl", _lines([{"input": "1+1", "label": None}])),
        "talks": ("talks.jsonl", _lines([{"input": [*talk, {"role": "assistant", "content": "2"}], "label": "2"}])),
        "broken": ("broken.jinja", "{% for m in messages %}\n{{ m.content }\n{% endfor %}"),
        "hook": ("hook.py", "async def reward(args, sample, **kwargs):\n    return 1.0\n"),
    }
    paths = {"model": str(model)}
    for name, (file, text) in texts.items():
        (folder / file).write_text(text)
        paths[name] = str(folder / file)
    used = folder / "used"
    used.mkdir()
    (used / "run.json").write_text('{"starts": []}')
    (used / "metrics.jsonl").write_text('{"rollout/step": 0}\n')
    paths["used"] = str(used)
    for name in ("base_model", "weights", "no_system"):
        paths[name] = str(shutil.copytree(model, folder / name))
        for file in (folder / name).glob("*tokenizer*" if name == "weights" else "chat_template.jinja"):
            file.unlink()
    (folder / "weights" / "chat_template.jinja").unlink()
    (folder / "no_system" / "chat_template.jinja").write_text(TEMPLATE_WITHOUT_SYSTEM)
    return paths


def _lines(rows: list[dict[str, object]] | list[str]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
