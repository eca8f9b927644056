"""What the documents name exists, and what they tell people to type is accepted."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.cli.main import COMMANDS, build_parser
from slime.core.errors import SAVE_FLAG, START_FLAG
from slime.settings import parse_args
from slime.settings.all_flags import flag_table
from slime.settings.public_flags import refused_table
from slime.settings.schema import SCHEMA_DIR, owned_spellings
from tests.support.command_line import QWEN3_VL, complete
from tests.support.documents import LOOPS, ROOT, TEXTS, commands_of, loop_of, text_of

PATH = re.compile(
    r"`((?:[\w.-]+/)+(?:[\w-]+\.(?:py|txt|sh|md|yaml|png|json))?)`|(?<![\w/.-])((?:slime|docs|tests|examples|recipes|benchmarks)/[\w/]+(?:\.\w+|/))"
)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)\)")
SECTION = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")
MAKE = re.compile(r"(?:`|^)make ([a-z-]+)", re.M)
COMMAND = re.compile(r"`slime ([a-z][a-z-]*)(?=[ `])")
FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*)")
MISTAKES = re.compile(r'^```(?:bash title="fails"|text title="output")$.*?^```$', re.M | re.S)
"""Blocks of a page that show a mistake, and what slime says to it."""
OF_LOOPS = {"--help", "--version", "--explain", "--override"}
OF_DOCKER = {"--gpus", "--shm-size", "--ulimit", "--rm", "--target"}
OF_OTHERS = {*OF_LOOPS, *OF_DOCKER, "--name", "--no-name", "--no-deps", "--index-url", "--local-dir", "--repo-type"}
OF_OTHERS |= {"--no-index", "--find-links"}
"""Placeholders, what argparse brings, and flags of pip and hf."""
OF_SERVERS = {
    *("--model-path", "--tp-size", "--incremental-streaming-output", "--disable-shared-experts-fusion"),
    *("--token-versions", "--enable-return-routed-experts", "--api-key"),
}
"""Flags of a server that somebody starts by hand."""
OF_AGENTS = {"--bare", "--tools"}
"""Flags of Claude Code."""
OF_RAY = {"--head", "--port", "--address", "--node-ip-address", "--num-gpus", "--num-cpus", "--block"}
OF_RAY |= {"--runtime-env-json", "--submission-id", "--no-wait", "--follow", "--disable-usage-stats"}
OF_SLURM = {"--nodes", "--ntasks", "--ntasks-per-node", "--exclusive", "--gpus-per-node", "--cpus-per-task", "--time"}
OF_SLURM |= {"--mem", "--job-name", "--signal", "--requeue", "--open-mode"}
OF_ENTRIES = {"--temper", "--num-words"}
"""Flags of entries that documents show as a user's own: known once the entry is named."""
NOT_HERE = re.compile(
    r"^(my_|shop|path/|runs/|starts/|adapter/|assets/|step_|rank_|logs/|traces/|non_finite/|data/|rollout/|train/|perf/|eval/)"
)
"""Names of what a run or a user makes; and of metrics, which test_glossary.py looks after."""


