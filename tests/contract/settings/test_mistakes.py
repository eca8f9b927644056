"""Law: a plausible mistake is answered by the real command, before any process starts, with one message and a remedy.

"At once" is counted in modules that Python loads, so that a busy machine changes nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime.cli.main import main
from slime.cluster.preflight import preflight
from slime.core.errors import SlimeError
from slime.settings import check_hooks
from slime.settings.command_line import main_args, report_and_exit
from slime.settings.flag_parser import OVERRIDE
from tests.contract.settings.mistakes import MISTAKES, Mistake, write_mistakes
from tests.contract.settings.wrong_lines import LINES, write_files
from tests.support.marks import quick

ROOT = Path(__file__).parents[3]
MOST_MODULES = 1_000
"""Loaded for one answer; with them it takes about a second."""
HEAVY = ("ray", "torch", "transformers", "sglang", "megatron")
"""Packages that cost seconds; without the first no process of a run can start."""
PROFILE = "import time:"
"""Begins what Python says of each import, on stderr."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said before it ended."""

    code: int
    said: str
    """On stderr, and on stdout."""
    modules: int
    """That Python loaded."""
    imported: frozenset[str]
    """Top-level packages."""


def ask(script: str, flags: list[str], folder: Path) -> Answer:
    """Runs a script, or the command `slime`, in `folder`, and listens."""
    output = folder / "output"
    program = ["-m", "slime"] if script == "slime" else [str(ROOT / script)]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *program, *flags],
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPROFILEIMPORTTIME": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        code = process.wait()
    lines = output.read_text().splitlines()
    imports = [line.rpartition("|")[2].strip() for line in lines if line.startswith(PROFILE)]
    return Answer(
        code=code,
        said="\n".join(line for line in lines if not line.startswith(PROFILE)),
        modules=len(imports),
        imported=frozenset(name.partition(".")[0] for name in imports),
    )


@pytest.fixture(scope="module")
def paths(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_mistakes(tmp_path_factory.mktemp("mistakes"), tiny_qwen3)


def right(paths: dict[str, str]) -> list[str]:
    """A command line without a mistake."""
    return [
        *(
            "--hf-checkpoint",
            paths["model"],
            "--prompt-data",
            paths["data"],
            "--label-key",
            "label",
            "--rm-type",
            "math",
        ),
        *("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-rollout", "1", "--run-dir", "run"),
        *("--rollout-max-response-len", "8", "--device", "cpu"),
    ]


def rows() -> list[object]:
    return [pytest.param(m, id=m.what, marks=[] if m.quick else [pytest.mark.slow]) for m in MISTAKES]


@pytest.mark.parametrize("mistake", rows())
def test_a_mistake_is_answered_at_once_with_its_remedy(mistake: Mistake, paths: dict[str, str], tmp_path: Path) -> None:
    flags = [word.format(**paths) for word in mistake.flags.split()]
    answer = ask(mistake.script, [*right(paths), OVERRIDE, *flags], tmp_path)
    assert answer.code == 2, answer.said
    assert answer.said.startswith(("ConfigError: ", "HookError: ")) and "Traceback" not in answer.said, answer.said
    assert [remedy for remedy in mistake.remedies if remedy not in answer.said] == [], answer.said
    assert len(answer.said.splitlines()) == 1 or "problems:" in answer.said, answer.said
    assert not answer.imported.intersection(HEAVY), "a wrong command line starts nothing, and imports nothing heavy"
    assert not (tmp_path / "run").exists(), "the run folder is made before the first process"
    assert answer.modules < MOST_MODULES, f"{answer.modules} modules were loaded"


@pytest.fixture(scope="module")
def files(paths: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return paths | write_files(tmp_path_factory.mktemp("lines"))


@pytest.mark.parametrize(
    "line", quick([(line,) for line in LINES], *((line,) for line in LINES[::4])), ids=lambda line: line[0][:60]
)
def test_a_wrong_command_line_ends_with_one_message(
    line: tuple[str, ...],
    files: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command's own function in this process: a second for each interpreter would be minutes."""
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "PYTHONPATH"):
        monkeypatch.setenv(name, "")
    words = [word.format(**files) for word in line[0].split()]
    if words[0] != "slime":
        words = ["slime", "train", *right(files), OVERRIDE, *words]
    elif words[1] == "train-async":
        words = ["slime", "train-async", *right(files), OVERRIDE, *words[2:]]
    with pytest.raises(SystemExit) as end:
        raise SystemExit(end_of(words[1:]))
    said = capsys.readouterr().err
    assert end.value.code in (1, 2), said
    assert "Traceback" not in said and said.count("\n") <= 4, said
    assert [part for part in line[1:] if part.format(**files) not in said] == [], said
    assert not (tmp_path / "run").exists(), "nothing was started"


@pytest.mark.parametrize(
    "words",
    quick(
        ["recipe demo --num-rollout -1", "convert nowhere out", "doctor --template nowhere", "report nowhere"],
        "convert nowhere out",
    ),
)
def test_wrong_arguments_of_a_command_are_answered_before_heavy_imports(words: str, tmp_path: Path) -> None:
    answer = ask("slime", words.split(), tmp_path)
    assert answer.code == 2 and answer.said.startswith(f"python -m slime {words.split()[0]}: "), answer.said
    assert not answer.imported.intersection(HEAVY) and answer.modules < MOST_MODULES, f"{answer.modules} modules"


def end_of(words: list[str]) -> int:
    """The exit status of `slime WORDS`, whose loop would come after the look at machine, folder and data."""
    loops = {"train": True, "train-async": False}
    if words[0] not in loops:
        return main(words)
    try:
        args = main_args(words[1:], synchronous=loops[words[0]])
        check_hooks(args)
        preflight(args)
    except SlimeError as error:
        try:
            report_and_exit(error, None)
        except SystemExit as end:
            return int(str(end.code))
    return 0


def test_there_are_as_many_as_were_promised() -> None:
    assert len({m.what for m in MISTAKES}) == len(MISTAKES) >= 25
    assert len({line[0] for line in LINES}) == len(LINES) >= 100
