"""Prompt samplers: which row of the dataset is issued next (`--prompt-sampler`).

    @SAMPLERS.register("easy_first")
    @dataclass(frozen=True, kw_only=True)
    class EasyFirst(TaskSampler):
        "What it does, with its source."
        some_setting: float = 1.0
        "Its help text; the flag is --some-setting."
        def shares(self, tasks): ...

A sampler opens a walk: an endless sequence of rows with a position that is saved with the Data Buffer. `epochs` (the
default) visits every row once per epoch. The others divide the prompts among the tasks of the dataset and visit every
row of a task once per epoch of that task. A row's task is its metadata under `--task-key`.

Invariants
1. Epoch `e` of a walk, or of a task, visits each row exactly once. With shuffling, a generator seeded with the seed and
   `e` determines the order.
2. A walk restored to a saved position over the same dataset continues identically.
3. Within any number of prompts, a task with a constant share gets its share, give or take one prompt per task.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from slime.core.errors import CheckpointError, DataError
from slime.core.registry import Registry
from slime.core.sample import Fingerprint, PromptRow
from slime.settings.fields import opt

if TYPE_CHECKING:
    from slime.settings import Args


class Prompts(Protocol):
    """A dataset, such as `slime.data.dataset.PromptDataset`."""

    @property
    def fingerprint(self) -> Fingerprint: ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> PromptRow: ...


class Walk(Protocol):
    """An endless sequence of rows."""

    @property
    def prompts(self) -> Prompts: ...

    @property
    def epoch(self) -> int:
        """Number of completed passes over the dataset."""

    def next_row(self) -> int:
        """Returns the index of the next row and advances."""

    def note(self, row: int, rewards: Sequence[float]) -> None:
        """Notes the rewards of a row's executions (unscored ones excluded), whether or not they are trained on."""

    def metrics(self) -> dict[str, float]:
        """Returns the `data/*` metrics of the walk."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and the fingerprints of dataset and order, as a JSON-serializable dict."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to a saved position. Raises `CheckpointError` if the dataset, its order or the sampler has changed."""


class PromptWalk:
    """Every row once per epoch, whatever its task."""

    def __init__(self, prompts: Prompts, *, shuffle: bool, seed: int) -> None:
        """Raises `DataError` on an empty dataset."""
        if len(prompts) == 0:
            raise DataError("the dataset has no rows; use a dataset with at least one")
        self.prompts = prompts
        self.epoch = 0
        self.offset = 0
        self._shuffle = shuffle
        self._seed = seed
        self._order_of: tuple[int, npt.NDArray[np.int64]] | None = None

    def next_row(self) -> int:
        row = int(self._order()[self.offset])
        self.offset += 1
        if self.offset == len(self.prompts):
            self.epoch, self.offset = self.epoch + 1, 0
        return row

    def note(self, row: int, rewards: Sequence[float]) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}

    def _order(self) -> npt.NDArray[np.int64]:
        """Returns the row indices of the current epoch, [num_rows]."""
        if self._order_of is None or self._order_of[0] != self.epoch:
            num_rows = len(self.prompts)
            rows = np.arange(num_rows, dtype=np.int64)
            if self._shuffle:
                rows = np.random.default_rng(self._seed + self.epoch).permutation(num_rows).astype(np.int64)
            self._order_of = (self.epoch, rows)
        return self._order_of[1]

    def _order_digest(self) -> str:
        return hashlib.sha256(self._order().tobytes()).hexdigest()[:16]

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "order_digest": self._order_digest(),
            "fingerprint": self.prompts.fingerprint.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _require_same_data(state, self.prompts, EPOCHS, shuffle=self._shuffle, seed=self._seed)
        self.epoch, self.offset = int(state["epoch"]), int(state["offset"])
        if self._order_digest() != state["order_digest"]:
            raise CheckpointError(_OTHER_ORDER)


