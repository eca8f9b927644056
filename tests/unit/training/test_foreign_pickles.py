"""Files of pickles are opened only if somebody says so, and as data alone."""

from __future__ import annotations

import enum
import io
import json
import os
import pickle
import resource
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.cli.main import main
from slime.core.errors import CheckpointError, DataError
from slime.core.routed_experts import RoutedExperts
from slime.core.sample import NOT_SAMPLED, Sample, Status
from slime.public.recorded_samples import groups_of
from slime.rollout.recordings import load_rollout
from slime.training.foreign import inert
from slime.training.foreign.reader import Folder
from tests.support.marks import quick


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._mark}",)


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A class of samples under the name of the public one, with a status within it."""

    @dataclass
    class PublicSample:
        group_index: int | None = None
        index: int | None = None
        prompt: str = ""
        tokens: list[int] = field(default_factory=list)
        response: str = ""
        response_length: int = 0
        status: Any = None

        class Status(enum.Enum):
            COMPLETED = "completed"

    module = types.ModuleType("slime.utils.types")
    PublicSample.__module__, PublicSample.__qualname__ = module.__name__, "Sample"
    PublicSample.Status.__module__, PublicSample.Status.__qualname__ = module.__name__, "Sample.Status"
    module.Sample = PublicSample  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield PublicSample


def _fields(**changes: Any) -> dict[str, Any]:
    """A sample as the public slime records it."""
    return {
        "group_index": 7,
        "index": 30,
        "rollout_id": None,
        "prompt": "2+2=",
        "tokens": [5, 6, 7, 8, 9],
        "response": "4!",
        "response_length": 3,
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.25, 0.0, -1.5],
        "weight_versions": ["4"],
        "reward": 1.0,
        "status": "completed",
        "label": "4",
        "metadata": {"level": 2},
        "train_metadata": None,
        "spec_info": {"accepted": 1},
        **changes,
    }


def _dump(path: Path, *samples: Any, **other: Any) -> Path:
    torch.save({"rollout_id": 5, "samples": list(samples), **other}, path)
    return path


def _convert(source: Path, target: Path, *flags: str) -> int:
    return main(["convert", str(source), str(target), *flags])


def test_a_rollout_is_read_as_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: what public slime recorded of a sample is in ours, and sampled tokens have the version that is known."""
    experts = torch.arange(4 * 2 * 2, dtype=torch.int32).view(4, 2, 2)
    odd = {"reward": np.float64(0.5), "metadata": {"scores": torch.ones(2), "more": np.arange(3)}, "index": 31}
    first, second, third = (
        _fields(rollout_routed_experts=experts),
        _fields(weight_versions=["9", "8"], train_metadata={"turn": 1}, rollout_id=12, **odd),
        _fields(group_index=3, status="truncated", weight_versions=None),
    )
    source, target = _dump(tmp_path / "5.pt", first, third, second), tmp_path / "5.jsonl.zst"
    assert _convert(source, target, "--trust-pickle") == 0
    told = capsys.readouterr().out
    assert "3 samples in 2 groups of step 5" in told and "left out: spec_info (3 samples)" in told
    assert "1 samples have several weight versions" in told
    rollout_id, ((one, two), (other,)) = load_rollout(target)
    assert rollout_id == 5 and [s.group_index for s in (one, two, other)] == [7, 7, 3]
    assert (one.index, one.prompt, one.response, one.label, one.reward) == (30, "2+2=", "4!", "4", 1.0)
    assert one.tokens == [5, 6, 7, 8, 9] and one.rollout_log_probs == [-0.25, 0.0, -1.5]
    assert one.token_versions == [4, NOT_SAMPLED, 4] and one.loss_mask == [1, 0, 1]
    assert one.rollout_routed_experts == RoutedExperts(experts.numpy().astype(np.uint8))
    assert (two.index, two.token_versions) == (12, [8, NOT_SAMPLED, 8]), "siblings of an execution share its number"
    assert two.reward == 0.5 and two.metadata == {"scores": [1.0, 1.0], "more": [0, 1, 2]}
    assert two.train_metadata == {"turn": 1}  # type: ignore[attr-defined]
    assert other.status is Status.TRUNCATED and other.token_versions == [5, NOT_SAMPLED, 5], "the weights of the step"


@pytest.mark.parametrize("protocol", quick([2, 4], 4))
def test_pickled_samples_are_records(protocol: int, public: Any, tmp_path: Path) -> None:
    """Law: objects of the public class are read without it, in both ways that pickles name a class within a class."""
    sample = public(3, 4, "a", [1, 2, 3], "bc", 2, public.Status.COMPLETED)
    torch.save({"rollout_id": 0, "samples": [sample]}, tmp_path / "0.pt", pickle_protocol=protocol)
    assert _convert(tmp_path / "0.pt", tmp_path / "0.jsonl.zst", "--trust-pickle") == 0
    (read,) = load_rollout(tmp_path / "0.jsonl.zst")[1][0]
    assert (read.group_index, read.tokens, read.response, read.status) == (3, [1, 2, 3], "bc", Status.COMPLETED)


