"""What a comparison found, in one tree that the terminal, JSON and pictures read alike. Nothing here computes much."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]  # of metrics.jsonl, events.jsonl or ledger.json, as it stands there


@dataclass(frozen=True)
class Run:
    """One run directory. values: of its configuration, by dotted names.

    train, evals: the rows of metrics.jsonl that count. events: without what a resume superseded. envs: the env.json of each
    session that came to its device, in order. torn: names of the histories that end in the middle of a line.
    """

    path: Path
    values: Mapping[str, Any] = field(repr=False)
    train: tuple[Row, ...] = field(repr=False)
    evals: tuple[Row, ...] = field(repr=False)
    events: tuple[Row, ...] = field(repr=False)
    status: Mapping[str, Any] = field(repr=False)
    plan: Mapping[str, Any] = field(repr=False)
    ledger: tuple[Row, ...] = field(repr=False)
    envs: tuple[Mapping[str, Any], ...] = field(repr=False)
    torn: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def seed(self) -> int:
        return int(self.values["seed"])

    @property
    def env(self) -> Mapping[str, Any]:
        """Of the first session."""
        return self.envs[0] if self.envs else {}

    @property
    def state(self) -> str:
        return str(self.status.get("state", "unknown"))

    @property
    def steps(self) -> int:
        return int(self.train[-1]["step"])

    @property
    def attempts(self) -> int:
        """Windows that were closed, applied or not."""
        return max(int(self.train[-1]["attempt"]), int(self.status.get("attempt") or 0))

    @property
    def skips(self) -> tuple[Row, ...]:
        """Attempts that were not applied."""
        return tuple(event for event in self.events if event["event"] == "skip")

    @property
    def horizon(self) -> int | None:
        """Steps that the schedule spans; None under a constant one or where nobody knows."""
        given = self.values.get("optim.horizon", "auto")
        found = given if isinstance(given, int) else self.plan.get("horizon")
        return int(found) if found else None


@dataclass(frozen=True)
class Estimate:
    """A quantity with its uncertainty. null: what it would be without a difference, 0 of a gap and 1 of a ratio.

    low, high: the two-sided interval at the comparison's level, None where there is none (``why`` says so). at_least,
    at_most: one-sided 95 % bounds, for gates. p: of the two-sided test against null. n: observations (seeds) behind it.
    detectable: the smallest true difference from null that would have been seen in 95 of 100 such comparisons.
    """

    value: float
    null: float = 0.0
    low: float | None = None
    high: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    p: float | None = None
    n: int = 1
    detectable: float | None = None
    why: str = ""

    def mapped(self, form: Callable[[float], float], null: float, turned: bool = False) -> Estimate:
        """The same of another quantity, a monotone function of this one. turned: it falls where this one rises."""

        def one(value: float | None) -> float | None:
            return None if value is None else form(value)

        low, high, least, most = (one(value) for value in (self.low, self.high, self.at_least, self.at_most))
        if turned:
            low, high, least, most = high, low, most, least
        return Estimate(form(self.value), null, low, high, least, most, self.p, self.n, None, self.why)

    @property
    def seen(self) -> bool:
        """Whether there is an interval, and it leaves no difference out."""
        return self.low is not None and self.high is not None and not self.low <= self.null <= self.high


@dataclass(frozen=True)
class Spread:
    """Of step times: seconds. low, high: 10th and 90th percentile, over ``n`` stretches between logged steps."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Difference:
    """One thing in which runs differ that must not. values: (who, what), each value once. text: said in its place."""

    key: str
    values: tuple[tuple[str, str], ...]
    text: str = ""

    def __str__(self) -> str:
        return f"{self.key}: " + (self.text or ", ".join(f"{value} in {who}" for who, value in self.values))


@dataclass(frozen=True)
class Note:
    """Something that a reader has to know beside the figures. kind: one word, for programs."""

    kind: str
    text: str


@dataclass(frozen=True)
class Defect:
    """A sign in an arm's records that something is wrong in it. spoils: which claims about the arm it voids."""

    name: str
    arm: str
    run: str
    text: str
    spoils: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figures:
    """Of one arm, over its runs: means unless a field says otherwise. None where nobody measured it.

    train_s, total_s: of the whole run. train_loss, eval_loss: at the last step of which all runs have one (eval_step).
    tokens_per_s: real tokens over train seconds, warm-up left out. mfu: mean of its
    rows, peak_flops what it divides by; device_busy: mean share of its rows. *_bytes: the largest. skipped: reason ->
    attempts. seed_spread: standard deviation over seeds of eval_loss. time: label -> seconds, the runs' tables, if all have one.
    """

    steps: float
    attempts: float
    label_tokens: float
    tokens: float
    train_s: float
    total_s: float
    train_loss: float
    eval_step: int | None
    eval_loss: float | None
    perplexity: float | None
    seed_spread: float | None
    tokens_per_s: float | None
    step_s: Spread | None
    mfu: float | None
    peak_flops: float | None
    device_busy: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    wire_bytes: float | None
    wire_bytes_between_nodes: float | None
    skipped: Mapping[str, int]
    nonfinite: int
    final_scale: float | None
    changed_fraction: float | None
    wire_error: float | None
    dtypes: Mapping[str, str]
    time: Mapping[str, float]


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed alone, in order of it. settings: its values of the treatment's keys that vary."""

    name: str
    settings: Mapping[str, Any]
    runs: tuple[Run, ...]
    figures: Figures
    control: bool = False

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)

    @property
    def diverged(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.state == "diverged")

    @property
    def unfinished(self) -> tuple[Run, ...]:
        """Runs that are under way, were stopped, or failed, or of which nobody knows."""
        return tuple(run for run in self.runs if run.state not in ("done", "diverged"))

    def run(self, seed: int) -> Run:
        return next(run for run in self.runs if run.seed == seed)


