"""`mpdist numerics lab`: one logistic regression trained in emulated formats, so that a reader sees what hardware hides.

Images of a blob, left or right of the middle; the exact optimum is known, so each regime's excess loss is. Stored in the
format under test are the inputs (once), the compute copy of the weights, the logits, the activation gradient
S (p - y) / N and the weight gradient; products accumulate in FP32, as on a tensor core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpdist.formats import FORMATS, NARROW, Format
from mpdist.numerics.rounding import Array, round_to

TRAIN, TEST, STEPS, EARLY = 4096, 2048, 3000, 10
FIRST_SCALE, INTERVAL = 65536.0, 2000
Floats = NDArray[np.float32]
Say = Callable[[str], None]


# -- data -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """a, test: [N, 257], a constant 1 last. y, test_y: 1.0 where the blob's centre lies right of 7.5. optimum: the loss of
    the exact solution. step: 4 / the largest eigenvalue of a.T a / N, the largest step that gradient descent can take."""

    a: Array
    y: Array
    test: Array
    test_y: Array
    optimum: float
    step: float

    def loss(self, w: Array) -> float:
        """Mean cross-entropy in FP64."""
        logits = self.a @ w
        return float(np.mean(np.logaddexp(0.0, logits) - self.y * logits))

    def accuracy(self, w: Array) -> float:
        return float(np.mean((self.test @ w > 0) == (self.test_y > 0)))


def draw() -> Data:
    generator = np.random.default_rng(0)
    a, y = _images(generator, TRAIN)
    test, test_y = _images(generator, TEST)
    step = 4.0 / float(np.linalg.eigvalsh(a.T @ a / len(a))[-1])
    data = Data(a, y, test, test_y, 0.0, step)
    return Data(a, y, test, test_y, data.loss(_optimum(data)), step)


def _images(generator: np.random.Generator, count: int) -> tuple[Array, Array]:
    cx, cy = generator.uniform(2, 13, count), generator.uniform(2, 13, count)
    at = np.arange(16)
    squares = (at[None, None, :] - cx[:, None, None]) ** 2 + (at[None, :, None] - cy[:, None, None]) ** 2
    images = np.exp(-squares / (2 * 2.0**2)) + generator.normal(0, 0.5, (count, 16, 16))
    return np.hstack([images.reshape(count, -1), np.ones((count, 1))]), (cx > 7.5).astype(np.float64)


def _optimum(data: Data) -> Array:
    """Newton's method with backtracking."""
    w = np.zeros(data.a.shape[1])
    for _ in range(100):
        p = _sigmoid(data.a @ w)
        gradient = data.a.T @ (p - data.y) / len(data.y)
        if np.abs(gradient).max() < 1e-14:
            break
        curvature = (data.a * (p * (1 - p))[:, None]).T @ data.a / len(data.y)
        way, length = np.linalg.solve(curvature, gradient), 1.0
        while length > 1e-12 and data.loss(w - length * way) > data.loss(w) - 1e-4 * length * float(gradient @ way):
            length /= 2
        w = w - length * way
    return w


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


# -- training ---------------------------------------------------------------------------------------------------------


class Regime(NamedTuple):
    name: str
    form: Format
    master: bool
    scaled: bool


REGIMES = (
    Regime("FP32", FORMATS["fp32"], True, False),
    Regime("FP16 weights, scaling", FORMATS["fp16"], False, True),
    Regime("FP16 + FP32 master, scaling", FORMATS["fp16"], True, True),
    Regime("FP16 + FP32 master, no scaling", FORMATS["fp16"], True, False),
    Regime("BF16 weights", FORMATS["bf16"], False, False),
    Regime("BF16 + FP32 master", FORMATS["bf16"], True, False),
)


@dataclass
class Trained:
    """lost: share of nonzero updates that left the stored weight unchanged, at the last step. weights: after EARLY and all
    steps, FP64. curve: (step, excess loss)."""

    excess: float = 0.0
    accuracy: float = 0.0
    lost: float = 0.0
    skipped: int = 0
    scale: float = 1.0
    weights: dict[int, Array] = field(default_factory=dict)
    curve: list[tuple[int, float]] = field(default_factory=list)


