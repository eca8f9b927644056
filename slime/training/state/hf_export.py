"""An export in Hugging Face format by all ranks of a run: files in turn, named only when all of it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from slime.training.state.hf_files import (
    Writers,
    begin_export,
    being_written,
    commit_export,
    require_room,
    write_hf,
)


def export(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    source: Path,
    carried: Callable[[str], bool],
    writers: Writers,
    rest: Callable[[Path], None],
) -> None:
    """Writes `tensors` and the assets of the checkpoint `source`, in place of an earlier export. Collective.

    All writers see one folder. `rest`: called on each with the folder in which the export grows, when its weights are
    there. Raises `CheckpointError`, and touches nothing, if anything but an export is in the way.
    """
    require_room(directory)  # on every rank: the others would wait for one that has given up
    writers.meet()  # or a slow one would look at a folder that is half made
    if writers.rank == 0:
        begin_export(directory)
    writers.meet()  # the folder is there
    partial = being_written(directory)
    write_hf(partial, tensors, assets_from=source, carried=carried, writers=writers)
    rest(partial)
    if writers.rank == 0:
        commit_export(partial, directory)
    writers.meet()
