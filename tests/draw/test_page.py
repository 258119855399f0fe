"""The HTML page in a real browser: nothing overlaps, layers unfold, keyboards reach it all.

A script of the test's own runs in the page and leaves what it saw in the document's title.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Stack, mlp_contracts

import fxboundary as fb
from fxboundary.draw import draw
from fxboundary.static import capture

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on the PATH to open a page in")

SEEN = """
<script>
{
const width = %d, frame = document.documentElement;
frame.style.width = width + "px";
const seen = (action) => {
  action();
  redraw();
  const root = document.querySelector(".root");
  const area = (element) => element.getBoundingClientRect();
  const boxes = [...root.querySelectorAll(".card, .head, .bar")].map(area);
  const overlaps = boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) =>
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1 &&
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1)).length;
  const clipped = [...document.querySelectorAll(".port, .body, .head")]
    .filter((e) => e.scrollWidth > e.clientWidth + 1).length;
  return {
    overlaps, clipped,
    cards: root.querySelectorAll(".card").length,
    arrows: root.querySelectorAll(".arrow").length,
    heads: [...root.querySelectorAll(".head .name")].map((e) => e.textContent),
    right: Math.max(...[...document.querySelectorAll(".card")].map((e) => area(e).right)),
    expanded: document.querySelector("button").ariaExpanded,
    names: [...root.querySelectorAll(".port")].map((e) => e.ariaLabel.split(": ")[0]),
  };
};
const button = document.querySelector("button");
const port = document.querySelector(".port");
const shown = () => getComputedStyle(port.querySelector(".tip")).display;
const result = {folded: seen(() => {}), unfolded: seen(() => button.click())};
result.again = seen(() => button.click());
button.focus();
result.reached = document.activeElement === button;
const before = shown();
port.focus();
result.tip = [before, shown(), port.querySelector(".tip").textContent];
port.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape", bubbles: true}));
result.tip.push(shown());
result.paper = getComputedStyle(document.body).backgroundColor;
document.title = JSON.stringify(result);
}
</script></body>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "boundaries.html"
    plan = fb.Plan({"tp": 2}, mlp_contracts(sequence_parallel=True))
    draw(capture(Stack(layers=3).to("meta"), plan, torch.zeros(2, 8, 8)), path)
    return path


def look(page: Path, width: int, *arguments: str) -> dict[str, Any]:
    assert BROWSER is not None
    probe = page.with_name(f"probe-{width}.html")
    probe.write_text(page.read_text().replace("</body>", SEEN % width))
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    profile = page.with_name(f"profile-{width}")
    command += [f"--user-data-dir={profile}", f"--window-size={max(width, 500)},2000", *arguments]
    done = subprocess.run(
        [*command, probe.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    found: dict[str, Any] = json.loads(title.replace("&gt;", ">").replace("&amp;", "&"))
    return found


@pytest.mark.parametrize("width", [400, 1000, 2000])
def test_nothing_overlaps_or_is_clipped_at_any_width(page: Path, width: int) -> None:
    found = look(page, width)
    for state in ("folded", "unfolded", "again"):
        assert (found[state]["overlaps"], found[state]["clipped"]) == (0, 0), state
        assert found[state]["right"] <= width


def test_repeated_layers_unfold_with_their_names_and_fold_again(page: Path) -> None:
    found = look(page, 1000)
    folded, unfolded, again = found["folded"], found["unfolded"], found["again"]
    assert (folded["cards"], unfolded["cards"]) == (5, 11)
    assert unfolded["heads"] == ["layers.0", "layers.1", "layers.2"]
    assert "layers.2.mlp:in.x" in unfolded["names"]
    assert (folded["arrows"], unfolded["arrows"]) == (5, 5 + 2 * 4)
    assert [s["expanded"] for s in (folded, unfolded, again)] == ["false", "true", "false"]
    assert again == folded


def test_bytes_are_shown_on_focus_until_escape(page: Path) -> None:
    found = look(page, 1000)
    assert found["reached"]
    hidden, shown, text, after = found["tip"]
    assert (hidden, shown, after) == ("none", "block", "none")
    assert "layers.0.norm:param.weight" in text


def test_the_page_follows_the_readers_dark_or_light(page: Path) -> None:
    dark = look(page, 900, "--blink-settings=preferredColorScheme=0")
    light = look(page, 901, "--blink-settings=preferredColorScheme=1")
    assert dark["paper"] == "rgb(13, 17, 23)"
    assert light["paper"] == "rgb(255, 255, 255)"