def train(data: Data, regime: Regime) -> Trained:
    """Full-batch gradient descent from zero. A non-finite weight gradient skips the step and halves the scale."""

    def store(values: Any) -> Floats:
        if regime.form.name == "fp32":
            return np.asarray(values, dtype=np.float32)
        return round_to(values, regime.form).astype(np.float32)

    found = Trained(scale=FIRST_SCALE if regime.scaled else 1.0)
    inputs = store(data.a)
    across = np.ascontiguousarray(inputs.T)
    y, rate, count = data.y.astype(np.float32), np.float32(data.step), np.float32(len(data.y))
    w = np.zeros(inputs.shape[1], dtype=np.float32)
    good = 0
    for step in range(1, STEPS + 1):
        p = _sigmoid(store(inputs @ store(w)))
        gradient = store(across @ store(np.float32(found.scale) * (p - y) / count))
        if not np.isfinite(gradient).all():
            found.scale, found.skipped, good = found.scale / 2, found.skipped + 1, 0
            continue
        update = rate * (gradient / np.float32(found.scale))
        new = w - update if regime.master else store(w - store(update))
        moving = (update if regime.master else store(update)) != 0
        found.lost = float((moving & (new == w)).sum() / max(int(moving.sum()), 1))
        w, good = new, good + 1
        if regime.scaled and good == INTERVAL:
            found.scale, good = found.scale * 2, 0
        if step in (EARLY, STEPS):
            found.weights[step] = w.astype(np.float64)
        if step % 100 == 0 or step == EARLY:
            found.curve.append((step, data.loss(w.astype(np.float64)) - data.optimum))
    last = w.astype(np.float64)
    found.excess, found.accuracy = data.loss(last) - data.optimum, data.accuracy(last)
    return found


# -- what survives a cast ---------------------------------------------------------------------------------------------


class Cast(NamedTuple):
    """zero, infinite: shares of the nonzero activation gradients. error: of the weight gradient, relative, L2."""

    name: str
    zero: float
    infinite: float
    error: float


def casts(data: Data, w: Array) -> tuple[list[Cast], float, float]:
    """The rows, and the smallest and largest magnitude of the activation gradient (p - y) / N."""
    gradient = (_sigmoid(data.a @ w) - data.y) / len(data.y)
    sizes = np.abs(gradient[gradient != 0])
    exact = data.a.T @ gradient
    inputs = {name: round_to(data.a, FORMATS[name]).astype(np.float32).T for name in ("fp16", "bf16")}

    def row(name: str, form: Format, scale: float, wide: str) -> Cast:
        cast = round_to(scale * gradient, form, saturate=form.name in NARROW)
        with np.errstate(invalid="ignore", over="ignore"):
            sums = round_to(inputs[wide] @ cast.astype(np.float32), FORMATS[wide]) / scale
            error = float(np.linalg.norm(sums - exact) / np.linalg.norm(exact))
        zero, infinite = np.sum(cast[gradient != 0] == 0), np.isinf(cast).sum()
        return Cast(name, float(zero / len(sizes)), float(infinite / len(sizes)), error)

    found = [row(f"fp16, 2^{k}", FORMATS["fp16"], 2.0**k, "fp16") for k in range(0, 33, 4)]
    found.append(row("bf16, 1", FORMATS["bf16"], 1.0, "bf16"))
    for name in ("e5m2", "e4m3"):
        found.append(row(f"{name.upper()} unscaled", NARROW[name], 1.0, "bf16"))
        found.append(row(f"{name.upper()} per tensor", NARROW[name], NARROW[name].max / float(sizes.max()), "bf16"))
    return found, float(sizes.min()), float(sizes.max())


# -- accumulators -----------------------------------------------------------------------------------------------------


class Sum(NamedTuple):
    """Relative errors of adding terms one after another, and in pairs. exact, sequential, pairwise: of one sum alone."""

    name: str
    sequential_error: float
    pairwise_error: float
    exact: float | None = None
    sequential: float | None = None
    pairwise: float | None = None


def one_after_another(terms: Array, form: Format) -> Array:
    """Sums over the first dimension, rounded to the format after each addition. terms: [n, ...]."""
    total = np.zeros(terms.shape[1:])
    if form.name == "fp32":
        return np.add.accumulate(terms.astype(np.float32), axis=0, dtype=np.float32)[-1].astype(np.float64)
    if form.name == "fp16":
        # NumPy's own float16 addition rounds once, too, and is faster than a loop over 262,144 scalars.
        with np.errstate(over="ignore"):
            return np.add.accumulate(terms.astype(np.float16), axis=0, dtype=np.float16)[-1].astype(np.float64)
    for term in terms:
        total = round_to(total + term, form)
    return total