def test_our_own_pickled_samples_are_read(tmp_path: Path) -> None:
    ours = Sample(group_index=1, index=2, prompt="a", tokens=[1, 2], status=Status.FAILED, failure="why")
    _dump(tmp_path / "5.pt", ours)
    assert _convert(tmp_path / "5.pt", tmp_path / "5.jsonl.zst", "--trust-pickle") == 0
    (read,) = load_rollout(tmp_path / "5.jsonl.zst")[1][0]
    assert read == ours


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"group_index": None}, "order does not define groups"),
        ({"multimodal_train_inputs": {"pixels": [1.0]}}, "has images"),
        ({"tokens": [1]}, "1 tokens, but its response_length is 3"),
        ({"status": "lost"}, "'lost' is not a valid Status"),
    ],
)
def test_what_cannot_be_replayed_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        groups_of([_fields(**changes)], 5)


@pytest.mark.slow
def test_a_refused_rollout_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: what JSON cannot say is named, and there is no file."""
    for changes, why in (
        ({"metadata": {"raw": b"x"}}, "sample 0.metadata.raw is of type bytes"),
        ({"reward": float("nan")}, "cannot be recorded"),
        ({"metadata": {"many": _many(8)}}, "values and characters"),
        ({"metadata": {"deep": _many(300, 1)}}, "over 200 nested levels"),
    ):
        _dump(tmp_path / "5.pt", _fields(**changes))
        assert _convert(tmp_path / "5.pt", tmp_path / "5.jsonl.zst", "--trust-pickle") == 2
        assert why in capsys.readouterr().err
        assert not (tmp_path / "5.jsonl.zst").exists()


def _many(levels: int, width: int = 10) -> list[Any]:
    """A list that names one list several times, and so on."""
    many: list[Any] = []
    for _ in range(levels):
        many = [many] * width
    return many


def _hostile_rollout(folder: Path, mark: Path) -> Path:
    return _dump(folder / "5.pt", _fields(metadata={"x": Hostile(mark)}))


def _hostile_folder(folder: Path, mark: Path) -> Path:
    (folder / "td").mkdir()
    (folder / "td" / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Hostile(mark)}))
    return folder / "td"


@pytest.mark.parametrize("make", [_hostile_rollout, _hostile_folder])
def test_a_hostile_pickle_runs_nothing(
    make: Callable[[Path, Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a pickle that asks for a program is refused by the name of what it asked for, and nothing ran."""
    mark, out = tmp_path / "mark", tmp_path / "out"
    source = make(tmp_path, mark)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert _convert(source, out, "--trust-pickle", "--hf-checkpoint", str(tmp_path / "model")) == 2
    assert "it references posix.system" in capsys.readouterr().err
    assert not mark.exists() and not out.exists()
    pickle.loads(pickle.dumps(Hostile(mark)))
    assert mark.exists(), "it is hostile"


