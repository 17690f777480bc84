"""A comparison as a page of its own: verdicts, curves, distributions, tables, what was refused or allowed, what it ran on.

One file that fetches nothing and runs nothing (mpdist.paper). Arms differ in colour, dashes and marks, so that a print in
grey and any eye tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape

from mpdist import paper
from mpdist.compare import html_data, html_draw, text
from mpdist.compare.tree import Comparison, Difference
from mpdist.compare.verdict import times, within
from mpdist.units import format_bytes

# Every figure of a comparison that was not refused, by the id that it has on the page; residuals are `residual-ARM`.
FIGURES = ("loss-steps", "loss-tokens", "loss-seconds", "step-time", "scale", "memory")
ABREAST = 4  # arms in a table with a column for each
_KINDS = {"faster": "good", "lower": "good", "slower": "bad", "higher": "bad", "diverged": "bad", "up": "bad"}


def page(found: Comparison) -> str:
    """The whole file."""
    folders = sorted({run.path.parent.name for arm in found.arms for run in arm.runs})
    title = f"Comparison: {', '.join(folders)}"
    parts = [_header(found, title), _said(found)]
    if not found.refused:
        parts += [_losses(found), _residuals(found), _times(found), _scales(found), _memory(found), *_tables(found)]
    parts += [_guide(found), _accepted(found), _environment(found)]
    return paper.document(title, filter(None, parts))


def _header(found: Comparison, title: str) -> str:
    treatment = ", ".join(found.varied) or "nothing: one configuration against itself"
    seeds = f"{len(found.seeds)} seed{'s' * (len(found.seeds) != 1)} ({', '.join(map(str, found.seeds))})"
    lines = [f"{len(found.arms)} arms against {found.reference}, {seeds}", f"what differs: {treatment}"]
    tiles = [_tile(found, i) for i in range(len(found.verdicts))]
    if found.refused:
        what = f"{len(found.refused)} difference{'s' * (len(found.refused) != 1)}"
        under = f"<b>REFUSED</b> <span>{what} beside the treatment</span>"
        tiles = [f'<div class="bad"><dt>Nothing was compared</dt><dd>{under}</dd></div>']
    said = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f'<header><h1>{escape(title)}</h1>{said}<dl class="tiles">{"".join(tiles)}</dl></header>'


def _tile(found: Comparison, i: int) -> str:
    """An arm: its speed, what is said of it and of the loss. Marked by the worse of the two claims."""
    verdict, pair = found.verdicts[i], found.pairs[i]
    words = [_KINDS.get(word, "") for word in (verdict.speed, verdict.loss, verdict.drift)]
    kind = "bad" if "bad" in words else "good" if "good" in words else ""
    defects = sorted({one.name for one in found.defects if one.arm == verdict.arm})
    speed = f"{times(pair.speed.value)}x" if pair.speed is not None else "speed unknown"
    gap = (
        f" ({within(pair.loss_gap)})"
        if pair.loss_gap is not None and verdict.loss not in ("withheld", "diverged")
        else ""
    )
    name = f"{verdict.arm}{' (A/A control)' * (verdict.arm == found.control)} against {verdict.against}"
    under = [f"speed: {verdict.speed}", f"loss: {verdict.loss}{gap}", *(f"defect: {one}" for one in defects)]
    return (
        f'<div class="{"bad" if defects else kind}"><dt>{escape(name)}</dt>'
        f"<dd><b>{escape(speed)}</b> <span>{'<br>'.join(map(escape, under))}</span></dd></div>"
    )


def _items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{escape(line)}</li>" for line in lines)


def _said(found: Comparison) -> str:
    """Everything that the head of the terminal's report has."""
    lines = [verdict.line for verdict in found.verdicts]
    lines += [f"REFUSED: {one}" for one in found.refused]
    lines += [f"ALLOWED: {one}: not the treatment, accepted by --allow" for one in found.allowed]
    lines += [f"DEFECT: {one.run}: {one.name}: {one.text}" for one in found.defects]
    lines += [f"gate {one.gate} for {one.arm}: {text.HOLDS[one.holds]}: {one.text}" for one in found.gates]
    lines += [f"note: {note.text}" for note in found.notes]
    lines += [" ".join(line.split()) for line in text.bases(found)]
    return paper.section("Verdicts", f'<ul id="verdicts">{_items(lines)}</ul>', apart=False)


# ------------------------------------------------------------------------------------------------- drawings


def _losses(found: Comparison) -> str:
    over = ((html_data.STEP, "loss-steps"), (html_data.TOKENS, "loss-tokens"), (html_data.TIME, "loss-seconds"))
    return paper.section("Loss", "\n".join(paper.figure(html_draw.loss(found, x), name=name) for x, name in over))


