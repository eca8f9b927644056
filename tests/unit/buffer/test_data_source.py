"""A user's data source behind the buffer: the public contract is enough, and the ledger still balances."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime.buffer.data_buffer import DataBuffer
from slime.buffer.data_source import DataSourceBuffer
from slime.buffer.sources import SOURCES, SampleSource, SourceContext
from slime.core.errors import ConfigError, DataError, HookError, LedgerError
from slime.core.sample import Sample
from slime.data.dataset import load_prompts
from slime.rollout.factories import load_data_source, load_tokenizer
from slime.settings import parse_args
from tests.support.command_line import complete
from tests.support.rollout import rollout_args


class Source:
    """Written against the public contract: newest returned work first."""

    def __init__(self, args) -> None:
        self.args, self.count, self.stack, self.calls = args, 0, [], []

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        out = []
        for _ in range(num_samples):
            if self.stack:
                out.append(self.stack.pop())
                continue
            first = 2 * self.count
            out.append([Sample(group_index=self.count, index=first + i, prompt=f"p{self.count}") for i in range(2)])
            self.count += 1
        return out

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.stack.extend(samples)

    def save(self, rollout_id: int) -> None:
        self.calls.append(("save", rollout_id))

    def load(self, rollout_id: int | None = None) -> None:
        self.calls.append(("load", rollout_id))

    def __len__(self) -> int:
        return 10


def test_what_is_finished_is_saved_as_it_came() -> None:
    buffer = DataSourceBuffer(Source(None))
    finished, other = buffer.get_groups(2)
    buffer.put_finished(finished)
    came = buffer.state_dict()["finished"]
    finished.samples[0].metadata["late"] = object()
    buffer.put_back([other], "aborted")
    assert buffer.take_finished(2) == [] and buffer.state_dict()["finished"] == came


def test_its_own_order_is_used_and_accounted_for(tmp_path: Path) -> None:
    source = Source(None)
    buffer = DataSourceBuffer(source)
    groups = buffer.get_groups(3)
    buffer.put_back(groups[:2], "aborted")
    assert (buffer.num_buffered, len(buffer)) == (2, 10)
    (again,) = buffer.get_groups(1)
    assert (again.group_index, again.attempts) == (1, 1)
    buffer.mark_trained([1])
    with pytest.raises(LedgerError):
        buffer.mark_trained([1])
    buffer.ledger().check()

    buffer.begin_save(tmp_path / "b.json", rollout_id=4)()
    with pytest.raises(DataError, match="rollout_id"):
        buffer.begin_save(tmp_path / "b.json")
    resumed = DataSourceBuffer(source)
    resumed.load(tmp_path / "b.json")
    assert source.calls == [("save", 4), ("load", 4)]
    assert [g.group_index for g in resumed.get_groups(3)] == [2, 0, 3]
    resumed.ledger().check()


class Kept(Source):
    """Keeps its place, as a source should."""

    saved: tuple[int, list[list[Sample]]] = (0, [])

    def save(self, rollout_id: int) -> None:
        self.saved = (self.count, list(self.stack))

    def load(self, rollout_id: int | None = None) -> None:
        self.count, self.stack = self.saved[0], list(self.saved[1])


@pytest.mark.parametrize("source", [None, Kept(None)])
def test_what_happens_while_a_file_is_written_is_not_in_it(tmp_path: Path, source: Source | None) -> None:
    """Law: account and source are saved of one moment, however long the writing takes."""

    def make() -> DataBuffer:
        return DataBuffer(None, n_samples_per_prompt=2) if source is None else DataSourceBuffer(source)

    buffer = make()
    groups = buffer.get_groups(3)
    buffer.put_back(groups[:1], "aborted")
    then = buffer.state_dict()
    write = buffer.begin_save(tmp_path / "b.json", rollout_id=0)
    buffer.get_groups(4)
    buffer.put_back(groups[1:2], "aborted")
    buffer.mark_trained([2])
    write()
    resumed = make()
    resumed.load(tmp_path / "b.json", rollout_id=0)
    assert (resumed.ledger().issued, resumed.num_buffered) == (then["issued"], 3)
    assert sorted(g.group_index for g in resumed.get_groups(5)) == [0, 1, 2, 3, 4], "skipped or repeated"


def test_ids_left_none_are_given() -> None:
    class Blank(Source):
        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            return [[Sample(prompt="x"), Sample(prompt="x")] for _ in range(num_samples)]

    groups = DataSourceBuffer(Blank(None)).get_groups(2)
    assert [(s.group_index, s.index) for g in groups for s in g.samples] == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_broken_contracts_are_refused() -> None:
    class Repeats(Source):
        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            return [[Sample(group_index=0, index=0)] for _ in range(num_samples)]

    class Short(Source):
        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            return []

    with pytest.raises(LedgerError, match="already issued"):
        DataSourceBuffer(Repeats(None)).get_groups(2)
    with pytest.raises(DataError, match="get_samples"):
        DataSourceBuffer(Short(None)).get_groups(1)
    with pytest.raises(HookError, match="add_samples"):
        DataSourceBuffer(SimpleNamespace(get_samples=len))


HERE = str(Path(__file__))


def build(args: SimpleNamespace, **context: Any) -> DataBuffer:
    return SOURCES.build(args.data_source, args).open(SourceContext(args=args, tokenizer=None, **context))


def test_prompts_come_as_the_settings_of_a_run_say(tmp_path: Path) -> None:
    """Law: in the order of its seed, without those that are too long for training, so many of each."""
    flags = ("--rollout-shuffle", "--rollout-seed", "7", "--rollout-max-prompt-len", "5")
    flags += ("--max-dropped-row-fraction", "0.8")
    args = rollout_args(tmp_path, *flags, "--n-samples-per-prompt", "3")
    buffer = load_data_source(args, load_tokenizer(args))
    groups = buffer.get_groups(10)
    assert len(buffer) == 10 and {group.num_executions for group in groups} == {3}, "of two digits they are longer"
    order = np.random.default_rng(7).permutation(10)
    assert [group.samples[0].label for group in groups] == [str(2 * row) for row in order]


def test_the_settings_choose(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"prompt_data": None, "n_samples_per_prompt": 3, "rollout_shuffle": False}
    plain |= {"rollout_seed": 1, "tag": "hello", "input_key": "input", "label_key": None, "metadata_key": "metadata"}
    plain |= {"tool_key": "tools", "apply_chat_template": False, "apply_chat_template_kwargs": {}}
    plain |= {
        "multimodal_keys": None,
        "rollout_max_prompt_len": None,
        "data_source": "prompt_data",
        "data_source_path": None,
        "prompt_sampler": "epochs",
        "task_key": "task",
        "rollout_function_path": "",
        "custom_generate_function_path": None,
        "loss_type": "policy_loss",
        "max_dropped_row_fraction": 0.05,
        "rollout_batch_size": 1,
        "run_dir": str(tmp_path),
    }
    args = SimpleNamespace(**plain)
    assert build(args).get_groups(1)[0].num_executions == 3
    seen = []

    def hook(args, rollout_id, buffer, num_samples):
        seen.append((args.tag, rollout_id, num_samples))
        return [buffer.pop(0)]

    buffer = build(args, buffer_filter=hook)
    buffer.put_back(buffer.get_groups(2), "x")
    buffer.get_groups(1)
    assert seen == [("hello", None, 1)]
    of_user = SimpleNamespace(**plain | {"data_source": "user_class", "data_source_path": f"{HERE}:Source"})
    assert build(of_user).get_groups(1)[0].samples[0].prompt == "p0"
    (tmp_path / "d.jsonl").write_text('{"input": "q"}\n')
    named = SimpleNamespace(**plain | {"prompt_data": str(tmp_path / "d.jsonl")})
    assert load_prompts(args, None) is None and load_prompts(named, None) is not None
    assert build(named).get_groups(1)[0].samples[2].prompt == "q"
    with pytest.raises(HookError, match="buffer-filter-path"):
        build(of_user, buffer_filter=hook)


@dataclass(kw_only=True)
class Numbers(SampleSource):
    """Written against the contract of the registry."""

    first_number: int = 7
    "Number that the source starts with."

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return [[Sample(prompt=str(self.first_number))] for _ in range(num_samples)]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        raise NotImplementedError

    def save(self, rollout_id: int) -> None:
        """Nothing."""

    def load(self, rollout_id: int | None = None) -> None:
        """Nothing."""

    def __len__(self) -> int:
        return 1


def test_a_source_of_the_user_is_named_by_its_path_and_has_settings(tmp_path: Path) -> None:
    words = complete(tmp_path)
    at = words.index("--prompt-data")
    del words[at : at + 2]
    with pytest.raises(ConfigError, match="prompt-data"):
        parse_args(words)
    args = parse_args([*words, "--data-source", f"{HERE}:Numbers", "--first-number", "3"])
    groups = build(args).get_groups(2)
    assert [s.prompt for g in groups for s in g.samples] == ["3", "3"]
    assert parse_args([*words, "--data-source-path", f"{HERE}:Source"]).data_source == "user_class"
    with pytest.raises(ConfigError, match="user_class needs a class"):
        parse_args([*words, "--data-source", "user_class"])
    with pytest.raises(ConfigError, match="did you mean prompt_data"):
        parse_args([*words, "--data-source", "prompt_date"])