def in_pairs(terms: Array, form: Format) -> Array:
    """As above, by adding neighbours, then neighbouring sums, and so on. terms: [2^k, ...]."""
    while len(terms) > 1:
        with np.errstate(over="ignore"):
            terms = round_to(terms[0::2] + terms[1::2], form)
    return terms[0]


def sums(data: Data, w: Array, picture: Array | None) -> list[Sum]:
    """picture: [262144] FP16 numbers, or None. The terms of the weight gradient are FP16 products at a scale of 2^16."""
    fp16 = FORMATS["fp16"]
    gradient = round_to(2.0**16 * (_sigmoid(data.a @ w) - data.y) / len(data.y), fp16)
    terms = round_to(round_to(data.a, fp16) * gradient[:, None], fp16)
    found, whole = [], terms.sum(axis=0)
    for form in (FORMATS["fp16"], FORMATS["fp32"]):
        if picture is not None:
            exact = float(np.sum(picture, dtype=np.longdouble))
            line, pairs = float(one_after_another(picture, form)), float(in_pairs(picture, form))
            errors = abs(line - exact) / exact, abs(pairs - exact) / exact
            found.append(Sum(f"camera, {form.name}", *errors, exact, line, pairs))
    for form in (FORMATS["fp16"], FORMATS["fp32"]):
        errors = _off(one_after_another(terms, form), whole), _off(in_pairs(terms, form), whole)
        found.append(Sum(f"weight gradient, {form.name}", *errors))
    return found


def _off(found: Array, exact: Array) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def camera() -> Array | None:
    """scikit-image's bundled picture, FP16 in [0, 1], flat; None where it is not installed."""
    try:
        from skimage import data as pictures  # an optional extra
    except ImportError:
        return None
    return round_to(pictures.camera().astype(np.float64).ravel() / 255, FORMATS["fp16"])


def rounding_checks() -> dict[str, Any]:
    """Rounding against NumPy's own float16 cast, and three numbers around 1."""
    generator = np.random.default_rng(1)
    signs = generator.choice([-1.0, 1.0], 200_000)
    values = np.concatenate(
        [signs * 2 ** generator.uniform(-30, 17, 200_000), 1 + (2 * np.arange(1, 500) + 1) * 2.0**-11]
    )
    with np.errstate(over="ignore"):
        odd = int(np.sum(round_to(values, FORMATS["fp16"]) != values.astype(np.float16).astype(np.float64)))
    near = {text: float(round_to(value, FORMATS["fp16"])) for text, value in
            {"1 + 2^-12": 1 + 2**-12, "1 + 2^-11": 1 + 2**-11, "1 + 3 x 2^-12": 1 + 3 * 2**-12}.items()}  # fmt: skip
    return {
        "values": len(values),
        "mismatches": odd,
        "fp16": near,
        "fp32": float(round_to(1 + 2**-12, FORMATS["fp32"])),
    }


@dataclass
class Lab:
    """Everything that the lab has found."""

    checks: dict[str, Any]
    data: Data
    trained: dict[str, Trained]
    casts: dict[int, tuple[list[Cast], float, float]]
    sums: list[Sum]
    has_picture: bool


def run(say: Say = lambda _: None) -> Lab:
    checks, data, trained = rounding_checks(), draw(), {}
    for regime in REGIMES:
        trained[regime.name] = train(data, regime)
        say(f"{regime.name}: excess loss {trained[regime.name].excess:.3e}")
    weights = trained["FP32"].weights
    picture = camera()
    surviving = {step: casts(data, weights[step]) for step in (EARLY, STEPS)}
    return Lab(checks, data, trained, surviving, sums(data, weights[STEPS], picture), picture is not None)


def right_half_rule(data: Data) -> float:
    """Test accuracy of the rule 'the right half is brighter than the left'."""
    images = data.test[:, :-1].reshape(-1, 16, 16)
    right = images[:, :, 8:].sum(axis=(1, 2)) > images[:, :, :8].sum(axis=(1, 2))
    return float(np.mean(right == (data.test_y > 0)))
