"""Base classes for custom data sources, which turn the prompts in `--prompt-data` into groups of samples.

    class MySource(RolloutDataSourceWithBuffer):
        def get_samples(self, num_samples): ...

The Data Buffer calls the source selected by `--data-source-path` while it holds its lock. It assigns the sample ids and
updates the ledger (`slime.buffer.data_source`). The source produces groups from dataset rows and returned groups.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.buffer.groups import BLANK, Origin, flatten, group_index_of, make_group
from slime.buffer.samplers import PromptWalk
from slime.buffer.sources import image_column
from slime.core.errors import CheckpointError
from slime.core.sample import Group, Sample
from slime.data.dataset import load_prompts
from slime.data.first_rows import grader_of_prompts
from slime.rollout.factories import load_tokenizer
from slime.settings import Args
from slime.settings.hook_contracts import load_hook


class RolloutDataSource:
    """An infinite stream of new groups. Without `--prompt-data`, their prompts are empty."""

    def __init__(self, args: Args) -> None:
        self.args = args
        tokenizer = load_tokenizer(args) if args.prompt_data is not None else None
        most, images = args.rollout_max_prompt_len, image_column(args) if tokenizer is not None else None
        grader = grader_of_prompts(args)
        self.dataset = load_prompts(args, tokenizer, max_prompt_tokens=most, images=images, grader=grader)
        shuffle, seed = args.rollout_shuffle, args.rollout_seed
        self._walk = None if self.dataset is None else PromptWalk(self.dataset, shuffle=shuffle, seed=seed)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Returns `num_samples` groups of `n_samples_per_prompt` samples each. The Data Buffer assigns their ids."""
        return [self._new_group() for _ in range(num_samples)]

    def _new_group(self) -> list[Sample]:
        row = BLANK if self._walk is None else self._walk.prompts[self._walk.next_row()]
        samples = list(make_group(row, 0, Origin(None, 0, self.args.n_samples_per_prompt), 0).samples)
        for sample in samples:
            sample.group_index = sample.index = None
        return samples

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Always raises `RuntimeError`, because this class has no buffer for returned groups."""
        raise RuntimeError(
            f"{type(self).__name__} cannot take back groups; make it a subclass of RolloutDataSourceWithBuffer"
        )

    def save(self, rollout_id: int) -> None:
        """Saves the dataset position next to the step's checkpoint."""
        path = self._file(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._state()))

    def load(self, rollout_id: int | None = None) -> None:
        """Restores the position. Raises `CheckpointError` if the file is missing or belongs to other data."""
        if rollout_id is None:
            return
        path = self._file(self.args.load, rollout_id)
        if not path.is_file():
            raise CheckpointError(f"the state file {path} of {type(self).__name__} is missing; restore the file")
        self._restore(json.loads(path.read_text()))

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)

    def _state(self) -> dict[str, Any]:
        return {"walk": None if self._walk is None else self._walk.state_dict()}

    def _restore(self, state: dict[str, Any]) -> None:
        if self._walk is not None:
            self._walk.load_state_dict(state["walk"])

    @staticmethod
    def _file(folder: str | None, rollout_id: int) -> Path:
        assert folder is not None, "saving requires --save, and loading requires --load"
        return Path(folder) / "rollout" / f"data_source_{rollout_id}.json"


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """A `RolloutDataSource` that buffers returned groups and issues them first."""

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self.buffer: list[list[Sample]] = []
        """Returned groups, oldest first."""
        path = args.buffer_filter_path
        self.buffer_filter = pop_first if path is None else load_hook(path, "buffer_filter")
        """Takes groups out of `buffer`, in place, and returns them."""
        self._metadata: dict[str, Any] = {}

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        taken = self.buffer_filter(self.args, None, self.buffer, num_samples) if self.buffer else []
        return taken + super().get_samples(num_samples - len(taken))

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Adds a plugin's own values, which are saved with the position. They must be JSON-serialisable."""
        self._metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self._metadata

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.buffer += samples

    def _state(self) -> dict[str, Any]:
        groups = [tuple(flatten(samples)) for samples in self.buffer]
        buffer = [Group(group_index_of(one), one).to_dict() for one in groups]
        return {**super()._state(), "buffer": buffer, "metadata": self._metadata}

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        self.buffer = [list(Group.from_dict(one).samples) for one in state["buffer"]]
        self._metadata = dict(state.get("metadata", {}))


def pop_first(args: Args, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """Removes and returns the oldest groups in `buffer`, as a `--buffer-filter-path` function does."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken
