"""The process that talks to W&B, so that the one that trains never does.

The trainer writes JSON lines to this process's standard input and reads JSON lines from its standard output:
first what to open, then rows, at last `{"finish": exit}`. If the trainer dies without a word, the input ends, and the
run is closed as failed with every row that was handed over; inside the trainer, a SIGKILL would lose the last 8 to
20 seconds of them (wandb 0.31). Nothing wandb does can block the trainer, hold its exit, prompt on its terminal,
wrap its output or compete for its interpreter; and what hangs can be killed.

A server that is missing is found out by one plain request before wandb starts, which takes seconds instead of the
client's minutes. Whatever fails online, the run goes on offline under the same id.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

PROBE_S = 4.0
_ORPHAN_S = 4.0
AXES = {"over_tokens": "train/label_tokens", "over_seconds": "time/train_s"}
_LOSSES = ("train/loss", "eval/loss")
_GROUPS = ("train", "eval", "scale", "time", "speed", "mem", "wire", "precision")


def main() -> None:
    """Serve one trainer until its input ends. Never raises: trouble is reported to the trainer."""
    # A Ctrl-C or a stop reaches the whole process group; the trainer decides, and says so over the pipe.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints, prints into the log

    def reply(**message: Any) -> None:
        try:
            replies.write(json.dumps(message) + "\n")
            replies.flush()
        except OSError:  # the trainer is gone
            pass

    lines = _lines(os.getppid())
    asked = next(lines, None)
    if asked is None:
        return None
    try:
        run = _start(asked, reply)
    except BaseException as error:  # wandb raises SystemExit and more
        return reply(trouble="start", text=f"W&B cannot be started: {_brief(error)}")
    ended = 1
    try:
        for message in lines:
            if "finish" in message:
                ended = message["finish"]
                break
            run.log(_shown(message["show"], run) if "show" in message else _with_axes(message))
        else:
            _end_soon()
    except BaseException as error:
        reply(trouble="log", text=f"W&B failed and is off for the rest of the run: {_brief(error)}")
    try:
        _attach(run, asked["dir"])
        if ended == 75:  # stopped early with everything saved
            run.mark_preempting()
        run.finish(exit_code=ended)
        reply(finished=True)
        _teardown()
    except BaseException as error:
        text = f"W&B did not take everything in time ({_brief(error)})"
        reply(trouble="finish", text=f"{text}; `wandb sync --include-online {_folder(run)}` sends the rest")
    replies.flush()
    # Exit hooks of a client that has lost its server would wait for it again.
    os._exit(0)


def _attach(run: Any, folder: str) -> None:
    """What the run holds, planned and measured, as a file of it."""
    path = os.path.join(folder, "ledger.json")
    if os.path.exists(path):
        run.save(path, base_path=folder, policy="now")


def _end_soon() -> None:
    """The trainer died: what is here is still to be closed, but nobody waits for it any more."""
    timer = threading.Timer(_ORPHAN_S, os._exit, [1])
    timer.daemon = True
    timer.start()


def _lines(parent: int) -> Iterator[dict[str, Any]]:
    """What the trainer writes, until it closes the pipe or dies."""
    rest = b""
    while True:
        # A worker that the trainer forked may hold the pipe open after the trainer's death, hence the look at its pid.
        if not select.select([0], [], [], 1.0)[0]:
            if os.getppid() != parent:
                return
            continue
        data = os.read(0, 1 << 16)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield json.loads(line)


def _start(asked: dict[str, Any], reply: Any) -> Any:
    import wandb

    wandb.setup(settings=_settings(asked))
    if asked["mode"] == "online":
        try:
            why = _no_way(wandb)
            if why is None:
                run = _init(wandb, asked, "online")
                reply(state="online", url=run.url)
                return run
        except BaseException as error:
            why = _brief(error)
            wandb.teardown()  # else the id counts as in use
        text = f"W&B is offline for this session: {why}; `wandb sync {asked['dir']}/wandb/offline-run-*` sends it later"
        reply(trouble="start", text=text)
    run = _init(wandb, asked, "offline")
    reply(state="offline", url=None)
    return run


def _init(wandb: Any, asked: dict[str, Any], mode: str) -> Any:
    run = wandb.init(
        mode=mode, dir=asked["dir"], project=asked["project"], name=asked["name"], group=asked["group"], id=asked["id"],
        job_type=asked.get("job"),
        resume="allow", config=asked["config"], settings=_settings(asked),
    )  # fmt: skip
    # wandb's own step counts calls, and shifts when an offline session is synced: every axis is a metric of ours.
    for axis in ("step", *AXES.values()):
        run.define_metric(axis)
    for group in _GROUPS:
        run.define_metric(f"{group}/*", step_metric="step")
    for group, axis in AXES.items():
        run.define_metric(f"{group}/*", step_metric=axis)
    return run


def _settings(asked: dict[str, Any]) -> Any:
    import wandb

    wanted = {
        "silent": True,
        "console": "off",
        "init_timeout": asked["start_s"],
        "finish_timeout": asked["finish_s"],
        "finish_timeout_raises": True,
        "x_stats_pid": os.getppid(),
        "program": "mpdist",
    }
    fields = type(wandb.Settings()).model_fields  # older versions lack some
    return wandb.Settings(**{key: value for key, value in wanted.items() if key in fields})


def _no_way(wandb: Any) -> str | None:
    """Why there is no point in going online; None if there may be one."""
    url = wandb.setup().settings.base_url
    if why := _unreachable(url):
        return f"{url} {why}"
    # Without a key and with a terminal, init would ask for one.
    if not wandb.login(prompt=False):
        return "no API key was found (`wandb login` or WANDB_API_KEY)"
    return None


def _unreachable(url: str) -> str | None:
    try:
        urllib.request.urlopen(f"{url.rstrip('/')}/healthz", timeout=PROBE_S).close()
    except urllib.error.HTTPError as error:
        error.close()
        return f"answers {error.code} {error.reason}" if error.code >= 500 else None
    except urllib.error.URLError as error:
        # Private certificates are wandb's to judge.
        return None if isinstance(error.reason, ssl.SSLError) else f"cannot be reached: {error.reason}"
    except (OSError, http.client.HTTPException) as error:
        return f"cannot be reached: {error or type(error).__name__}"
    return None


def _with_axes(row: dict[str, Any]) -> dict[str, Any]:
    """The row, with the losses once more under the groups that are drawn over tokens and over seconds."""
    copies = {f"{group}/{name}": row[name] for group in AXES for name in _LOSSES if name in row}
    return {key: value for key, value in row.items() if key != "kind"} | copies


def _shown(asked: dict[str, Any], run: Any) -> dict[str, Any]:
    """What `Tracker.show` handed over, in wandb's own classes; the summary goes into the run's."""
    import wandb

    run.summary.update(asked["summary"])
    found: dict[str, Any] = {}
    for name, table in asked["tables"].items():
        found[f"tables/{name}"] = wandb.Table(columns=table["head"], data=table["rows"])
    for name, plot in asked["plots"].items():
        lines = {"xs": plot["xs"], "ys": plot["ys"], "keys": plot["keys"]}
        found[f"plots/{name}"] = wandb.plot.line_series(**lines, title=plot["title"], xname=plot["x"])
    if asked["page"] is not None:
        found["page"] = wandb.Html(asked["page"], inject=False)
    return found


def _folder(run: Any) -> str:
    return os.path.dirname(str(run.dir))


def _teardown() -> None:
    import wandb

    wandb.teardown()


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
