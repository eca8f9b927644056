"""--off-policy-corrections and the switches: they say the same, or the run is refused."""

from __future__ import annotations

import pytest

from slime.settings import parse_args
from tests.support.command_line import refused

LIST = "--off-policy-corrections"
FUNCTION = "--custom-tis-function-path json.loads"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (f"{LIST} opsm --use-tis", "does not contain tis"),
        (f"{LIST} opsm --rejection-level token", "does not contain rejection"),
        (f"{LIST} opsm --get-mismatch-metrics", "does not contain tis_metrics"),
        (f"{LIST} tis --use-opsm", "does not contain opsm"),
        (f"{LIST} tis --no-use-tis", "which contains tis"),
        (f"{LIST} tis tis", "apply tis twice"),
        (f"{LIST} tis slime.algorithms.off_policy.tis:ImportanceSampling", "twice"),
        (f"{LIST} custom_tis", "custom_tis needs --custom-tis-function-path"),
        (f"{LIST} tis {FUNCTION}", "use custom_tis instead"),
        (f"{LIST} rejection", "needs --rejection-level"),
    ],
)
def test_what_contradicts_the_list_is_refused(base: list[str], flags: str, text: str) -> None:
    assert text in refused([*base, *flags.split()])


@pytest.mark.parametrize(
    ("flags", "weighs", "masks", "reports"),
    [
        ("", False, False, False),
        (f"{LIST} tis opsm", True, True, False),
        (f"{LIST} custom_tis {FUNCTION}", True, False, False),
        (f"{LIST} tis_metrics", False, False, True),
        (f"{LIST} rejection --rejection-level token", False, False, False),
    ],
)
def test_the_switches_are_what_the_list_says(
    base: list[str], flags: str, weighs: bool, masks: bool, reports: bool
) -> None:
    args = parse_args([*base, *flags.split()])
    assert (args.use_tis, args.use_opsm, args.get_mismatch_metrics) == (weighs, masks, reports)
    assert not args.idle


def test_an_asynchronous_run_has_the_corrections_of_a_given_list_alone(base: list[str]) -> None:
    words = [*base, "--fully-async"]
    plain, listed = (parse_args([*words, *more], synchronous=False) for more in ([], [LIST, "opsm"]))
    assert plain.off_policy_corrections == ("tis",) and plain.use_tis
    assert listed.off_policy_corrections == ("opsm",) and not listed.use_tis
    assert listed.origins["use_tis"] == f"derived: {LIST}"
