"""What the figures recommend, and why: a table of rules, each with the condition on figures and the source behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpdist.compare.defects import CHANGED
from mpdist.compare.tree import Advice, Arm, Defect, Pair, Verdict
from mpdist.compare.verdict import UNSEEN, times, within

HEALTHY = 0.01  # of the later attempts: a dynamic scale that probes every 2,000 windows skips 0.0005
COARSE = 0.01  # of the loss: a comparison that could not have seen so much has not seen much


@dataclass(frozen=True)
class Facts:
    """One arm beside the reference, as rules ask about it and as their texts tell of it."""

    arm: Arm
    reference: Arm
    pair: Pair
    verdict: Verdict
    defects: tuple[Defect, ...]

    def asked(self, key: str) -> str:
        return str(self.arm.runs[0].values[key])

    @property
    def computes(self) -> tuple[str, str]:
        """Of the arm, and of the reference."""
        return self.asked("precision.compute"), str(self.reference.runs[0].values["precision.compute"])

    @property
    def pure(self) -> bool:
        return self.computes[0] != "fp32" and self.asked("precision.master") == "compute"

    @property
    def loss_ok(self) -> bool:
        return self.verdict.loss in (UNSEEN, "lower") and self.verdict.drift != "up"

    @property
    def no_faster(self) -> bool:
        return self.computes[1] == "fp32" and self.verdict.speed in ("slower", UNSEEN)

    @property
    def changed(self) -> float:
        found = self.arm.figures.changed_fraction
        return 1.0 if found is None else found

    @property
    def skip_share(self) -> float:
        """Of the second half of the attempts: the first finds the scale."""
        late = sum(event["attempt"] > run.attempts / 2 for run in self.arm.runs for event in run.skips)
        return 2 * late / max(sum(run.attempts for run in self.arm.runs), 1)

    @property
    def sick(self) -> bool:
        """Whether the scale lies at its floor after skips, or attempts go on being skipped."""
        figures, floor = self.arm.figures, float(self.arm.runs[0].values["precision.scale.floor"])
        low = figures.final_scale is not None and figures.final_scale <= floor and figures.nonfinite > 0
        return low or self.skip_share > HEALTHY

    @property
    def coarse(self) -> bool:
        gap, at = self.pair.loss_gap, self.pair.judged
        if self.verdict.loss != UNSEEN or gap is None or gap.detectable is None or at is None:
            return False
        return gap.detectable > COARSE * (at.eval_loss or at.train_loss)[1]

    @property
    def loss(self) -> str:
        gap = self.pair.loss_gap
        return "unknown" if gap is None else f"{within(gap)} ({self.verdict.loss})"

    @property
    def speed(self) -> str:
        return "unknown" if self.pair.speed is None else f"{times(self.pair.speed.value)}x ({self.verdict.speed})"

    @property
    def detectable(self) -> str:
        gap = self.pair.loss_gap
        return "unknown" if gap is None or gap.detectable is None else f"{gap.detectable:.4f}"

    @property
    def scale(self) -> str:
        found = self.arm.figures.final_scale
        return "unknown" if found is None else f"{found:g}"

    @property
    def bytes(self) -> str:
        own, other = self.arm.figures.wire_bytes, self.reference.figures.wire_bytes
        return f"{own / other:.2f}x the bytes" if own and other else "fewer bytes between ranks"

    @property
    def bought(self) -> str:
        """What an arm that is no faster has for it."""
        own, other = self.arm.figures.peak_allocated_bytes, self.reference.figures.peak_allocated_bytes
        return "memory alone" if own and other and own < other else "nothing that was measured"

    @property
    def defect_names(self) -> str:
        return ", ".join(sorted({one.name for one in self.defects}))


@dataclass(frozen=True)
class Rule:
    """text: with the facts' own words in it, as `{f.loss}`."""

    name: str
    applies: Callable[[Facts], bool]
    text: str
    source: str


_AMP = "Micikevicius et al. 2018, Mixed Precision Training, arXiv:1710.03740"
_BF16 = "Kalamkar et al. 2019, A Study of BFLOAT16 for Deep Learning Training, arXiv:1905.12322"
_PURE = "Zamirai et al. 2020, Revisiting BFloat16 Training, arXiv:2010.06192"
_WIRE = "pytorch/pytorch#106395: stability lost with a BF16 reduction on 384 GPUs"
_SCALER = "PyTorch, torch.amp.GradScaler: grows every 2,000 windows, backs off by half"
_TESTS = "Dror et al. 2018, The Hitchhiker's Guide to Testing Statistical Significance in NLP (paired t-test)"

