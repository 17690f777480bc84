"""Whether the histories of a run hold all that its counters say: a file that was cut shows nothing by itself.

Attempts and steps are counted in three places. Each attempt that was not applied has a `skip` event, each row of
metrics.jsonl says how many there had been (`attempt - step`, `scale/skipped`), and status.json says where the run ended.
Of a run that is under way, or was killed, the last of it may be missing, which is told; of one that came to an end of its
own nothing may.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpdist.compare.tree import Row, Run
from mpdist.errors import UsageError

ENDED = ("done", "preempted", "diverged")  # by the run's own last word, after it had written everything else
_NO_LABELS = "no label token"  # as a skip event has it: `scale/skipped` leaves these out
_DO = "put the file back as it was written, or leave the run out"


def check(run: Run) -> None:
    """Raises UsageError, with the file and both numbers, where a history lacks something."""
    _events(run)
    if run.state not in ENDED:
        return
    for name in run.torn:
        what = f"{run.path / name} ends in the middle of a line"
        raise UsageError(what, f"status.json says {run.state} at step {run.status['step']:,}, the last whole row is of step "
                         f"{_last(run):,}", _DO)  # fmt: skip
    if (missing := lacking(run)) is not None:
        raise UsageError(f"{run.path / 'metrics.jsonl'} {missing}", "a row is missing or too many", _DO)


def lacking(run: Run) -> str | None:
    """How metrics.jsonl and status.json disagree on where the run is; None where they do not."""
    step, last = int(run.status.get("step") or 0), run.train[-1]
    told = f"status.json says {run.state} at step {step:,}"
    if last["step"] > step and run.state in ENDED:
        return f"goes to step {last['step']:,}; {told}"
    every, begun = int(run.values.get("track.every") or 1), max(int(last["step"]), _begun(run))
    # Only every so manieth step has a row; the last of all has one unless attempts behind it were skipped.
    logged = step // every > begun // every
    final = run.state == "done" and step > last["step"] and run.attempts - last["attempt"] == step - last["step"]
    if logged or final:
        return f"ends at step {last['step']:,}; {told}"
    evaluates = any(key.startswith("data.eval.") for key in run.values)
    if run.state == "done" and evaluates and (not run.evals or run.evals[-1]["step"] != step):
        at = f"its last evaluation at step {run.evals[-1]['step']:,}" if run.evals else "no evaluation"
        return f"has {at}; {told}, which ends with one"
    return None


def _last(run: Run) -> int:
    return max(int(row["step"]) for row in (*run.train[-1:], *run.evals[-1:]))


def _starts(run: Run) -> list[Row]:
    return [event for event in run.events if event["event"] == "start"]


def _begun(run: Run) -> int:
    """The step from which the last session went on."""
    return int(_starts(run)[-1]["step"])


def _events(run: Run) -> None:
    path, starts = run.path / "events.jsonl", _starts(run)
    if not starts:
        raise UsageError(f"{path} is missing, or its beginning is: it has no start event",
                         f"metrics.jsonl goes to step {run.steps:,}, attempt {run.train[-1]['attempt']:,}; how many of those were "
                         "skipped, and what else happened, is not known", _DO)  # fmt: skip
    before = int(starts[0]["attempt"]) - int(starts[0]["step"])  # of the run whose checkpoint this one began from
    for where, row in _counters(run):
        skips = [event for event in run.skips if event["attempt"] <= row["attempt"]]
        counts = [(row["attempt"] - row["step"] - before, len(skips), "attempt - step")]
        if not before and "scale/skipped" in row:
            nonfinite = sum(event["reason"] != _NO_LABELS for event in skips)
            counts.append((row["scale/skipped"], nonfinite, "scale/skipped"))
        for counted, told, name in counts:
            if counted != told:
                raise UsageError(f"{path} tells of {told:,} skipped attempts, {where} counts {counted:,} ({name})",
                                 f"up to attempt {row['attempt']:,}, step {row['step']:,}: one of the files was cut", _DO)  # fmt: skip


def _counters(run: Run) -> Iterator[tuple[str, Row]]:
    yield "metrics.jsonl", run.train[-1]
    if run.state in ENDED:
        yield "status.json", {"step": run.status["step"], "attempt": run.status["attempt"]}