@pytest.mark.parametrize("make", [_hostile_rollout, _hostile_folder])
def test_without_trust_nothing_is_read(
    make: Callable[[Path, Path], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Law: the message says what to give."""
    source = make(tmp_path, tmp_path / "mark")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    for name in ("load", "load_archive"):
        monkeypatch.setattr(inert, name, lambda _file: pytest.fail("it was opened"))
    assert _convert(source, tmp_path / "out", "--hf-checkpoint", str(tmp_path)) == 2
    assert "--trust-pickle" in capsys.readouterr().err
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "named",
    [
        "builtins.eval",
        "builtins.exec",
        "builtins.__import__",
        "os.system",
        "subprocess.Popen",
        "torch.load",
        "torch.storage._load_from_bytes",
        "torch.hub.load",
        "importlib.import_module",
        "functools.partial",
        "numpy.load",
        "slime.training.foreign.inert._nested",
    ],
)
def test_a_name_that_is_not_listed_is_refused(named: str) -> None:
    module, _, name = named.rpartition(".")
    for content in (f"c{module}\n{name}\n.".encode(), _stack_global(module, name)):
        with pytest.raises(pickle.UnpicklingError, match=named.replace(".", r"\.")):
            inert.load(io.BytesIO(content))


def _stack_global(module: str, name: str) -> bytes:
    words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    return b"\x80\x04" + words + b"\x93."


def test_getattr_reaches_records_alone() -> None:
    """Law: the one function that pickles use to name a class within a class gives a record of it, of nothing else."""

    def asked_of(owner: str) -> Any:
        return inert.load(io.BytesIO(f"cbuiltins\ngetattr\n(c{owner}\nVStatus\ntR.".encode()))

    for owner in ("collections\nOrderedDict", "torch._utils\n_rebuild_tensor_v2", "builtins\ngetattr"):
        with pytest.raises(pickle.UnpicklingError):
            asked_of(owner)
    assert issubclass(asked_of("slime.utils.types\nSample"), inert.Record)


def _program(path: Path) -> bytes:
    """A TorchScript file, whose name for `data.pkl` is as in a file of `torch.save`."""
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(path))
    return path.read_bytes()


def test_no_loader_of_torch_is_asked_what_a_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: two readers of one zip may see two files in it; there is one reader."""

    def asked(*_given: Any, **_named: Any) -> None:
        pytest.fail("torch chose")

    whole = _dump(tmp_path / "5.pt", _fields(more=torch.arange(3))).read_bytes()
    for name in ("load", "jit.load"):
        monkeypatch.setattr(f"torch.{name}", asked)
    for content in (whole, _program(tmp_path / "p.pt") + whole):
        held = inert.load_archive(io.BytesIO(content))
        assert held["samples"][0]["more"].tolist() == [0, 1, 2]
    with pytest.raises(pickle.UnpicklingError, match="a TorchScript program"):
        inert.load_archive(io.BytesIO(whole + _program(tmp_path / "p.pt")))


@pytest.mark.parametrize("code", ["O8", "V8", "O", "S4", "M8[ns]", "f3"])
def test_arrays_are_of_plain_numbers(code: str) -> None:
    """Law: no bytes of a file are taken for an object, or for an address."""
    content = f"cnumpy\ndtype\n(V{code}\nI00\nI01\ntR.".encode()
    with pytest.raises(pickle.UnpicklingError, match="only numbers are supported"):
        inert.load(io.BytesIO(content))


def test_a_structure_with_objects_is_refused(tmp_path: Path) -> None:
    array = np.zeros(1, dtype=[("a", "O")])
    with pytest.raises(pickle.UnpicklingError, match="only numbers are supported"):
        inert.load_archive(_dump(tmp_path / "5.pt", _fields(metadata={"x": array})).open("rb"))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.ones((2, 3))),
        np.array([True, False]),
        np.float32(2),
    ],
    ids=["big-endian", "by columns", "bool", "number"],
)
def test_plain_arrays_are_read(array: Any, tmp_path: Path) -> None:
    held = inert.load_archive(_dump(tmp_path / "5.pt", array).open("rb"))["samples"][0]
    assert (held.tolist() if hasattr(held, "tolist") else held) == array.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.float32])
def test_tensors_are_read_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    base = torch.randint(0, 2, (4, 6)).to(dtype)
    for tensor in (base, base.t(), base[1:, ::2], base[:0], torch.nn.Parameter(base.float())):
        torch.save(tensor, tmp_path / "t.pt")
        read = inert.tensor_of((tmp_path / "t.pt").read_bytes())
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
        assert read.contiguous().view(torch.uint8).equal(tensor.detach().contiguous().view(torch.uint8))


@pytest.mark.parametrize(("held", "why"), [(4, "out of bounds"), (0, "length")])
def test_a_tensor_reaches_no_further_than_its_bytes(held: int, why: str, tmp_path: Path) -> None:
    class Beyond:
        def __init__(self, tensor: torch.Tensor) -> None:
            self._tensor = tensor

        def __reduce__(self) -> tuple[Any, ...]:
            storage = torch.storage.TypedStorage(wrap_storage=self._tensor.untyped_storage(), dtype=torch.float32)
            return torch._utils._rebuild_tensor_v2, (storage, 2, (1 << 20,), (1,), False, None)

    torch.save(Beyond(torch.ones(held)), tmp_path / "t.pt")
    with pytest.raises((RuntimeError, ValueError), match=why):
        inert.tensor_of((tmp_path / "t.pt").read_bytes())


def test_what_a_pickle_may_call_cannot_be_changed_by_it() -> None:
    content = b"ctorch._utils\n_rebuild_tensor_v2\n}Va\nI1\nsb."
    with pytest.raises(pickle.UnpicklingError, match="an attribute of a function"):
        inert.load(io.BytesIO(content))


@pytest.mark.parametrize("content", [b"Nr\xff\xff\xff\x3f.", b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x."])
def test_a_pickle_that_asks_for_much_memory_is_refused(content: bytes, tmp_path: Path) -> None:
    """Law: a small file cannot fill the memory, and the limit ends with the reading."""
    (tmp_path / ".metadata").write_bytes(content)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        Folder(tmp_path)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.slow
def test_a_damaged_rollout_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pt").write_bytes(b"PK nothing")
    torch.save([1, 2], tmp_path / "b.pt")
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(tmp_path / "c.pt"))
    for name, why in (
        ("a", "not a complete torch.save file"),
        ("b", "not a rollout"),
        ("c", "a TorchScript program"),
    ):
        assert _convert(tmp_path / f"{name}.pt", tmp_path / "out", "--trust-pickle") == 2
        assert why in capsys.readouterr().err


def test_a_rollout_has_no_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _convert(tmp_path / "5.pt", tmp_path / "out", "--trust-pickle", "--to", "bf16") == 2
    assert "5.pt is a rollout" in capsys.readouterr().err