def _residuals(found: Comparison) -> str:
    drawn = [paper.figure(html_draw.residual(found, pair), name=f"residual-{pair.arm}") for pair in found.pairs]
    return paper.section("Paired by seed: the arm's loss minus the reference's", "\n".join(drawn))


def _times(found: Comparison) -> str:
    drawn = html_draw.step_times(found) or _nothing("No run has two logged steps behind the warm-up.")
    return paper.section("Step times", paper.figure(drawn, name="step-time"))


def _scales(found: Comparison) -> str:
    drawn = html_draw.scales(found) or _nothing("No arm scaled its loss, and no attempt was skipped.")
    return paper.section("Loss scale and skipped attempts", paper.figure(drawn, name="scale"), apart=False)


def _memory(found: Comparison) -> str:
    drawn, style, rows = html_draw.memory(found)
    keys = paper.legend(style, rows) if rows else _nothing("No run has a plan or a ledger of its memory.")
    return paper.section("Memory of a rank", paper.figure(keys + drawn, name="memory"), apart=False)


def _nothing(said: str) -> str:
    return f"<p>{escape(said)}</p>"


# --------------------------------------------------------------------------------------------------- tables


def _tables(found: Comparison) -> list[str]:
    named = (
        ("Every arm's figures", text.arms(found), True), ("At matched steps", text.steps(found), False),
        ("At matched seconds", text.seconds(found), False), ("To reach a loss", text.to_loss(found), False),
    )  # fmt: skip
    return [
        paper.section(title, "\n".join(map(_table, _abreast(one) if apart else [_of_arms(one)])), apart)
        for title, one, apart in named
        if one.rows
    ]


def _of_arms(one: text.Table) -> text.Table:
    """What heads the first column in the terminal is the section's title here."""
    return replace(one, head=["arm", *one.head[1:]])


def _abreast(one: text.Table) -> list[text.Table]:
    """A table with a column for each arm, in parts that a page has room for."""
    starts = range(1, len(one.head), ABREAST)
    return [
        text.Table([one.head[0], *one.head[i : i + ABREAST]], [[row[0], *row[i : i + ABREAST]] for row in one.rows])
        for i in starts
    ]


def _table(one: text.Table) -> str:
    """A row whose first cell begins with blanks belongs to the one above it."""

    def cell(value: str) -> str:
        blanks = len(value) - len(value.lstrip())
        return "&nbsp;" * 2 * blanks + escape(value.strip())

    body = [[cell(value) for value in row] for row in one.rows]
    note = f'<p class="note">{escape(one.note)}</p>' if one.note else ""
    made = paper.table([escape(name) for name in one.head], [body], range(1, len(one.head)))
    return (f'<div class="dense">{made}</div>' if len(one.head) > 2 else made) + note


def _guide(found: Comparison) -> str:
    if not found.guide:
        return ""
    rows = [[escape(one.arm or "all"), escape(one.rule), escape(one.text), escape(one.source)] for one in found.guide]
    made = paper.table(["arm", "rule", "what the figures recommend", "source"], [rows], range(0))
    return paper.section("What the figures recommend", f'<div id="guide">{made}</div>', apart=False)


def _accepted(found: Comparison) -> str:
    """What differs between the arms: the treatment, what was refused, what was allowed."""
    rows = [
        ["the treatment", escape(key), _values((arm.name, arm.settings.get(key)) for arm in found.arms)]
        for key in found.varied
    ]
    rows += [_differs("refused", one) for one in found.refused] + [_differs("allowed", one) for one in found.allowed]
    if not rows:
        return ""
    made = paper.table(["", "key", "values"], [rows], range(0))
    allowed = escape(f"May differ: {', '.join(found.treatment)}. Anything else is refused unless --allow names it.")
    return paper.section("What differs", f'<div id="differs">{made}</div><p class="note">{allowed}</p>', apart=False)


def _values(values: Iterable[tuple[str, object]]) -> str:
    from mpdist.config.describe import show

    return escape(", ".join(f"{show(value)} in {who}" for who, value in values))


def _differs(kind: str, one: Difference) -> list[str]:
    values = one.text or ", ".join(f"{value} in {who}" for who, value in one.values)
    return [f"<b>{kind}</b>", escape(one.key), escape(values)]


def _environment(found: Comparison) -> str:
    """Of versions those that a training run imports come first as they were recorded."""

    def shown(key: str, value: object) -> str:
        if key.endswith("_bytes") and isinstance(value, int):
            return format_bytes(value)
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, dict):
            return ", ".join(f"{name} {version}" for name, version in value.items())
        return ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)

    rows = [
        [escape(key.removesuffix("_bytes").replace("_", " ")), escape(shown(key, value))]
        for key, value in found.environment.items()
    ]
    made = paper.table(["what surrounded the runs", ""], [rows], range(0))
    return paper.section("Environment", f'<div id="environment">{made}</div>', apart=False)
