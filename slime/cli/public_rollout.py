"""`slime convert X.pt OUT.jsonl.zst`: a rollout of the public slime, as `--load-debug-rollout-data` replays it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.core.errors import CheckpointError, DataError
from slime.observability.progress import Progress
from slime.public.recorded_samples import groups_of
from slime.rollout.recordings import save_rollout
from slime.training.foreign import require_trust
from slime.training.foreign.confined import Confined


def convert_rollout(source: Path, target: Path, *, trusted: bool) -> str:
    """Writes `target`; says what it holds and what was left out.

    Raises `ConfigError` if `source` is not `trusted`, `CheckpointError` if it is not a rollout or asks for code, or if
    `target` is there, `DataError` for samples that cannot be replayed.
    """
    require_trust(source, trusted=trusted)
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"got {target} to write to, which is there; name a new file, OUT.jsonl.zst")
    with Confined(source) as confined:
        number, num_samples = confined.content.get("rollout_id"), int(confined.content["num_samples"])
        if not isinstance(number, int):
            raise DataError(
                f"got {source} with rollout_id {number!r}, because it is of an evaluation; give one of a step"
            )

        def samples() -> Iterator[Any]:
            with Progress("convert", total=num_samples, unit="samples") as progress:
                for i in range(num_samples):
                    yield confined.sample(i)
                    progress.advance()

        found = groups_of(samples(), number)
    save_rollout(target, number, found.groups)
    told = [f"wrote {target}: {num_samples} samples in {len(found.groups)} groups of step {number}"]
    told += [f"  left out: {name}, of {count} samples" for name, count in sorted(found.left_out.items())]
    if found.num_mixed:
        told.append(f"  {found.num_mixed} samples of several weight versions: their tokens count as of the oldest")
    return "\n".join(told)
