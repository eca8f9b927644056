"""Every idea is an entry of a registry: an unknown name is refused, and a user's own file is as good as ours."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.algorithms import Algorithm
from slime.algorithms.advantages import ESTIMATORS, CriticEstimator, RewardedBatch
from slime.algorithms.aggregation import AGGREGATIONS
from slime.algorithms.kl import KL_ESTIMATORS
from slime.algorithms.off_policy import CORRECTIONS
from slime.algorithms.policy_loss import POLICY_LOSSES, PolicyTokens
from slime.algorithms.token_losses import Sequences
from slime.core.errors import ConfigError
from slime.core.registry import Registry
from slime.settings.fields import field_docs
from tests.support.training import training_args

REGISTRIES: dict[str, Registry[Any]] = {
    "advantage_estimator": ESTIMATORS,
    "policy_loss": POLICY_LOSSES,
    "kl_loss_type": KL_ESTIMATORS,
    "off_policy_corrections": CORRECTIONS,
    "loss_aggregation": AGGREGATIONS,
}
ENTRIES = [(setting, name) for setting, registry in REGISTRIES.items() for name in registry.names()]

OWN_ESTIMATOR = '''
from dataclasses import dataclass

import numpy as np

from slime.algorithms.advantages import ESTIMATORS, AdvantageEstimator, Estimate, RewardedBatch

@ESTIMATORS.register("best_of_group")
@dataclass(frozen=True, kw_only=True)
class BestOfGroup(AdvantageEstimator):
    """Reward less the best of the group."""

    default_policy_loss = "cispo"

    best_margin: float = 0.5
    """Added to every advantage."""

    def estimate(self, batch: RewardedBatch) -> Estimate:
        out = []
        for reward, group, mask in zip(batch.rewards, batch.groups, batch.masks, strict=True):
            best = np.nanmax(batch.rewards[batch.groups == group])
            out.append(np.where(mask > 0, reward - best + self.best_margin, 0.0))
        return Estimate(tuple(out))
'''
OWN_LOSS = '''
from dataclasses import dataclass

from slime.algorithms.token_losses import clamped_log_ratio, unmasked
from slime.algorithms.policy_loss import PolicyLoss, PolicyTokens, TokenLosses

@dataclass(frozen=True, kw_only=True)
class Unclipped(PolicyLoss):
    """The ratio as it is."""

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        log_ratio, limited = clamped_log_ratio(tokens.log_probs, tokens.old_log_probs, tokens.mask)
        loss = -log_ratio.exp() * unmasked(tokens.advantages, tokens.mask)
        return TokenLosses(loss, loss.detach() * 0, -log_ratio.detach(), limited.float())
'''


def settings(**changes: Any) -> Any:
    return training_args(Path("unused"), **changes)


@pytest.mark.parametrize(("setting", "registry"), REGISTRIES.items(), ids=REGISTRIES)
def test_an_unknown_name_is_refused_with_those_that_exist(setting: str, registry: Registry[Any]) -> None:
    first = registry.names()[0]
    value: Any = f"{first}x" if setting != "off_policy_corrections" else (f"{first}x",)
    with pytest.raises(ConfigError, match=f"did you mean {first}") as error:
        Algorithm.of(settings(**{setting: value}))
    assert registry.flag in str(error.value) and all(name in str(error.value) for name in registry.names())


@pytest.mark.parametrize(("setting", "name"), ENTRIES)
def test_every_entry_is_built_from_the_settings_and_documents_its_own(setting: str, name: str) -> None:
    registry = REGISTRIES[setting]
    entry = registry.get(name)
    assert entry.name == name and entry.__doc__, "an entry says what it is"
    built = registry.build(name, settings())
    for field in dataclasses.fields(entry):
        owner = next(c for c in entry.__mro__ if field.name in vars(c).get("__annotations__", {}))
        assert field_docs(owner).get(field.name), f"{owner.__name__}.{field.name} has no text for --help"
        assert getattr(built, field.name) == getattr(settings(), field.name)


@pytest.mark.parametrize("name", ESTIMATORS.names())
def test_an_estimator_names_a_policy_loss_and_says_whether_it_has_a_critic(name: str) -> None:
    entry = ESTIMATORS.get(name)
    assert entry.default_policy_loss in POLICY_LOSSES
    assert entry.needs_critic == issubclass(entry, CriticEstimator)


def test_entries_are_known_without_torch() -> None:
    """The command line asks for their flags."""
    asked = "\n".join(
        f"from {type(r).__module__} import Registry; import {r.package} as p; "
        "[v.names() for v in list(vars(p).values()) if isinstance(v, Registry)]"
        for r in REGISTRIES.values()
    )
    told = subprocess.run(
        [sys.executable, "-c", f"{asked}\nimport sys; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert told.stdout.strip() == "False"


def test_no_name_of_an_entry_is_compared_with() -> None:
    """What the rest of slime has to know about an entry is an attribute of it."""
    names = {name for setting, name in ENTRIES if setting != "off_policy_corrections"}
    room = Path(inspect.getfile(Algorithm)).parents[1]
    found = []
    for path in sorted([*(room / "algorithms").rglob("*.py"), *(room / "training").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                constants = {
                    n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
                }
                if constants & names:
                    found.append(f"{path.relative_to(room)}:{node.lineno}")
    assert not found, found


def batch() -> RewardedBatch:
    masks = (np.array([1.0, 1.0]), np.array([1.0, 0.0, 1.0]), np.array([1.0]))
    groups = np.array([4, 7, 4])
    return RewardedBatch(rewards=np.array([1.0, 2.0, 3.0]), groups=groups, executions=np.arange(3), masks=masks)


@pytest.mark.parametrize("by_module", [False, True], ids=["file", "module"])
def test_an_estimator_of_the_user_is_an_estimator(by_module: bool, tmp_path: Path, monkeypatch: Any) -> None:
    name = f"own_estimator_{by_module}"
    source = OWN_ESTIMATOR.replace("best_of_group", name)
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = name + ":BestOfGroup" if by_module else str(tmp_path / f"{name}.py")
    args = settings(advantage_estimator=path, policy_loss="cispo", best_margin=0.25)
    algorithm = Algorithm.of(args)
    made = algorithm.estimator.estimate(batch())
    assert [a.tolist() for a in made.advantages] == [[-1.75, -1.75], [0.25, 0.0, 0.25], [0.25]]
    assert made.returns is None and not algorithm.estimator.needs_critic


def test_a_policy_loss_of_the_user_is_a_policy_loss(tmp_path: Path) -> None:
    file = tmp_path / "own_loss.py"
    file.write_text(textwrap.dedent(OWN_LOSS))
    loss = Algorithm.of(settings(policy_loss=f"{file}:Unclipped")).policy_loss
    one = torch.ones(2)
    new = torch.tensor([0.5, float("nan")], requires_grad=True)
    mask, sequences = torch.tensor([1.0, 0.0]), Sequences(torch.zeros(2, dtype=torch.int64), 1)
    tokens = PolicyTokens(log_probs=new, old_log_probs=one * 0, advantages=one, mask=mask, sequences=sequences)
    got = loss.token_losses(tokens).loss
    got.sum().backward()
    assert got[0].item() == pytest.approx(-np.exp(0.5)) and got[1] == 0
    assert new.grad is not None and new.grad[1] == 0


def test_a_class_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "another_kind.py"
    file.write_text(textwrap.dedent(OWN_LOSS))
    with pytest.raises(ConfigError, match=r"as advantage estimator; it must be a subclass of .*AdvantageEstimator"):
        Algorithm.of(settings(advantage_estimator=f"{file}:Unclipped"))


@pytest.mark.parametrize(
    ("registry", "name", "needed", "changes", "text"),
    [
        (KL_ESTIMATORS, "k1", {}, {"use_kl_loss": True, "kl_loss_coef": 0.1}, "expected gradient"),
        (ESTIMATORS, "ppo", {}, {"observation_returns": "reset"}, "skip or through"),
        (POLICY_LOSSES, "cispo", {}, {"cispo_clip_low": 2.0, "cispo_clip_high": 1.0}, "--cispo-clip-low"),
        (CORRECTIONS, "tis", {}, {"tis_clip_low": 3.0}, "--tis-clip"),
        (CORRECTIONS, "tis", {}, {"use_rollout_logprobs": True}, "use-rollout-logprobs"),
        (
            CORRECTIONS,
            "tis",
            {},
            {"off_policy_corrections": ("tis",), "custom_tis_function_path": "a.b"},
            "use custom_tis instead",
        ),
        (
            CORRECTIONS,
            "custom_tis",
            {"custom_tis_function_path": "a.b"},
            {"custom_tis_function_path": None},
            "custom_tis needs",
        ),
        (CORRECTIONS, "rejection", {"rejection_level": "token"}, {"rejection_low": 3.0}, "--rejection-low"),
        (
            CORRECTIONS,
            "rejection",
            {"rejection_level": "token"},
            {"rejection_level": None},
            "needs --rejection-level",
        ),
    ],
)
def test_an_entry_refuses_what_cannot_work(
    registry: Registry[Any], name: str, needed: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    assert registry.build(name, settings(**needed)).check(settings(**needed)) is None, "it works"
    wrong = settings(**needed | changes)
    assert text in registry.build(name, wrong).check(wrong)


def test_corrections_follow_the_switches_in_the_order_in_which_they_act() -> None:
    chosen = settings(use_opsm=True, rejection_level="token", use_tis=True).off_policy_corrections
    assert chosen == ("tis", "rejection", "opsm")
    assert settings(get_mismatch_metrics=True).off_policy_corrections == ("tis_metrics",)
    assert settings(use_tis=True, custom_tis_function_path="x.y").off_policy_corrections == ("custom_tis",)