EPOCHS = "epochs"
_OTHER_ORDER = (
    "the same seed no longer produces the row order of the checkpoint, because NumPy's generator has changed; resume "
    "with the NumPy version that saved the checkpoint"
)


def _require_same_data(state: Mapping[str, Any], prompts: Prompts, sampler: str, *, shuffle: bool, seed: int) -> None:
    """Raises `CheckpointError` unless `state` was saved by this sampler with the same dataset and order."""
    saved, here = Fingerprint.from_dict(state["fingerprint"]), prompts.fingerprint
    if not saved.same_data(here):
        raise CheckpointError(
            f"the dataset has {here.num_rows} rows ({here.source}, {here.digest[:12]}), but the checkpoint was "
            f"saved with {saved.num_rows} rows ({saved.source}, {saved.digest[:12]}). The file, its slice, the "
            "template or a filter has changed, and resuming would skip or repeat prompts; restore the original "
            "data, or start a new run from the saved weights"
        )
    if (known := state.get("sampler", EPOCHS)) != sampler:
        raise CheckpointError(
            f"this run has --prompt-sampler {sampler}, but the checkpoint was saved with {known}, whose position means "
            f"something else; resume with --prompt-sampler {known}, or start a new run from the saved weights"
        )
    if (state["shuffle"], state["seed"]) != (shuffle, seed):
        raise CheckpointError(
            f"this run has shuffle={shuffle} seed={seed}, but the checkpoint was saved with "
            f"shuffle={state['shuffle']} seed={state['seed']}. A different order would skip or repeat prompts; "
            "resume with the saved --rollout-shuffle and --rollout-seed"
        )


# ---- several tasks -----------------------------------------------------------------------------------------------

VARIANCES = 64
"""Number of groups whose rewards count in `Task.variance`."""


@dataclass(slots=True)
class Task:
    """The rows of one task, the position among them, and what their rewards were."""

    name: str
    rows: npt.NDArray[np.int64]
    """[rows] indices into the dataset, in its order."""
    num_issued: int = 0
    credit: float = 0.0
    """Prompts that the task is owed; negative if it got more than its share."""
    num_noted: int = 0
    reward: float = math.nan
    """Mean reward of the executions of the last groups (an exponential average over `VARIANCES` groups)."""
    variance: float = math.nan
    """The same average of the variance of rewards within a group; p (1 - p) for a task that is solved with chance p."""

    def note(self, rewards: Sequence[float]) -> None:
        if not rewards:
            return
        self.num_noted += 1
        weight = 1.0 / min(self.num_noted, VARIANCES)
        for name, value in (("reward", float(np.mean(rewards))), ("variance", float(np.var(rewards)))):
            before = getattr(self, name)
            setattr(self, name, value if self.num_noted == 1 else before + weight * (value - before))

    def order(self, epoch: int, *, shuffle: bool, seed: int) -> npt.NDArray[np.int64]:
        if not shuffle:
            return self.rows
        own = zlib.crc32(self.name.encode())  # tasks of equal size should not have the same order
        return np.random.default_rng([seed, own, epoch]).permutation(self.rows)