def subcommands() -> dict[str, argparse.ArgumentParser]:
    """The commands of `slime`."""
    (action,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def known_flags() -> set[str]:
    """Flags that parse, flags that are refused with a way out, and those of the project's other programs."""
    known = {
        *flag_table().by_name,
        *owned_spellings(),
        *OF_OTHERS,
        *OF_SERVERS,
        *OF_AGENTS,
        *OF_ENTRIES,
        *OF_RAY,
        *OF_SLURM,
    }
    for schema in SCHEMA_DIR.glob("megatron-*.json"):  # a page may speak of the other version
        known |= {f"--{name}" for flag in json.loads(schema.read_text())["flags"] for name in flag["names"]}
    for parser in subcommands().values():
        known |= set(parser._option_string_actions)
    for folder in ("examples", "recipes", "benchmarks"):
        for program in (ROOT / folder).rglob("*.py"):
            known |= set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', program.read_text()))
    return known


@pytest.mark.parametrize("document", TEXTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_paths_links_targets_commands_and_flags_exist(document: Path) -> None:
    text = text_of(document)
    paths = [a or b for a, b in PATH.findall(text)]
    missing = [p for p in paths if not NOT_HERE.match(p) and not ((ROOT / p).exists() or (ROOT / "slime" / p).exists())]
    missing += [link for link in LINK.findall(text) if not (document.parent / link).exists()]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    missing += [f"make {target}" for target in MAKE.findall(text) if target not in targets]
    missing += [f"slime {command}" for command in COMMAND.findall(text) if command not in subcommands()]
    known = known_flags()
    taken = MISTAKES.sub("", text.replace(refused_table(), ""))  # whose flags are there to be found, and refused
    missing += [flag for flag in FLAG.findall(taken) if flag not in known and not flag.endswith("-")]
    assert not missing, f"{document.name} names what is not there: {missing}"


@pytest.mark.parametrize("document", [t for t in TEXTS if t.suffix == ".md"], ids=lambda p: p.name)
def test_links_to_sections_end_at_a_heading(document: Path) -> None:
    missing = [
        f"{page}#{section}"
        for page, section in SECTION.findall(document.read_text())
        if (target := document.parent / page if page else document).suffix == ".md" and section not in anchors(target)
    ]
    assert not missing, f"{document.name} links to sections that are not there: {missing}"


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_the_code_in_the_readme_is_an_example_that_tests_run() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    imported, _, rest = code.partition("\n\n\n")
    example = (ROOT / "examples" / "chat_tools.py").read_text()
    assert imported in example and example.endswith(rest)


@pytest.mark.parametrize("document", TEXTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_commands_are_accepted(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a command line in a document passes every check that comes before the first process."""
    base = complete(tmp_path)
    monkeypatch.chdir(ROOT)
    for number, words in enumerate(commands_of(document)):
        if words[0] == "slime":
            assert words[1] in subcommands(), f"{document.name}: {words}"
            command = next(c for c in COMMANDS if c.name == words[1])
            known = set(subcommands()[words[1]]._option_string_actions)
            given = {word for word in words[2:] if word.startswith("--")}
            known |= set(flag_table().by_name) | OF_LOOPS if command.words != "own" else set()
            assert given <= known, f"{document.name}: {words}"
        loop = loop_of(words)
        if loop is None:
            continue
        try:
            parse_args([*base, *stand_ins(words[2:], tmp_path, base)], synchronous=LOOPS[loop])
        except SystemExit as answered:  # --explain
            assert answered.code == 0, f"{document.name}: {words}"
        except Exception as error:
            raise AssertionError(f"{document.name}, command {number}: {' '.join(words)}\n{error}") from error


def stand_ins(words: list[str], folder: Path, base: list[str]) -> list[str]:
    """The flags of a documented command, with files that are there in place of those that it names."""
    own = dict(zip(base[:-1:2], base[1::2], strict=True))
    chats = folder / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}\n' * 40)
    checkpoints, config = folder / "checkpoints", folder / "config.yaml"
    config.write_text("rollout_temperature: 0.8\n")
    for step in (*words, "0") if "--load" in words else ():
        if step.isdecimal():
            (checkpoints / f"step_{int(step):06d}").mkdir(parents=True, exist_ok=True)
            (checkpoints / f"step_{int(step):06d}" / "manifest.json").touch()

    def value(flag: str) -> str:
        return words[words.index(flag) + 1]

    if "--multimodal-keys" in words:
        (Path(own["--hf-checkpoint"]) / "config.json").write_text(json.dumps(QWEN3_VL))
    made: dict[str, Callable[[], str]] = {
        "--hf-checkpoint": lambda: own["--hf-checkpoint"],
        "--prompt-data": lambda: str(chats) if "sft_loss" in words else own["--prompt-data"],
        "--run-dir": lambda: own["--run-dir"],
        "--save": lambda: str(
            checkpoints if "--load" in words and value("--save") == value("--load") else folder / "save"
        ),
        "--load": lambda: str(checkpoints),
        "--custom-config-path": lambda: str(config),
        "--model-family": lambda: "slime.models.qwen3:Qwen3",
    }
    out: list[str] = []
    for word in words:
        flag = out[-1] if out else ""
        if flag in made:
            out.append(made[flag]())
        elif word in ("...", "$DTYPE"):
            continue
        elif word.partition("@")[0].endswith((".jsonl", ".parquet")):
            out.append(own["--prompt-data"])
        else:
            out.append("1" if word in ("N", "K", "$SEED") else word)
    return out


def test_the_table_of_limits_has_every_flag_that_a_message_names() -> None:
    """Law: an expired wait names a flag that exists, and the table says what it is by default."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    section = text.split("## How long things may take", 1)[1].split("\n## ", 1)[0]
    rows = dict(re.findall(r"^\| `(--[a-z-]+)` \| (\S+) \|", section, re.M))
    fields = {flag: flag_table().by_name[flag][0].default for flag in rows}
    assert {flag: "none" if value is None else f"{value:g}" for flag, value in fields.items()} == rows
    named = {START_FLAG, SAVE_FLAG}
    for path in (ROOT / "slime").rglob("*.py"):
        named |= set(re.findall(r'flag="(--[a-z-]+-s)"', path.read_text()))
    assert named <= rows.keys(), named - rows.keys()
