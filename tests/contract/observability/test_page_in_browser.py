"""The page of a run in a real browser: nothing to complain about, everything drawn, nothing hostile runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from slime.observability.report import write_report
from tests.support.browser import Browser, find_browser
from tests.support.made_runs import made_run
from tests.support.marks import quick

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        find_browser() is None, reason="there is no browser: apt-get install chromium, or name one by CHROMIUM"
    ),
]

SIZES = """[...document.querySelectorAll("svg")].map((svg) => {
  const box = svg.getBoundingClientRect();
  const drawn = [...svg.querySelectorAll(".series, .bar")].map((one) => one.getBoundingClientRect());
  return [box.width, box.height, drawn.length, Math.max(...drawn.map((one) => Math.max(one.width, one.height)))];
})"""
"""Of each picture: width, height, number of curves or bars, and the largest extent of one."""
OVERLAPS = """[...document.querySelectorAll("svg")].flatMap((svg) => {
  const boxes = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
  return boxes.flatMap(([name, one], i) => boxes.slice(i + 1).flatMap(([other, two]) =>
    one.left < two.right && two.left < one.right && one.top < two.bottom - 2 && two.top < one.bottom - 2
      ? [`${svg.getAttribute("aria-label").slice(0, 40)}: ${name} and ${other}`] : []));
})"""
"""Labels of a picture that lie over each other."""
OUTSIDE = """[...document.querySelectorAll("svg text")].flatMap((text) => {
  const one = text.getBoundingClientRect(), box = text.closest("svg").getBoundingClientRect();
  return one.left < box.left - 1 || one.right > box.right + 1 || one.bottom > box.bottom + 1 ? [text.textContent] : [];
})"""
"""Labels that reach out of their picture."""
POINT = """(() => {
  const svg = document.querySelector("svg.chart"), box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 5, clientY: box.top + 20}));
  const tip = document.querySelector(".tip");
  return [tip.hidden, tip.textContent];
})()"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    """One browser; each test opens a page of its own."""
    program = find_browser()
    assert program is not None, "the tests are skipped without a browser"
    async with Browser(program) as browser:
        yield browser


@pytest.mark.parametrize(
    ("kind", "num_steps", "resumed_at", "at_least"),
    quick(
        [("sync", 30, 14, 14), ("async", 60, None, 15), ("sft", 60, None, 5), ("evaluation", 1, None, 2)],
        ("sync", 30, 14, 14),
    ),
)
@pytest.mark.slow
async def test_a_page_is_drawn_without_a_complaint(
    kind: str, num_steps: int, resumed_at: int | None, at_least: int, tmp_path: Path, browser: Browser
) -> None:
    """Law: the console stays silent, every picture has a size and something in it, no label lies over another."""
    run = made_run(tmp_path / "run", kind, num_steps=num_steps, resumed_at=resumed_at)
    await browser.open(write_report(run).page)
    sizes = await browser.ask(SIZES)
    assert len(sizes) >= at_least
    assert all(width > 200 and height > 60 and count and extent > 2 for width, height, count, extent in sizes), sizes
    assert await browser.ask(OVERLAPS) == []
    assert await browser.ask(OUTSIDE) == []
    assert await browser.ask("document.documentElement.scrollWidth <= window.innerWidth"), "it is wider than the window"
    hidden, told = await browser.ask(POINT)
    assert not hidden and told.startswith("step "), told
    assert browser.complaints == []


async def test_a_hostile_response_is_text(tmp_path: Path, browser: Browser) -> None:
    """Law: markup in what a model said is shown as text; no element and no program is made of it."""
    page = write_report(made_run(tmp_path / "run", num_steps=8)).page
    await browser.open(page)
    assert await browser.ask("document.querySelectorAll('img, script').length") == 1, "a response became an element"
    assert "owned" not in await browser.ask("document.title")
    assert await browser.ask('document.body.textContent.includes("</pre><script>document.title")')
    assert browser.complaints == []


@pytest.mark.slow
async def test_the_policy_of_the_page_stops_other_scripts(tmp_path: Path, browser: Browser) -> None:
    """Law: even a script that got into the page does not run: the page names the one that may."""
    page = write_report(made_run(tmp_path / "run", num_steps=4)).page
    page.write_text(page.read_text().replace("</main>", "</main><script>document.title = 'owned'</script>"))
    await browser.open(page)
    assert await browser.ask("document.title") != "owned"
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)
