"""The report: what it says and draws of each kind of run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.cli.main import main
from slime.core.errors import DataError
from slime.observability.report import page as page_module
from slime.observability.report import report_title, summarize, summary_text, write_report
from slime.observability.report.figure import value_limits
from slime.observability.report.markup import element, short, text
from slime.observability.report.page import MAX_SAMPLES, chosen_samples, starts_section
from slime.observability.report.panels import PANELS, drawn_panels
from slime.observability.report.record import (
    MAX_POINTS,
    Curve,
    RunKind,
    Start,
    curve,
    kind_of,
    read_run,
    running_mean,
    step_times,
    thinned,
)
from slime.observability.report.summary import facts
from slime.observability.report.timeline import Span, _covered, _inside, timelines
from slime.observability.samples import FILE_NAME, SamplesFile, read_samples
from tests.support.made_runs import HOSTILE, made_run
from tests.support.marks import quick

TITLES = {
    "sync": "Reward, Held-out score, Entropy, KL, Response length, Truncated, Groups without variance, Gradient norm, "
    "Learning rate, Clipped tokens, Train-inference mismatch",
    "async": "Train-inference mismatch, Staleness, Reward",
    "sft": "Loss, Conversation length, Gradient norm, Learning rate",
    "evaluation": "Held-out score, Truncated",
}
ABSENT = {
    "sync": "Loss, Staleness",
    "async": "Loss",
    "sft": "Reward, Held-out score, KL, Truncated, Groups without variance, Generation speed",
    "evaluation": "Reward, Loss",
}
MAX_PAGE_BYTES = 3 << 20


@pytest.mark.parametrize("kind", TITLES)
def test_panels_are_those_that_the_kind_of_run_has(kind: str, tmp_path: Path) -> None:
    """Law: every figure that was logged has its curve; a panel without data is left out, not drawn empty."""
    drawn = drawn_panels(read_run(made_run(tmp_path / "run", kind, num_steps=12)))
    titles = [one.panel.title for one in drawn]
    assert set(TITLES[kind].split(", ")) <= set(titles)
    assert not set(ABSENT[kind].split(", ")) & set(titles)
    assert all(one.curve for panel in drawn for one in panel.series)


def test_kinds_of_runs_are_told_apart(tmp_path: Path) -> None:
    kinds = {kind: read_run(made_run(tmp_path / kind, kind, num_steps=4)).kind for kind in TITLES}
    assert kinds == {
        "sync": RunKind.SYNC,
        "async": RunKind.ASYNC,
        "sft": RunKind.SFT,
        "evaluation": RunKind.EVALUATION,
    }


@pytest.fixture
def without_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the page: to draw the picture takes seconds."""
    monkeypatch.setattr(page_module, "write_picture", lambda record, panels, out, title: out.touch())


@pytest.mark.parametrize("kind", quick(TITLES, "sync"))
def test_a_report_is_a_picture_a_text_and_a_page(kind: str, tmp_path: Path) -> None:
    report = write_report(made_run(tmp_path / "run", kind, num_steps=6), tmp_path / "out")
    assert report.picture.read_bytes().startswith(b"\x89PNG")
    assert "not logged" not in report.text.read_text() + report.page.read_text()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["report.html", "report.md", "report.png"]


def test_steps_of_a_resumed_run_count_once_and_what_it_threw_away_is_gone(tmp_path: Path) -> None:
    """Law: of a step that was done again the last time counts, and no step of the future stays behind."""
    run = made_run(tmp_path / "run", num_steps=20, resumed_at=9)
    record = read_run(run)
    assert record.resumed_at == [9] and record.starts[0].step == 0
    reward = curve(record.rows, "rollout/raw_reward")
    assert list(reward.steps) == list(range(20))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    again = next(i for i, row in enumerate(rows) if "resumed" in row)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[: again + 1]))
    assert curve(read_run(run).rows, "rollout/raw_reward").last == rows[again]["rollout/raw_reward"]