@dataclass(frozen=True)
class AtStep:
    """Both arms after the same applied steps. Losses are means over seeds, (arm, reference); gaps arm minus reference.

    train_loss: over the label tokens of the steps (window_from, step]. label_tokens: what each had trained on.
    """

    step: int
    attempts: tuple[float, float]
    label_tokens: tuple[float, float]
    eval_loss: tuple[float, float] | None
    eval_loss_gap: Estimate | None
    perplexity_ratio: Estimate | None
    window_from: int
    train_loss: tuple[float, float]
    train_loss_gap: Estimate


@dataclass(frozen=True)
class AtTime:
    """Both arms after the same seconds of one clock, counted from the end of the warm-up.

    clock: train or total. step: reached then, (arm, reference), means over seeds. eval_loss: on the straight line between
    the evaluations before and after; between: those of each seed, steps (arm, reference). phase: share of the schedule
    that lies behind each, None under a constant schedule.
    """

    clock: str
    seconds: float
    step: tuple[float, float]
    eval_loss: tuple[float, float] | None
    eval_loss_gap: Estimate | None
    phase: tuple[float, float] | None
    same_phase: bool


@dataclass(frozen=True)
class ToLoss:
    """The way to one evaluation loss, on the straight line between evaluations; means over seeds, (arm, reference).

    *_ratio: arm over reference. None where a run never got there.
    """

    target: float
    steps: tuple[float, float] | None
    steps_ratio: Estimate | None
    train_s: tuple[float, float] | None
    train_s_ratio: Estimate | None
    total_s: tuple[float, float] | None


@dataclass(frozen=True)
class Drift:
    """Whether the residual (arm minus reference, training loss at the same step) grows. slope: nats per 1,000 steps."""

    slope: Estimate
    first: int
    last: int


@dataclass(frozen=True)
class Pair:
    """One arm against the reference. speed: of the arm over the reference's, a ratio of the quantity that ``basis`` names.

    speed_all: of tokens/s over all seconds behind the warm-up; speed_undisturbed: of the fastest tenth's, None where there
    are too few windows; seeds_*: each seed's ratio. withheld: why no verdict on speed is given, empty where one is.
    residual: (step, mean gap of the training loss, lowest and highest of a seed), for pictures.
    """

    arm: str
    against: str
    seeds: tuple[int, ...]
    matched_steps: tuple[AtStep, ...]
    matched_seconds: tuple[AtTime, ...]
    to_loss: ToLoss | None
    speed: Estimate | None
    basis: str
    speed_all: Estimate | None
    speed_undisturbed: Estimate | None
    seeds_all: tuple[float, ...]
    seeds_undisturbed: tuple[float, ...]
    drift: Drift | None
    withheld: str
    residual: tuple[tuple[int, float, float, float], ...] = field(repr=False)

    @property
    def judged(self) -> AtStep | None:
        """The step that the verdict is on: the last common evaluation, or the last common step without any."""
        evaluated = [at for at in self.matched_steps if at.eval_loss_gap is not None]
        return (evaluated or self.matched_steps or (None,))[-1]

    @property
    def loss_gap(self) -> Estimate | None:
        """Of the evaluation loss there, else of the training loss."""
        at = self.judged
        return None if at is None else at.eval_loss_gap or at.train_loss_gap

    def at_time(self, clock: str) -> AtTime | None:
        """The longest time that all runs have."""
        return next((at for at in reversed(self.matched_seconds) if at.clock == clock), None)


@dataclass(frozen=True)
class Verdict:
    """speed: faster, slower, no difference seen, withheld or unknown. loss: higher, lower, diverged, or one of the last three.
    drift: up, down, none seen or unknown. alarms: the claims of a difference among the three."""

    arm: str
    against: str
    line: str
    speed: str
    loss: str
    drift: str

    @property
    def alarms(self) -> tuple[str, ...]:
        claims = {"speed": ("faster", "slower"), "loss": ("higher", "lower", "diverged"), "drift": ("up", "down")}
        return tuple(name for name, words in claims.items() if getattr(self, name) in words)


@dataclass(frozen=True)
class GateResult:
    """One gate on one arm. holds: None where the figures do not decide it, which counts as not holding."""

    gate: str
    arm: str
    value: float | None
    low: float | None
    high: float | None
    holds: bool | None
    text: str


@dataclass(frozen=True)
class Advice:
    """A rule of the guide that applies to an arm (or to all: arm is empty), with the figures that made it apply."""

    rule: str
    arm: str
    text: str
    source: str


@dataclass(frozen=True)
class Comparison:
    """treatment: the keys declared, as patterns. varied: those of them that do differ. warmup: windows left out of each
    run's rates and clocks; warmup_step: where they end in these records. refused: differences that stop it; allowed: those
    accepted by name. level: of each claim's test; a pair's claims together keep 5 %."""

    treatment: tuple[str, ...]
    varied: tuple[str, ...]
    reference: str
    control: str | None
    seeds: tuple[int, ...]
    warmup: int
    warmup_step: int
    level: float
    refused: tuple[Difference, ...]
    allowed: tuple[Difference, ...]
    notes: tuple[Note, ...]
    defects: tuple[Defect, ...]
    arms: tuple[Arm, ...]
    pairs: tuple[Pair, ...]
    verdicts: tuple[Verdict, ...]
    gates: tuple[GateResult, ...]
    guide: tuple[Advice, ...]
    environment: Mapping[str, Any] = field(repr=False)

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)
