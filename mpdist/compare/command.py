"""`mpdist compare`: reads, compares or refuses, prints, and says by its status whether the gates hold."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mpdist.compare import fairness
from mpdist.compare.analyse import WARMUP, compare
from mpdist.compare.tree import Comparison
from mpdist.errors import GateFailed, UsageError
from mpdist.run_files import readable


def run(
    paths: Sequence[str],
    *,
    treatment: Sequence[str] = (),
    allow: Sequence[str] = (),
    against: str | None = None,
    warmup: int | None = None,
    target: float | None = None,
    gates: Sequence[str] = (),
    as_json: bool = False,
    html: str | None = None,
    wandb: str | None = None,
) -> int:
    """Prints the comparison. Raises UsageError where it is refused, GateFailed where a gate does not hold; see `compare`.

    html: a file to draw it into, also where it is refused. wandb: online or offline, for a W&B run of its own.
    """
    with readable(paths[0]):
        found = compare(
            paths,
            treatment=treatment,
            allow=allow,
            against=against,
            warmup=WARMUP if warmup is None else warmup,
            target=target,
            gate=gates,
        )
    if html is not None:
        _draw(found, html)
    if as_json:
        from mpdist.compare.report import as_json as report
        from mpdist.lines import dump

        print(dump(report(found), indent=2))
    if found.refused:
        raise fairness.refusal(found.refused, found.treatment)
    if wandb is not None:
        from mpdist.compare import tracked

        tracked.show(found, wandb)
    if not as_json:
        from mpdist.compare.text import text

        print(text(found))
    _check(found)
    return 0


def _draw(found: Comparison, file: str) -> None:
    from mpdist.compare import html

    path = Path(file)
    try:
        path.write_text(html.page(found), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {file}", error.strerror or str(error), "give a file that can be written") from None
    print(f"the comparison is drawn in {path.absolute()}", file=sys.stderr, flush=True)


def _check(found: Comparison) -> None:
    failed = [one for one in found.gates if not one.holds]
    if not failed:
        return
    lines = "".join(f"\n    {one.gate} for {one.arm}: {one.text}" for one in failed)
    held = len(found.gates) - len(failed)
    raise GateFailed(
        f"{len(failed)} of {len(found.gates)} gates {'do' if len(failed) > 1 else 'does'} not hold:{lines}",
        "a gate holds where the 95 % bound is on its right side" if any(one.holds is None for one in failed) else "",
        "look at the report above" + (f"; {held} hold" if held else ""),
    )