def test_a_start_that_logged_no_step_is_not_resumed(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", num_steps=4)
    record = json.loads((run / "run.json").read_text())
    refused = {**record["starts"][0], "time": "2020-01-31T12:00:00+0000"}
    (run / "run.json").write_text(json.dumps({"starts": [refused, *record["starts"]]}))
    found = read_run(run)
    assert [start.step for start in found.starts] == [None, 0] and found.resumed_at == []
    assert "resumed with step" not in facts(summarize(run))
    assert "started at step 0" in str(starts_section(found)) and "resumed" not in str(starts_section(found))


def test_the_largest_mismatch_is_the_largest_of_all_rows_by_key(tmp_path: Path) -> None:
    """Law: two metrics of one step are told apart, and no resume hides what was seen last."""
    worst = "train_rollout_logprob_abs_diff_max"
    rows = [
        {"time": 1, "train/step": 0, f"train/{worst}": 0.269},
        {"time": 2, "rollout/step": 0, f"probe/{worst}": 0.129},
        {"time": 3, "train/step": 1, f"train/{worst}": 0.1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = summarize(tmp_path)
    assert summary.mismatches == {f"train/{worst}": 0.269, f"probe/{worst}": 0.129}
    assert f"2.69e-01 nats (`train/{worst}`)" in summary_text(summary)


@pytest.mark.usefixtures("without_picture")
@pytest.mark.slow
def test_a_page_of_ten_thousand_steps_stays_small(tmp_path: Path) -> None:
    """Law: what is drawn has a bound, so the page has one."""
    run = made_run(tmp_path / "run", "sft", num_steps=10_000)
    assert write_report(run).page.stat().st_size < MAX_PAGE_BYTES


@pytest.mark.usefixtures("without_picture")
def test_no_markup_of_a_response_reaches_the_page(tmp_path: Path) -> None:
    """Law: hostile text is escaped, control characters and bidirectional ones are spelled out."""
    page = write_report(made_run(tmp_path / "run", num_steps=4)).page.read_text()
    assert "&lt;script&gt;document.title" in page
    assert len(re.findall(r"<script\b", page)) == 1 and "<img" not in page
    assert "\u202e" not in page and "\x1b" not in page and "\\u202e" in page
    assert not re.search(r"""(?:src|href)=["'](?!#)""", page), "the page loads something"


@given(st.text(), st.text())
def test_whatever_is_shown_is_escaped(child: str, attribute: str) -> None:
    made = element("p", child, title=attribute)
    assert re.fullmatch(r'<p title="[^"<>]*">[^<>]*</p>', made)


def test_markup_is_not_escaped_twice() -> None:
    assert element("p", element("b", "1 < 2")) == "<p><b>1 &lt; 2</b></p>"
    assert text(HOSTILE).count("<") == 0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_a_thinned_curve_keeps_its_ends_and_its_extremes(values: list[float]) -> None:
    whole = Curve([float(i) for i in range(len(values))], values)
    thin = thinned(whole, 50)
    assert len(thin.steps) <= 50 or len(values) <= 50
    assert (thin.first, thin.last) == (whole.first, whole.last)
    assert (min(thin.values), max(thin.values)) == (min(values), max(values))
    assert list(thin.steps) == sorted(set(thin.steps))


def test_a_running_mean_is_of_long_curves_and_within_their_values() -> None:
    assert running_mean(Curve([0, 1], [1, 2])) is None
    mean = running_mean(Curve([float(i) for i in range(5000)], [float(i % 2) for i in range(5000)]))
    assert mean is not None and len(mean.steps) <= MAX_POINTS and all(0.4 < value < 0.6 for value in mean.values)


def test_parts_of_a_step_fill_it(tmp_path: Path) -> None:
    """Law: the bars are as high as the steps took; what no part explains is a part of its own."""
    record = read_run(made_run(tmp_path / "run", num_steps=10))
    times = step_times(record.rows)
    assert times is not None and "other" in times.parts and times.parts["evaluation"][:-1] == [0.0] * 9
    whole = curve(record.rows, "perf/step_time").values
    assert [sum(part[i] for part in times.parts.values()) for i in range(10)] == pytest.approx(whole)
    long = step_times(read_run(made_run(tmp_path / "long", "sft", num_steps=1000)).rows)
    assert long is not None and len(long.steps) <= 120 and long.steps_per_bar == 9


def test_the_timeline_shows_a_typical_step(tmp_path: Path) -> None:
    found = timelines(read_run(made_run(tmp_path / "run", num_steps=20)))
    assert {bar.name for bar in found[0].bars} == {"wait for batch", "generation", "train", "weight sync"}
    driver = [bar.seconds for bar in found[0].bars if bar.name != "generation"]
    assert sum(driver) <= found[0].seconds
    assert found[1].seconds > 1.5 * found[0].seconds and "evaluation" in [bar.name for bar in found[1].bars]


def test_the_timeline_shows_what_is_generated_while_a_step_trains(tmp_path: Path) -> None:
    bars = {bar.name: bar for bar in timelines(read_run(made_run(tmp_path / "run", "async", num_steps=20)))[0].bars}
    (train,) = bars["train"].stretches
    assert any(begin < train[1] and end > train[0] for begin, end in bars["generation"].stretches)
    assert bars["generation"].seconds > bars["wait for batch"].seconds


def test_the_time_of_a_step_is_that_without_its_evaluation(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", num_steps=10)
    rows = read_run(run).rows
    whole, evaluated = curve(rows, "perf/step_time"), curve(rows, "perf/eval_time")
    assert evaluated, "this run evaluates, or nothing is tested"
    expected = (sum(whole.values) - sum(evaluated.values)) / 10
    assert summarize(run).step_s == pytest.approx(expected)


def test_a_wait_for_requests_to_end_is_told_from_a_wait_for_a_batch() -> None:
    rows = [{"rollout/step": 0.0, "perf/rollout_wait_time": 1.0, "perf/generation_wait_time": 2.0}]
    times = step_times(rows)
    assert times is not None and times.parts == {"wait for batch": [1.0], "wait for generation": [2.0]}


@pytest.mark.usefixtures("without_picture")
def test_what_never_changes_is_said_and_not_drawn(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", num_steps=6)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in lines:
        row |= {key: 2e-5 for key in ("train/lr-pg_0",) if key in row}
        row |= {key: 0.0 for key in ("train/pg_clipfrac",) if key in row}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    page = write_report(run, tmp_path / "out").page.read_text()
    assert "The same in every step: learning rate 2e-5." in page
    assert "Clipped tokens" not in page, "where nothing was clipped there is nothing to see"
    assert "<h3>Learning rate" not in page and "<h3>Gradient norm" in page


@pytest.mark.usefixtures("without_picture")
def test_a_table_of_samples_has_no_column_that_fine_tuning_cannot_fill(tmp_path: Path) -> None:
    heads = {}
    samples = read_samples(made_run(tmp_path / "run", num_steps=3) / FILE_NAME)
    for kind in ("sync", "sft"):
        run = made_run(tmp_path / kind, kind, num_steps=3)
        if kind == "sft":
            SamplesFile(run / FILE_NAME).append([replace(one, reward=0.0, label=None) for one in samples[:2]])
        heads[kind] = re.findall('<th scope="col"[^>]*>([^<]*)</th>', write_report(run).page.read_text())
    assert {"reward", "label", "response"} <= set(heads["sync"])
    assert not {"reward", "label", "response"} & set(heads["sft"]) and "target" in heads["sft"]


def test_what_is_rounding_is_not_drawn_and_equal_lines_are_one(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", num_steps=6)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    def titles(**values: float) -> dict[str, list[str]]:
        changed = [row | {k: v for k, v in values.items() if "train/loss" in row} for row in rows]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
        return {one.panel.title: [series.label for series in one.series] for one in drawn_panels(read_run(run))}

    assert titles()["Policy loss"] == ["whole", "policy part"]
    assert titles(**{"train/loss": 0.5, "train/pg_loss": 0.5})["Policy loss"] == ["whole and policy part"]
    assert "Policy loss" not in titles(**{"train/loss": 1e-8, "train/pg_loss": -2e-9})


def test_a_small_speed_has_a_small_unit(tmp_path: Path) -> None:
    drawn = {one.panel.title: one for one in drawn_panels(read_run(made_run(tmp_path / "run", num_steps=3)))}
    speed = drawn["Training speed"]
    assert speed.panel.unit == "GFLOP/s" and 50 < speed.series[0].curve.first < 200


@given(
    spans=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12),
    windows=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 10)), max_size=8),
)
def test_the_steps_with_a_span_are_found(spans: list[tuple[int, int]], windows: list[tuple[int, int]]) -> None:
    made = [Span("driver", "train", begin, begin + long) for begin, long in sorted(spans)]
    steps = {i: (float(begin), float(begin + long)) for i, (begin, long) in enumerate(windows)}
    assert _covered(made, steps) == [
        i for i, (begin, end) in steps.items() if any(_inside(s, begin, end) for s in made)
    ]


def test_the_name_of_a_folder_says_nothing_of_the_loop() -> None:
    rows = [{"train/step": 1.0}]
    for command, kind in {
        ("slime", "train", "--run-dir", "runs/train-async-baseline"): RunKind.SYNC,
        ("slime", "train-async", "--run-dir", "runs/a"): RunKind.ASYNC,
        ("train_async.py",): RunKind.ASYNC,
    }.items():
        assert kind_of(rows, {}, [Start(None, None, {"command": list(command)})]) == kind


def test_samples_of_a_long_run_are_of_its_first_its_last_and_steps_between(tmp_path: Path) -> None:
    samples = read_run(made_run(tmp_path / "run", num_steps=200)).samples
    chosen = chosen_samples(samples)
    assert len(chosen) <= MAX_SAMPLES and chosen[0].step == 199 and chosen[-1].step == 0
    assert chosen[0].picked == "best"


def test_a_run_without_a_step_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="nothing to report"):
        write_report(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err


@pytest.mark.usefixtures("without_picture")
def test_the_command_says_where_the_files_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(tmp_path / "run", num_steps=4)
    assert main(["report", str(run)]) == 0
    told = capsys.readouterr().out
    assert all(str(run / f"report.{suffix}") in told for suffix in ("html", "png")) and "| before | after |" in told


@pytest.mark.usefixtures("without_picture")
def test_a_run_folder_with_nothing_but_metrics_gets_a_report(tmp_path: Path) -> None:
    made_run(tmp_path / "run", num_steps=4)
    for name in ("run.json", "args.json", "samples.jsonl", "traces/driver-100.json"):
        (tmp_path / "run" / name).unlink()
    assert write_report(tmp_path / "run").title == "slime run"


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("assets/demo/train.jsonl", "demo"),
        ("gsm8k/train-00000-of-00001.parquet@[0:100]", "gsm8k"),
        ("chats.jsonl", "chats"),
        ("rg:spell_backward?size=500&seed=1", "spell_backward"),
    ],
)
def test_the_title_names_data_that_says_something(data: str, name: str) -> None:
    title = report_title({"hf_checkpoint": "models/tiny", "prompt_data": data, "advantage_estimator": "grpo"})
    assert title == f"tiny, {name}, GRPO"


@pytest.mark.parametrize("given", ["mad", "my/mad.py", "my.mad", "my.py:mad"])
def test_the_title_names_an_own_estimator_without_its_path(given: str) -> None:
    title = report_title({"prompt_data": "chats.jsonl", "advantage_estimator": given})
    assert title == ("chats, MAD" if given == "mad" else "chats, mad")


def test_numbers_are_short() -> None:
    assert [short(v) for v in (0, 0.12345, 1234.5, 5e-5, 1.5e7)] == ["0", "0.123", "1,234", "5e-5", "1.5e7"]


def test_titles_of_panels_are_unique() -> None:
    titles = [panel.title for panel in PANELS]
    assert len(titles) == len(set(titles))


@pytest.mark.usefixtures("without_picture")
def test_values_under_the_pointer_are_those_that_were_logged(tmp_path: Path) -> None:
    """Law: coordinates of a picture are rounded, values are not."""
    run = made_run(tmp_path / "run", num_steps=6)
    page = write_report(run).page.read_text()
    shown = re.search(r'data-name="to the old policy"[^>]*data-y="([^"]*)"', page)
    assert shown is not None and shown[1] is not None
    logged = curve(read_run(run).rows, "train/ppo_kl").values
    assert [float(value) for value in shown[1].split()] == pytest.approx(logged, rel=1e-2)


def run_with(folder: Path, *rows: dict[str, float | str]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"time": i, **row}) + "\n" for i, row in enumerate(rows)))
    return folder


def limits(folder: Path, title: str) -> tuple[float, float]:
    return value_limits(next(one for one in drawn_panels(read_run(folder)) if one.panel.title == title))


@pytest.mark.parametrize(
    ("title", "key", "values", "fits"),
    [
        ("Reward", "rollout/raw_reward", (0.001, 0.002), (0.0, 0.00216)),
        ("Reward", "rollout/raw_reward", (0.001, 0.9), (0.0, 1.05)),
        ("Reward", "rollout/raw_reward", (0.0, 0.0), (0.0, 1.05)),
        ("Truncated", "rollout/truncated_ratio", (0.0, 0.02), (0.0, 0.0216)),
        ("Reward", "rollout/raw_reward", (3.0, 3.0000001), (2.7, 3.3000001)),
        ("Reward", "rollout/raw_reward", (3.0,), (2.7, 3.3)),
    ],
)
def test_axes_fit_the_data_and_do_not_magnify_rounding(
    title: str, key: str, values: tuple[float, ...], fits: tuple[float, float], tmp_path: Path
) -> None:
    run = run_with(tmp_path / "run", *({"rollout/step": i, key: value} for i, value in enumerate(values)))
    assert limits(run, title) == pytest.approx(fits)


