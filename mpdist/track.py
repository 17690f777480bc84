"""Showing a run while it trains: W&B from one rank, and progress on the terminal.

Neither may ever stop, block or delay a run; the record is `metrics.jsonl`. W&B lives in a process of its own
(`mpdist.wandb_process`): here is a pipe to it, a bounded buffer in front of the pipe, and a bounded wait at the end.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from mpdist.env import masked
from mpdist.lines import number, write_atomic

START_S = 8.0  # what wandb may take to come up online before it goes offline (wandb adds up to 10 s of its own)
FINISH_S = 20.0  # what the end of a run may be delayed
BUFFER_BYTES = 16 << 20
_STRICTNESS = {"online": 0, "offline": 1, "dryrun": 1, "disabled": 2}
_ROOT = str(Path(__file__).resolve().parent.parent)


def _to_stderr(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


class Tracker:
    """One W&B run for one training run, over all its sessions; does nothing on ranks but 0 or when disabled.

    mode: online, offline or disabled; WANDB_MODE in the environment counts where it is stricter.
    run_id: default: the one this run directory had before, or a new one. It is kept in RUN_DIR/wandb/id.
    config: shown beside the run; what looks like a secret is masked. group: of runs that belong together. job: its kind,
    where it is none that trains.
    warn: told of trouble, in this thread, at the next `log` or `finish`; once a kind of trouble.
    """

    def __init__(
        self,
        mode: str,
        project: str,
        name: str,
        run_dir: str | Path,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        group: str | None = None,
        job: str | None = None,
        rank: int = 0,
        warn: Callable[[str], None] = _to_stderr,
        start_s: float = START_S,
        finish_s: float = FINISH_S,
    ) -> None:
        self.mode = strictest(mode) if rank == 0 else "disabled"
        self.url: str | None = None
        self.state = "disabled" if self.mode == "disabled" else "starting"  # then online, offline or off
        self.dropped = 0
        self._warn, self._told = warn, set[str]()
        self._finish_s = finish_s
        self._process: subprocess.Popen[bytes] | None = None
        self._out, self._in = bytearray(), b""
        self.id: str | None = None
        if self.mode == "disabled":
            return
        folder = Path(os.path.abspath(run_dir)) / "wandb"
        self.id = run_id or _kept_id(folder)
        asked = {
            "mode": self.mode, "project": project, "name": name, "id": self.id, "dir": str(folder.parent),
            "group": group, "job": job, "config": masked(dict(config or {})), "start_s": start_s, "finish_s": max(1.0, finish_s / 2),
        }  # fmt: skip
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / "id", f"{self.id}\n")
            self._process = _spawn(folder / "process.log")
        except Exception as error:
            self._trouble("start", f"W&B cannot be started: {error}")
            self.state = "off"
            return
        self._put(asked)
        self._exchange(0.0)

    def log(self, row: Mapping[str, Any]) -> None:
        """Hand over one row of metrics.jsonl. Returns at once, whatever W&B is doing."""
        if self._process is None:
            return
        if len(self._out) > BUFFER_BYTES:
            self.dropped += 1
        else:
            self._put({key: number(value) for key, value in row.items()})
        self._exchange(0.0)

    def show(
        self,
        tables: Mapping[str, Mapping[str, Any]],
        plots: Mapping[str, Mapping[str, Any]],
        page: str | None,
        summary: Mapping[str, Any],
    ) -> None:
        """Hand over what is no row. tables: `head` and `rows` of text. plots: curves, `xs`, `ys` and `keys` (their names), with
        a `title` and the name of `x`. page: HTML. summary: figures of the whole run."""
        if self._process is not None:
            told = {"tables": dict(tables), "plots": dict(plots), "page": page, "summary": dict(summary)}
            self._put({"show": told})
            self._exchange(0.0)

    def finish(self, exit: int = 0) -> None:
        """Close the run with an exit status, waiting at most `finish_s` seconds for W&B. May be called again."""
        process = self._process
        if process is None:
            return
        deadline = time.monotonic() + self._finish_s
        self._put({"finish": exit})
        while self._process is not None and (left := deadline - time.monotonic()) > 0:
            self._exchange(left)
        if self._process is not None:
            kept = "the rest is in metrics.jsonl alone"
            self._trouble("finish", f"W&B did not finish within {self._finish_s:g} s and was left behind; {kept}")
            process.kill()
            self._close()
        if self.dropped:
            text = f"{self.dropped} rows did not reach W&B, which was slower than the run; metrics.jsonl has them"
            self._trouble("dropped", text)

    def _put(self, message: Mapping[str, Any]) -> None:
        self._out += json.dumps(message, default=_plain).encode() + b"\n"

    def _exchange(self, wait_s: float) -> None:
        """Write what the pipe takes, read what there is, waiting up to wait_s for either."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return
        reading, writing = process.stdout.fileno(), process.stdin.fileno()
        poller = select.poll()  # select() refuses descriptors above 1023, and a trainer may have many files open
        poller.register(reading, select.POLLIN)
        if self._out:
            poller.register(writing, select.POLLOUT)
        ready = {fd for fd, _ in poller.poll(wait_s * 1000)}
        try:
            while writing in ready and self._out:
                del self._out[: os.write(writing, self._out[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:  # it died; its last words are still to be read
            self._out.clear()
        while reading in ready:
            try:
                data = os.read(reading, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._ended()
                return
            *whole, self._in = (self._in + data).split(b"\n")
            for line in whole:
                self._hear(json.loads(line))

    def _hear(self, message: Mapping[str, Any]) -> None:
        if "trouble" in message:
            self._trouble(message["trouble"], message["text"])
            if message["trouble"] == "log":
                self.state = "off"
        elif "state" in message:
            self.state, self.url = message["state"], message["url"]
        elif "finished" in message and self.state != "off":
            self.state = "finished"

    def _ended(self) -> None:
        if self.state != "finished" and not self._told & {"log", "finish"} and self.state != "starting":
            self._trouble("log", "the W&B process died; tracking is off for the rest of the run")
        elif self.state == "starting" and "start" not in self._told:
            self._trouble("start", "the W&B process died as it started; tracking is off (see wandb/process.log)")
        if self.state != "finished":
            self.state = "off"
        self._close()

    def _close(self) -> None:
        process, self._process = self._process, None
        self._out.clear()
        if process is None or process.stdin is None or process.stdout is None:
            return
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _trouble(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._warn(text)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def strictest(mode: str, environ: Mapping[str, str] | None = None) -> str:
    """The config's mode, or WANDB_MODE's if that is stricter."""
    wish = (os.environ if environ is None else environ).get("WANDB_MODE", "")
    wish = "offline" if wish == "dryrun" else wish
    return wish if _STRICTNESS.get(wish, -1) > _STRICTNESS[mode] else mode


def _kept_id(folder: Path) -> str:
    try:
        kept = (folder / "id").read_text().strip()
    except OSError:
        kept = ""
    return kept or secrets.token_hex(4)


def _spawn(log: Path) -> subprocess.Popen[bytes]:
    # The package may be importable only from here (a checkout); its folder goes last, so that it hides nothing.
    code = f"import sys; sys.path.append({_ROOT!r}); from mpdist.wandb_process import main; main()"
    environ = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
    # wandb's reports about itself go to the same server, and hold its exit for 10 s when that is gone.
    environ.setdefault("WANDB_ERROR_REPORTING", "false")
    with open(log, "ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environ, bufsize=0,
        )  # fmt: skip
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
    return process


class Progress:
    """Where a run is: one live line on a terminal, a plain line for each logged row elsewhere.

    total: steps, or None where the clock decides how many. about: total is what the budget is likely to take, since
    skipped windows are no steps and windows differ in tokens. Writes to standard output unless told otherwise.
    """

    def __init__(self, total: int | None, stream: TextIO | None = None, start: int = 0, *, about: bool = False) -> None:
        self._total, self._stream = total, stream or sys.stdout
        self._about = "~" if about else ""
        self._live = self._stream.isatty()
        self._start, self._began = start, time.monotonic()
        self._drawn_at = -math.inf
        self._figures = ""
        self._shown = 0

    def tick(self, step: int) -> None:
        """A step was done. Costs nothing but on a terminal, and there at most ten redraws a second."""
        if self._live and time.monotonic() - self._drawn_at >= 0.1:
            self._draw(step)

    def row(self, row: Mapping[str, Any]) -> None:
        """A row was logged."""
        figures = figures_of(row)
        if not self._live or row.get("kind") == "eval":
            self.say(f"{self._place(row['step'])}  {figures}")
        else:
            self._figures = figures
        if self._live:
            self._draw(row["step"])

    def say(self, text: str) -> None:
        """Print a line of its own without breaking the live one."""
        self._clear()
        self._write(text + "\n")

    def close(self) -> None:
        """Leave the live line behind as it is."""
        if self._shown:
            self._write("\n")
            self._shown = 0

    def _place(self, step: int) -> str:
        width = len(str(self._total)) if self._total else 1
        return f"step {step:>{width}}" + (f"/{self._about}{self._total}" if self._total else "")

    def _draw(self, step: int) -> None:
        self._drawn_at = time.monotonic()
        done = step - self._start
        rest = ""
        if self._total and done > 0:
            left = max(self._total - step, 0) * (self._drawn_at - self._began) / done
            filled = round(20 * min(step / self._total, 1))
            rest = f" [{'#' * filled}{'.' * (20 - filled)}] {_duration(left)} left"
        line = f"{self._place(step)}{rest}  {self._figures}".rstrip()
        width = max(20, _columns(self._stream) - 1)
        if len(line) > width:  # whole figures only
            line = line[: width + 2].rpartition("  ")[0].rstrip() or line[:width]
        self._write("\r" + line + " " * max(0, self._shown - len(line)))
        self._shown = len(line)

    def _clear(self) -> None:
        if self._shown:
            self._write("\r" + " " * self._shown + "\r")
            self._shown = 0

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # a terminal that went away does not end a run
            self._live = False


def figures_of(row: Mapping[str, Any]) -> str:
    """The figures of a row that a person watches, in one line."""
    if row.get("kind") == "eval":
        wanted = [("eval loss", "eval/loss", ".4f"), ("perplexity", "eval/perplexity", ".2f")]
    else:
        wanted = [
            ("loss", "train/loss", ".4f"), ("lr", "train/lr", ".2e"), ("norm", "train/grad_norm", ".3g"),
            ("tok/s", "speed/tokens_per_s", ",.0f"), ("scale", "scale/value", "g"), ("skipped", "scale/skipped", "g"),
        ]  # fmt: skip
    shown = []
    for label, name, form in wanted:
        value = number(row.get(name))
        if value is None or (name == "scale/skipped" and not value) or (name == "scale/value" and value == 1):
            continue
        shown.append(f"{label} {value:{form}}")
    return "  ".join(shown)


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(getattr(stream, "console", stream).fileno()).columns or 80
    except (OSError, ValueError):
        return 80
