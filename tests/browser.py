"""A page in a real headless Chromium: what it prints, what it complains of, what is cut off or lies over another.

Tests that ask for it are skipped where there is no Chromium; `tests/run.sh` installs one where it may.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
# What the page cannot say of itself: what is cut off, and which texts of a drawing lie over each other.
LOOK = """
<script>
const found = {cut: [], over: [], blocks: [], texts: 0, drawings: 0, wide: document.documentElement.scrollWidth};
const near = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
  && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
for (const drawing of document.querySelectorAll("svg:not(.swatch)")) {
  const frame = drawing.getBoundingClientRect(), texts = [...drawing.querySelectorAll("text")];
  found.drawings += 1; found.texts += texts.length;
  const boxes = texts.map(t => t.getBoundingClientRect());
  boxes.forEach((box, i) => {
    if (box.left < frame.left - 0.5 || box.right > frame.right + 0.5 || box.top < frame.top - 0.5
        || box.bottom > frame.bottom + 0.5) found.cut.push(texts[i].textContent);
    for (let j = 0; j < i; j++) if (near(box, boxes[j])) found.over.push(texts[j].textContent + " | " + texts[i].textContent);
  });
  const stacks = {};  // the bytes of what stands at the same place, and of the fullest place
  for (const block of drawing.querySelectorAll("rect[data-bytes]"))
    stacks[block.getAttribute("x")] = (stacks[block.getAttribute("x")] || 0) + Number(block.dataset.bytes);
  found.blocks.push(Math.max(0, ...Object.values(stacks)));
  // An amount stands in the block that was drawn before it, with no other text between them.
  for (const block of drawing.querySelectorAll("rect[data-bytes]")) {
    const edge = block.getBoundingClientRect();
    let next = block.nextElementSibling;
    while (next && (next.matches("path.hatch") || (next.matches("rect") && !next.dataset.bytes))) next = next.nextElementSibling;
    for (; next && next.matches("text") && next.getAttribute("font-size") == "10"; next = next.nextElementSibling) {
      const box = next.getBoundingClientRect();
      if (box.left < edge.left - 0.5 || box.right > edge.right + 0.5) found.cut.push("in its block: " + next.textContent);
    }
  }
}
for (const box of document.querySelectorAll("p, dt, dd, b, li, td, th, h1, h2, figcaption, section"))
  if (box.scrollWidth > box.clientWidth + 1 && box.clientWidth) found.cut.push("wider than its box: " + box.textContent);
const report = document.createElement("pre");
report.id = "report"; report.textContent = JSON.stringify(found);
document.body.append(report);
</script>
"""


@functools.cache
def browser() -> str:
    for name in NAMES:
        path = shutil.which(name)
        # Ubuntu's package of that name is a stub which asks for a snap.
        if path and subprocess.run([path, "--version"], capture_output=True, timeout=60).returncode == 0:
            return path
    pytest.skip(f"none of {', '.join(NAMES)} is installed: the picture is not looked at in a browser")


def chromium(tmp_path: Path, html: str, *arguments: str) -> tuple[str, str]:
    """(what it prints, what it complains of) for a page opened from a file."""
    file = tmp_path / "page.html"
    file.write_text(html, encoding="utf-8")
    command = [browser(), *QUIET, f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", *arguments]
    done = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    complaints = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return done.stdout, "\n".join(complaints)


def looked_at(tmp_path: Path, html: str, width: int = 1130) -> dict[str, Any]:
    """What LOOK finds; it needs the page's own policy out of its way."""
    free = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    assert free != html
    dom, complaints = chromium(
        tmp_path, free.replace("</body>", f"{LOOK}</body>"), "--dump-dom", f"--window-size={width},900"
    )
    assert complaints == ""
    report = re.search(r'<pre id="report">(.*?)</pre>', dom, re.DOTALL)
    assert report is not None, dom[-2000:]
    found: dict[str, Any] = json.loads(unescape(report[1]))
    return found