def test_counts_are_not_drawn_as_scores(tmp_path: Path) -> None:
    scores = {
        "eval/sums": 0.5,
        "eval/sums-num_failed": 7.0,
        "eval/num_failed": 7.0,
        "eval/sums-num_failed_samples": 7.0,
    }
    run = run_with(tmp_path / "run", {"eval/step": -1, **scores}, {"eval/step": 0, **scores})
    (panel,) = drawn_panels(read_run(run))
    assert [one.label for one in panel.series] == ["sums"] and summarize(run).evals == {"sums": (0.5, 0.5)}


def test_what_was_measured_once_has_no_change(tmp_path: Path, without_picture: None) -> None:
    """Law: a run of one step claims no progress: one value is neither before nor after."""
    run = run_with(
        tmp_path / "run", {"rollout/step": 0, "rollout/raw_reward": 0.25}, {"train/step": 0, "train/loss": 1}
    )
    report = write_report(run)
    said = summary_text(report.summary)
    assert "- mean reward of a step: 0.250 (measured once)" in said and "before" not in said and "+0.000" not in said
    assert "measured once" in report.page.read_text() and "→" not in report.page.read_text()


@pytest.mark.parametrize(
    ("norms", "settings", "said"),
    [
        ([0.0, 0.0], {}, "no weight changed; an export equals the initial model"),
        ([0.0], {"megatron": {"weight_decay": 0.1}, "lora_rank": 4}, "no weight changed; an export"),
        ([0.0], {"megatron": {"weight_decay": 0.1}}, "only weight decay (--weight-decay 0.1) changed weights"),
        ([0.0, 0.5], {}, None),
        ([0.0, "nan"], {}, None),
        ([], {}, None),
    ],
)
def test_a_run_without_any_gradient_has_trained_nothing(
    norms: list[float | str], settings: dict[str, object], said: str | None, tmp_path: Path
) -> None:
    """Law: the end of a run says so, on the console (the summary) and in the report."""
    rows = [{"train/step": i, "train/grad_norm": norm} for i, norm in enumerate(norms)]
    run = run_with(tmp_path / "run", {"rollout/step": 0, "rollout/raw_reward": 0.25}, *rows)
    (run / "args.json").write_text(json.dumps(settings))
    told = summary_text(summarize(run))
    assert ("nothing trained" in told) == (said is not None) and (said or "- warnings: none") in told


def test_nan_is_named_where_it_cannot_be_drawn(tmp_path: Path, without_picture: None) -> None:
    norms = [1.0, "nan", 2.0, "inf"]
    run = run_with(tmp_path / "run", *({"train/step": i, "train/grad_norm": norm} for i, norm in enumerate(norms)))
    report = write_report(run)
    said = "NaN or infinite, so not in the curves: `train/grad_norm`: step 1, step 3"
    assert said in summary_text(report.summary)
    assert "Not drawn, because NaN or infinite: step 1, step 3." in report.page.read_text()


def test_the_trace_command_counts_files_not_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(tmp_path / "run", num_steps=2)
    assert main(["trace", str(run)]) == 0
    assert re.match(r"\d+ events from 1 trace files in ", capsys.readouterr().out)