NO_FP32 = Advice(
    "FP32 establishes correctness", "",
    "no arm was run in FP32, so a loss that all arms share may be wrong in all of them: run one, if only for a few steps", _AMP,
)  # fmt: skip
RULES: tuple[Rule, ...] = (
    Rule("a defect first", lambda f: bool(f.defects), "mend this before anything else: {f.defect_names}", "the evidence above"),
    Rule("one seed says little", lambda f: len(f.pair.seeds) < 2,
         "run it under 3 seeds or more: one pair of runs has no spread to judge a gap by", _TESTS),
    Rule("more seeds to decide", lambda f: f.coarse,
         "a loss gap of {f.detectable} would have been seen, a smaller one may be there: more seeds see less", _TESTS),
    Rule("pure 16 bit loses updates", lambda f: f.pure and f.changed < CHANGED,
         "keep FP32 masters: a step changes {f.changed:.0%} of these, and small updates are lost", _PURE),
    Rule("pure 16 bit is another training", lambda f: f.pure and f.changed >= CHANGED,
         "keep FP32 masters unless memory forbids it; here the loss gap is {f.loss}", _PURE),
    Rule("BF16 where the device has it",
         lambda f: f.computes == ("bf16", "fp32") and not f.pure and f.loss_ok and f.verdict.speed == "faster",
         "train in it: {f.speed}, loss gap {f.loss}, and there is no scale to watch", _BF16),
    Rule("BF16 needs its units", lambda f: f.computes[0] == "bf16" and f.no_faster,
         "stay in FP32 on this device: {f.speed}, so BF16 buys {f.bought}", _BF16),
    Rule("FP16 with its scale healthy", lambda f: f.computes[0] == "fp16" and not f.sick and f.loss_ok,
         "its scale is healthy ({f.skip_share:.1%} of the later attempts skipped, scale {f.scale}): take it where the device has no "
         "BF16", _AMP),
    Rule("FP16 with its scale sick", lambda f: f.computes[0] == "fp16" and f.sick,
         "do not train in it: {f.skip_share:.1%} of the later attempts were skipped, scale {f.scale}; use BF16, or precision.keep_fp32 "
         "for what overflows", _SCALER),
    Rule("FP16 needs its units", lambda f: f.computes[0] == "fp16" and f.no_faster, "there is no gain in speed: {f.speed}", _AMP),
    Rule("a 16-bit wire sends half",
         lambda f: f.asked("reduce.wire") != "fp32" and f.loss_ok and f.computes[0] == f.computes[1] and not f.defects,
         "take it where ranks wait for the network: {f.bytes}, loss gap {f.loss}; keep reduce.sum: fp32, whose rounding does not grow "
         "with the ranks", _WIRE),
    Rule("an arm that diverged", lambda f: f.verdict.loss == "diverged",
         "do not train in it as it stands: the reason is in its status.json and events.jsonl", _AMP),
    Rule("a loss that is higher", lambda f: f.verdict.loss == "higher",
         "what is gained costs loss: {f.loss}; keep the reference, or find the part that needs FP32 (precision.keep_fp32)", _AMP),
    Rule("a gap that grows", lambda f: f.verdict.drift == "up",
         "do not take this length's gap for that of a longer run: it grows with the steps", _WIRE),
    Rule("measure again on a quiet machine", lambda f: f.verdict.speed == "withheld" and bool(f.pair.withheld),
         "the machine moved more than the arm did: {f.pair.withheld}", "what the reference's own repetition does is no effect"),
)  # fmt: skip


def advise(
    arms: Sequence[Arm], pairs: Sequence[Pair], verdicts: Sequence[Verdict], defects: Sequence[Defect], control: str | None
) -> tuple[Advice, ...]:  # fmt: skip
    """The rules that apply, arm by arm. The control gets none."""
    by_name = {arm.name: arm for arm in arms}
    found = [] if any(arm.runs[0].values["precision.compute"] == "fp32" for arm in arms) else [NO_FP32]
    for pair, verdict in zip(pairs, verdicts, strict=True):
        own = tuple(one for one in defects if one.arm == pair.arm)
        facts = Facts(by_name[pair.arm], by_name[pair.against], pair, verdict, own)
        if pair.arm != control:
            found += [Advice(r.name, pair.arm, r.text.format(f=facts), r.source) for r in RULES if r.applies(facts)]
    return tuple(found)
