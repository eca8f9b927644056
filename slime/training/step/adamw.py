"""AdamW with master weights and moments in half precision, in host memory, or both.

Megatron's distributed optimizer passes it this rank's parameter shards, each with its gradient in `decoupled_grad`.
`--optimizer-cpu-offload` keeps some of the state in host memory: the CPU computes updates there while the next gradient
is copied in and the previous weights are copied out. `--use-precision-aware-optimizer` sets the precision of master
weights and moments.

Consumes complete gradients on the device and produces new weights on the device. The host waits for each gradient
before it uses it. `step` returns once the last weight copy has been launched; the device's stream waits for that copy.

Invariants
1. The arithmetic is float32 AdamW (Loshchilov & Hutter 2019), whatever the dtype of the stored state.
2. Half-precision state is rounded stochastically, so it is correct on average. Rounding to nearest would lose every
   update smaller than half a unit in the last place.
3. The random numbers depend only on the step and the parameter's index in the optimizer, so a resumed run matches an
   uninterrupted one.
4. A float32 parameter on the device is its own master weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

MASTER, EXP_AVG, EXP_AVG_SQ = "master", "exp_avg", "exp_avg_sq"
"""Keys in a parameter's state, and the roles of its tensors in a checkpoint."""
BLOCK = 1 << 24
"""Number of elements per block. In half precision, only one block at a time is copied to float32."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes by their names in the settings."""
_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Dtype -> how many of float32's mantissa bits it lacks."""


@dataclass(frozen=True, slots=True)
class Holding:
    """How optimizer state is stored."""

    master: torch.dtype = torch.float32
    exp_avg: torch.dtype = torch.float32
    exp_avg_sq: torch.dtype = torch.float32
    host_fraction: float = 0.0
    """Fraction of this rank's parameter elements whose state is in host memory, starting with the first parameter."""

    @classmethod
    def of(cls, megatron: Mapping[str, Any]) -> Holding | None:
        """Reads the settings. Returns None if they select torch's AdamW."""
        offload, precise = megatron.get("optimizer_cpu_offload"), megatron.get("use_precision_aware_optimizer")
        if not (offload or precise):
            return None
        fraction = float(megatron["optimizer_offload_fraction"]) if offload else 0.0
        if not precise:
            return cls(host_fraction=fraction)
        names = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        master, exp_avg, exp_avg_sq = (DTYPES[megatron[name]] for name in names)
        return cls(master, exp_avg, exp_avg_sq, fraction)

    def dtype_of(self, key: str, parameter: Tensor) -> torch.dtype:
        """Returns the dtype of a parameter's `state[key]`. Float32 parameters always have float32 master weights."""
        if key == MASTER:
            return torch.float32 if parameter.dtype == torch.float32 else self.master
        return self.exp_avg if key == EXP_AVG else self.exp_avg_sq


@dataclass(frozen=True, slots=True)
class _Block:
    place: int
    start: int
    parameter: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    group: Mapping[str, Any]


