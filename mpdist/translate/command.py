"""`mpdist config --from-accelerate FILE --from-deepspeed FILE --from-trainer FILE`: any one of them, or two, or all."""

from __future__ import annotations

import sys
from typing import Any

from mpdist.config import check, read, rules
from mpdist.errors import ConfigError, MpdistError, UsageError
from mpdist.translate import accelerate, deepspeed, facts, text, theirs, trainer
from mpdist.translate.document import TITLES, Document, nothing, open_document
from mpdist.translate.draft import Draft, Rule

RULES: dict[str, dict[str, Rule]] = {
    "accelerate": accelerate.RULES,
    "deepspeed": deepspeed.RULES,
    "trainer": trainer.RULES,
}


def run(files: dict[str, str | None], ranks: int | None, nodes: int | None) -> int:
    """``files`` by format. Prints the configuration; a summary on stderr, since stdout often goes to a file."""
    draft, problems = translate(files, ranks, nodes)
    print(text.render(draft, problems), end="")
    sys.stdout.flush()
    print(text.summary(draft, problems), file=sys.stderr)
    return 0


def translate(
    files: dict[str, str | None], ranks: int | None = None, nodes: int | None = None, ask: bool = True
) -> tuple[Draft, list[str]]:
    """The draft, and why mpdist would refuse it as it stands. ``ask``: whether the libraries' own classes are asked."""
    found = {format: _open(format, path) if path else nothing(format) for format, path in files.items()}
    _split_trainer(found)
    wrong = [problem for document in found.values() if document.given for problem in facts.check(document)]
    if wrong:
        raise _all(wrong)
    world = facts.world(found["accelerate"], ranks, nodes)
    libraries = {format: theirs.not_asked(format) for format in found}
    if ask and found["trainer"].given:
        libraries["trainer"] = theirs.trainer(found["trainer"])
    if ask and found["accelerate"].given:
        libraries["accelerate"] = theirs.accelerate(found["accelerate"])
    draft = Draft(found["trainer"], found["deepspeed"], found["accelerate"], world, libraries)
    _judge(draft, ask)
    if draft.problems:
        raise _all(draft.problems)
    return draft, refusals(draft)


def _all(problems: list[MpdistError]) -> MpdistError:
    return problems[0] if len(problems) == 1 else ConfigError(problems)


def _judge(draft: Draft, ask: bool) -> None:
    facts.fill(draft)
    if ask and draft.deepspeed.given:
        draft.libraries["deepspeed"] = theirs.deepspeed(draft)
    # The order of precedence where two say the same thing.
    for document in (draft.trainer, draft.deepspeed, draft.accelerate):
        if document.given:
            draft.account(document, RULES[document.format])
    if draft.problems:
        return
    for document, finish in (
        (draft.deepspeed, deepspeed.finish),
        (draft.accelerate, accelerate.finish),
        (draft.trainer, trainer.finish),
    ):
        if document.given:
            finish(draft)
    _fill_in(draft)


def _fill_in(draft: Draft) -> None:
    if draft.world.source == "--ranks" and draft.world.per_node:
        draft.set("launch.ranks", draft.world.per_node, "--ranks")
        if draft.world.nodes > 1 and "launch.nodes" not in draft.values:
            draft.set("launch.nodes", draft.world.nodes, "--nodes")
    theirs_lack = "their file does not name it"
    draft.fill("name", "my-run", "the run's name and folder")
    draft.fill("model.path", "HUB_ID_OR_FOLDER", theirs_lack)
    draft.fill("data.train", "[{path: train.jsonl, format: messages}]", theirs_lack)
    if draft.get("budget.epochs") is None:
        draft.fill("budget.steps", "1000", f"{theirs_lack}; or epochs, tokens, seconds")
    draft.decide("data.seq_len", "2048", theirs_lack)


def _open(format: str, path: str) -> Document:
    """The file, if it is one of that format."""
    document = open_document(format, path, theirs.lenient_json if format == "deepspeed" else None)
    shares = {other: _share(document.values, table) for other, table in RULES.items()}
    keys = list(document.values)
    if shares[format] < 0.5 or (format == "accelerate" and "distributed_type" not in document.values):
        best = max(shares, key=lambda other: shares[other])
        why = f"{round(shares[format] * len(keys))} of its {len(keys)} keys are such ones"
        if shares[format] >= 0.5:
            why, best = "it has no distributed_type, without which accelerate refuses it too", format
        do = (
            f"these are keys of {TITLES[best]}: --from-{best} {path}?"
            if shares[best] >= 0.5 and best != format
            else "check the path"
        )
        raise UsageError(f"{path} is not {TITLES[format]} (--from-{format})", why, do)
    return document


def _share(values: dict[str, Any], table: dict[str, Rule]) -> float:
    tops = {name.partition(".")[0] for name in table}
    return sum(key in tops for key in values) / len(values)


def _split_trainer(found: dict[str, Document]) -> None:
    """A DeepSpeed configuration inside the TrainingArguments is a document of its own."""
    outer = found["trainer"]
    if not isinstance(outer.values.get("deepspeed"), dict) or not outer.values["deepspeed"]:
        return
    if found["deepspeed"].given:
        what = f"{outer.path} holds a DeepSpeed configuration, and --from-deepspeed gives another"
        raise UsageError(what, "only one of them can be meant", "take one out")
    found["deepspeed"] = outer.part("deepspeed", "deepspeed")
    outer.values = {key: value for key, value in outer.values.items() if key != "deepspeed"}


def refusals(draft: Draft) -> list[str]:
    """What mpdist's own loader says of the configuration, once what is to be filled in is there."""
    tree = read.parse(text.body(draft), "this file")
    tree.value = tree.value or {}
    for ours, value in _stand_ins(draft).items():
        *path, leaf = ours.split(".")
        holder = tree.value
        for part in path:
            holder[part] = holder.get(part) or {}
            holder = holder[part]
        holder[leaf] = value
    tree.value = {key: value for key, value in tree.value.items() if value is not None}
    found: list[MpdistError] = [*tree.problems, *check.unknown(tree)]
    config, invalid, names = check.validate(tree)
    found += invalid
    if config is not None:
        found += rules.check(config, lambda name: check.origin(tree, tuple(name.split("."))), names)
        if not found and draft.world.ranks:
            found += rules.check_world(config, draft.world.ranks, nodes=draft.world.nodes)
    problems = [" ".join(f"{error.what}: {error.why}. {error.do}".split()) for error in found]
    micro, total, ranks = draft.get("batch.micro"), draft.get("batch.global"), draft.world.ranks
    if micro and total and ranks and total % (micro * ranks):
        problems.append(
            f"batch.global = {total} is no multiple of batch.micro {micro} x {ranks} ranks: each has its own rows here"
        )
    return problems


def _stand_ins(draft: Draft) -> dict[str, Any]:
    loss_on = draft.get("data.loss_on", "all")
    source = {
        "path": "rows.jsonl",
        "format": {"all": "text", "completion": "prompt_completion"}.get(loss_on, "messages"),
    }
    values: dict[str, Any] = {
        "name": "unnamed",
        "model.path": "a/model",
        "data.train": [source],
        "data.eval": [source],
        "batch.global": (draft.get("batch.micro") or 1) * (draft.world.ranks or 1),
        "budget.steps": 10**6,
    }
    needed = {ours for ours, (what, _, _) in draft.open.items() if what == "FILL IN"}
    return {ours: value for ours, value in values.items() if ours in needed}