class TaskWalk:
    """Divides the prompts among the tasks of the dataset, and visits each row of a task once per epoch of the task."""

    def __init__(self, prompts: Prompts, sampler: TaskSampler, *, task_key: str, shuffle: bool, seed: int) -> None:
        """Raises `DataError` if a row has no task, or the sampler has no share for a task."""
        self.prompts, self._sampler, self._shuffle, self._seed = prompts, sampler, shuffle, seed
        self.tasks = {name: Task(name, np.array(rows)) for name, rows in _rows_by_task(prompts, task_key).items()}
        self._orders: dict[str, tuple[int, npt.NDArray[np.int64]]] = {}
        self._task_of = {int(row): task for task in self.tasks.values() for row in task.rows}
        sampler.require_tasks(self.tasks)

    @property
    def epoch(self) -> int:
        return sum(task.num_issued for task in self.tasks.values()) // len(self.prompts)

    def next_row(self) -> int:
        shares = self._sampler.shares(self.tasks)
        total = sum(shares.values())
        for name, task in self.tasks.items():
            task.credit += shares[name] / total
        task = max((task for task in self.tasks.values() if shares[task.name] > 0), key=lambda task: task.credit)
        task.credit -= 1.0
        epoch, offset = divmod(task.num_issued, len(task.rows))
        task.num_issued += 1
        return int(self._order(task, epoch)[offset])

    def _order(self, task: Task, epoch: int) -> npt.NDArray[np.int64]:
        if task.name not in self._orders or self._orders[task.name][0] != epoch:
            self._orders[task.name] = epoch, task.order(epoch, shuffle=self._shuffle, seed=self._seed)
        return self._orders[task.name][1]

    def note(self, row: int, rewards: Sequence[float]) -> None:
        self._task_of[row].note(rewards)

    def metrics(self) -> dict[str, float]:
        shares = self._sampler.shares(self.tasks)
        total = sum(shares.values())
        found = {}
        for name, task in list(self.tasks.items())[:MOST_SHOWN]:
            found[f"data/task/{name}/share"] = shares[name] / total
            found[f"data/task/{name}/num_issued"] = float(task.num_issued)
            if task.num_noted:
                found[f"data/task/{name}/reward"] = task.reward
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "sampler": self._sampler.name,
            "tasks": {
                name: [task.num_issued, task.credit, task.num_noted, *map(_or_none, (task.reward, task.variance))]
                for name, task in self.tasks.items()
            },
            "shuffle": self._shuffle,
            "seed": self._seed,
            "order_digest": self._order_digest(),
            "fingerprint": self.prompts.fingerprint.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _require_same_data(state, self.prompts, self._sampler.name, shuffle=self._shuffle, seed=self._seed)
        if state["tasks"].keys() != self.tasks.keys():
            raise CheckpointError(
                f"the rows have the tasks {', '.join(self.tasks)}, but the checkpoint was saved with "
                f"{', '.join(state['tasks'])}; resume with the saved --task-key"
            )
        for name, (issued, credit, noted, reward, variance) in state["tasks"].items():
            task = self.tasks[name]
            task.num_issued, task.credit, task.num_noted = int(issued), float(credit), int(noted)
            task.reward, task.variance = (math.nan if one is None else float(one) for one in (reward, variance))
        if self._order_digest() != state["order_digest"]:
            raise CheckpointError(_OTHER_ORDER)

    def _order_digest(self) -> str:
        digest = hashlib.sha256()
        for task in self.tasks.values():
            digest.update(self._order(task, task.num_issued // len(task.rows)).tobytes())
        return digest.hexdigest()[:16]


MOST_SHOWN = 32
"""Maximum number of tasks with metrics of their own."""


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def without_ids(prompts: Prompts, row: int) -> PromptRow:
    """Returns a row, without the ids of its prompt if the dataset can leave them out (`PromptDataset.without_ids`)."""
    found: PromptRow = getattr(prompts, "without_ids", prompts.__getitem__)(row)
    return found


def task_of(row: PromptRow, task_key: str) -> str | None:
    """Returns a row's task; None without one."""
    metadata = row.metadata
    found = metadata.get(task_key) if isinstance(metadata, Mapping) else None
    return None if found is None else str(found)


def _rows_by_task(prompts: Prompts, task_key: str) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for number in range(len(prompts)):
        row = without_ids(prompts, number)
        task = task_of(row, task_key)
        if task is None:
            raise DataError(
                f"{row.source or f'row {number}'} has no task: its metadata has no {task_key!r}. Add it to every row, "
                "set --task-key to the key that has it, or use --prompt-sampler epochs"
            )
        rows.setdefault(task, []).append(number)
    return dict(sorted(rows.items()))


# ---- the registry ------------------------------------------------------------------------------------------------


class PromptSampler(ABC):
    """Its fields are its settings."""

    name: ClassVar[str]

    @abstractmethod
    def open(self, prompts: Prompts, *, task_key: str, shuffle: bool, seed: int) -> Walk:
        """Starts at the first prompt. Raises `DataError` if the dataset does not fit the sampler."""

    def check(self, args: Args) -> str | None:
        """Returns an error message if the settings are invalid, else None. Called before the run starts."""
        return None


class TaskSampler(PromptSampler):
    """Divides the prompts among the tasks of the dataset."""

    def open(self, prompts: Prompts, *, task_key: str, shuffle: bool, seed: int) -> Walk:
        return TaskWalk(prompts, self, task_key=task_key, shuffle=shuffle, seed=seed)

    @abstractmethod
    def shares(self, tasks: Mapping[str, Task]) -> Mapping[str, float]:
        """Returns the share of the next prompts for each task: not negative, in any unit, and not all zero."""

    def require_tasks(self, tasks: Mapping[str, Task]) -> None:
        """Raises `DataError` if the sampler has no share for one of the dataset's tasks, or for a task without rows."""


SAMPLERS: Registry[PromptSampler] = Registry(
    "prompt sampler", flag="--prompt-sampler", package="slime.buffer.samplers", contract=PromptSampler
)


@SAMPLERS.register(EPOCHS)
class Epochs(PromptSampler):
    """Every row of the dataset once per epoch."""

    def open(self, prompts: Prompts, *, task_key: str, shuffle: bool, seed: int) -> Walk:
        return PromptWalk(prompts, shuffle=shuffle, seed=seed)


@SAMPLERS.register("task_weights")
@dataclass(frozen=True, kw_only=True)
class TaskWeights(TaskSampler):
    """Each task gets a constant share of the prompts, whatever its number of rows."""

    task_weights: dict[str, float] = opt({})
    """Share of each task in the prompts, as a JSON object: {"math": 2, "code": 1}. A task with 0 gets none."""

    def check(self, args: Args) -> str | None:
        wrong = {name: value for name, value in self.task_weights.items() if not 0 <= value < math.inf}
        if wrong or not any(self.task_weights.values()):
            got = wrong or self.task_weights or "empty"
            return f"--task-weights is {got}; give each task a number, at least one of them above 0"
        return None

    def shares(self, tasks: Mapping[str, Task]) -> Mapping[str, float]:
        return self.task_weights

    def require_tasks(self, tasks: Mapping[str, Task]) -> None:
        if tasks.keys() != self.task_weights.keys():
            raise DataError(
                f"the dataset has the tasks {', '.join(tasks)}, but --task-weights names "
                f"{', '.join(self.task_weights)}; name each task of the dataset, with 0 for those to leave out"
            )


@SAMPLERS.register("learnability")
@dataclass(frozen=True, kw_only=True)
class Learnability(TaskSampler):
    """A curriculum: a task's share follows the variance of rewards within its last groups, so that tasks that are
    always or never solved get few prompts. For rewards of 0 and 1, this is p (1 - p), the learnability of Rutherford et
    al. (2024, arXiv:2408.15099). Rewards of all tasks should have the same scale.
    """

    least_task_share: float = opt(0.2, gt=0, le=1)
    """Fraction of the prompts that all tasks share equally, so that each one's rewards stay known."""

    def shares(self, tasks: Mapping[str, Task]) -> Mapping[str, float]:
        known = [task.variance for task in tasks.values() if task.num_noted]
        most = max(known, default=0.0)
        found = {name: task.variance if task.num_noted else most for name, task in tasks.items()}  # unknown: try it
        total = sum(found.values())
        equal = 1.0 / len(tasks)
        own = {name: value / total if total else equal for name, value in found.items()}
        least = self.least_task_share
        return {name: least * equal + (1.0 - least) * own[name] for name in tasks}