class HeldAdamW:
    """An optimizer with the interface that Megatron's distributed optimizer and slime's checkpoints expect."""

    def __init__(self, param_groups: list[dict[str, Any]], holding: Holding) -> None:
        """`param_groups` has the format of torch's AdamW. All parameters must be one-dimensional."""
        self.param_groups = param_groups
        self.holding = holding
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self._on_host = frozenset(self._choose_host())
        self.adopt()

    def _choose_host(self) -> Iterator[int]:
        room = self.holding.host_fraction * sum(p.numel() for p in self._parameters())
        for place, parameter in enumerate(self._parameters()):
            if room <= 0.0:
                return
            room -= parameter.numel()
            yield place

    def _parameters(self) -> Iterator[Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the references to gradients, whose memory belongs to Megatron."""
        for parameter in self._parameters():
            parameter.decoupled_grad = None  # type: ignore[attr-defined]

    @torch.no_grad()
    def renew_masters(self) -> None:
        """Copies the parameters to the master weights. Call this after other code has changed the parameters."""
        for parameter, held in self.state.items():
            if MASTER in held:
                held[MASTER].copy_(parameter)

    @torch.no_grad()
    def adopt(self) -> None:
        """Moves loaded state to its device and dtype, and creates missing master weights."""
        for place, parameter in enumerate(self._parameters()):
            held = self.state[parameter]
            for key, loaded in list(held.items()):
                held[key] = self._empty(place, parameter, key).copy_(loaded.reshape(-1))
            is_own = place not in self._on_host and self.holding.dtype_of(MASTER, parameter) == parameter.dtype
            if MASTER not in held and not is_own:
                held[MASTER] = self._empty(place, parameter, MASTER).copy_(parameter)

    def _empty(self, place: int, parameter: Tensor, key: str) -> Tensor:
        on_host = place in self._on_host
        device = torch.device("cpu") if on_host else parameter.device
        pinned = on_host and parameter.is_cuda
        dtype = self.holding.dtype_of(key, parameter)
        return torch.empty(parameter.numel(), dtype=dtype, device=device, pin_memory=pinned)

    def _state_of(self, place: int, parameter: Tensor) -> dict[str, Tensor]:
        held = self.state[parameter]
        for key in (EXP_AVG, EXP_AVG_SQ):
            if key not in held:
                held[key] = self._empty(place, parameter, key).zero_()
        return held

    def first_step_bytes(self) -> int:
        """Returns how much device memory the first step will allocate for moments that are not on the host."""
        return sum(
            parameter.numel() * self.holding.dtype_of(key, parameter).itemsize
            for place, parameter in enumerate(self._parameters())
            for key in (EXP_AVG, EXP_AVG_SQ)
            if place not in self._on_host and key not in self.state[parameter]
        )

    @torch.no_grad()
    def step(self) -> None:
        here: list[_Block] = []
        there: list[_Block] = []
        place = 0
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            for parameter in group["params"]:
                (there if place in self._on_host else here).extend(self._blocks(place, parameter, group))
                place += 1
        for block in here:
            _update(block, block.grad, block.parameter)
        _update_on_host(there)

    def _blocks(self, place: int, parameter: Tensor, group: Mapping[str, Any]) -> Iterator[_Block]:
        grad: Tensor | None = vars(parameter).get("decoupled_grad")
        if grad is None:
            return
        state = self._state_of(place, parameter)
        for start in range(0, parameter.numel(), BLOCK):
            part = slice(start, start + BLOCK)
            own = {key: tensor[part] for key, tensor in state.items()}
            yield _Block(place, start, parameter[part], grad[part], own, group)


def _update(block: _Block, grad: Tensor, target: Tensor) -> None:
    """Updates a block's state with its gradient and writes the new weights to `target`, all on one device."""
    group, step = block.group, int(block.group["step"])
    stored = {MASTER: target, **block.state} if MASTER not in block.state else dict(block.state)
    wide = {key: tensor.float() for key, tensor in stored.items()}  # the same tensor if it is float32
    adamw(
        [wide[MASTER]],
        [grad.float()],
        [wide[EXP_AVG]],
        [wide[EXP_AVG_SQ]],
        [],
        [torch.full((), float(step - 1), device=target.device)],
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    draws = torch.Generator(target.device)
    draws.manual_seed((step * 1_000_003 + block.place) * 4099 + block.start // BLOCK)
    for key, tensor in stored.items():
        if tensor.dtype != torch.float32:
            tensor.copy_(round_at_random(wide[key], tensor.dtype, draws))
    if MASTER in block.state:
        target.copy_(block.state[MASTER])


def round_at_random(x: Tensor, dtype: torch.dtype, draws: torch.Generator) -> Tensor:
    """Rounds float32 stochastically to one of the two adjacent bfloat16 or float16 values; the nearer is more likely.

    Values below 6e-5, where float16 has fewer digits, are rounded to the nearest float16.
    """
    bits = _DROPPED_BITS[dtype]
    noise = torch.randint(0, 1 << bits, x.shape, dtype=torch.int32, device=x.device, generator=draws)
    return noise.add_(x.view(torch.int32)).bitwise_and_(-(1 << bits)).view(torch.float32).to(dtype)


class _Lane:
    """Host buffers for one block at a time, which is copied from the device and back."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._grad = torch.empty(size, dtype=torch.float32, pin_memory=pinned)
        self._out = torch.empty(size, dtype=torch.float32, pin_memory=pinned)
        self._arrived = torch.cuda.Event() if pinned else None
        self._left = torch.cuda.Event() if pinned else None

    def fetch(self, block: _Block) -> None:
        self._grad[: block.grad.numel()].copy_(block.grad, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def work(self, block: _Block) -> Tensor:
        """Waits for the gradient and for a free output buffer, then computes and returns the new weights."""
        for event in (self._arrived, self._left):
            if event is not None:
                event.synchronize()
        out = self._out.view(block.parameter.dtype)[: block.parameter.numel()]
        _update(block, self._grad[: out.numel()], out)
        return out

    def send(self, block: _Block, out: Tensor) -> None:
        block.parameter.copy_(out, non_blocking=True)
        if self._left is not None:
            self._left.record()


def _update_on_host(blocks: Sequence[_Block]) -> None:
    """Runs `_update` in host memory while the next gradient is copied in and the previous weights are copied out."""
    if not blocks:
        return
    device, size = blocks[0].parameter.device, max(block.parameter.numel() for block in blocks)
    lanes = [_Lane(size, device) for _ in range(2)]
    if device.type != "cuda":
        for block in blocks:
            lanes[0].fetch(block)
            lanes[0].send(block, lanes[0].work(block))
        return
    current, down, up = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    down.wait_stream(current)
    up.wait_stream(current)
    for number in range(len(blocks) + 1):
        if number < len(blocks):
            with torch.cuda.stream(down):
                lanes[number % 2].fetch(blocks[number])
        if number > 0:
            lane, block = lanes[(number - 1) % 2], blocks[number - 1]
            out = lane.work(block)
            with torch.cuda.stream(up):
                lane.send(block, out)
    current.wait_stream(up)
