"""Every key of a configuration: its type, range, default and meaning. The README's reference is made from this.

Annotations are live objects here, not text: pydantic would compile each text again, which takes as long as all else.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    WithJsonSchema,
    model_validator,
)

from mpdist.errors import UsageError
from mpdist.units import parse_duration, parse_node_memory, parse_time_limit

DEFAULT_STAGE = {"ddp": 0, "fsdp2": 3, "deepspeed": 2}


class Section(BaseModel):
    # `extra` never fires through load(), which reports unknown keys itself with suggestions; it guards other callers.
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)


def _whole(value: Any) -> Any:
    """1e9 is how people write a large count, and YAML reads it as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _duration(value: Any) -> Any:
    try:
        return parse_duration(value)
    except Exception as error:
        raise ValueError(getattr(error, "why", str(error))) from None


def _folder_name(value: str) -> str:
    if not value or value.startswith(".") or "/" in value or "\0" in value or len(value.encode()) > 200:
        raise ValueError("it has to be one folder name: no slash, no NUL, no leading dot, at most 200 bytes")
    return value


def _checkpointing(value: str) -> str:
    if not re.fullmatch(r"none|full|selective|every [1-9]\d*", value):
        raise ValueError("it has to be none, full, selective or 'every N'")
    return value


def _time_limit(value: Any) -> Any:
    return _cured(parse_time_limit, value)


def _memory(value: Any) -> Any:
    return _cured(parse_node_memory, value)


def _cured(parse: Callable[[Any], Any], value: Any) -> Any:
    """With the parser's own cure, behind a line break."""
    try:
        return parse(value)
    except UsageError as error:
        raise ValueError(f"{error.why}\n{error.do}") from None


def _array(value: str) -> str:
    if not re.fullmatch(r"\d+(-\d+(:[1-9]\d*)?)?(,\d+(-\d+(:[1-9]\d*)?)?)*(%[1-9]\d*)?", value, re.ASCII):
        raise ValueError("it has to be numbers and ranges, such as 0-3, 1,4,7 or 0-15%4")
    return value


def _not_empty(value: str) -> str:
    if not value.strip():
        raise ValueError("it is empty")
    return value


Count = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Text = Annotated[str, AfterValidator(_not_empty)]
Seconds = Annotated[
    float,
    Field(gt=0),
    BeforeValidator(_duration),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string"}]}),
]
Texts = Annotated[tuple[Text, ...], Strict(False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
ScaleValue = Annotated[float, Field(ge=1e-18, le=1e18)]  # so that a scaled loss, and what undoes it, fit into FP32
Natural = Annotated[int, Field(ge=0)]
Attempts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Strict(False), Field(min_length=1)]


class Model(Section):
    path: Text | None = Field(
        None, description="A hub id or a folder to load weights from. Exactly one of path and config."
    )
    config: dict[str, Any] | None = Field(
        None, description="A transformers config (model_type, hidden_size, ...) to start from random weights."
    )
    revision: Text | None = Field(None, description="The branch, tag or commit of a hub id.")
    trust_remote_code: bool = Field(False, description="Whether Python code that comes with the model may run here.")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = Field(
        "auto", description="The attention implementation; auto lets transformers choose."
    )
    freeze: Texts = Field(
        (), description="Name patterns of parameters that do not train (fnmatch, such as 'model.embed*')."
    )
    compile: Literal["none", "blocks"] = Field(
        "none", description="blocks: each block is compiled before it is sharded."
    )


class Source(Section):
    path: Text = Field(description="A jsonl, parquet or txt file, a folder saved by datasets, or a hub id.")
    format: Literal["text", "prompt_completion", "messages"] = Field("text", description="What a record holds.")
    split: Text | None = Field(None, description="The split of a hub id or a datasets folder.")
    weight: float = Field(
        1.0, gt=0, le=1e6, description="How many times an epoch goes through this source; 0.5 is half of it."
    )
    fields: dict[str, Text] = Field(
        default_factory=dict, description="Other names for a record's fields, such as {prompt: question}."
    )


Sources = Annotated[tuple[Source, ...], Strict(False)]


class Data(Section):
    train: Sources = Field(min_length=1, description="What to train on: a list of sources.")
    eval: Sources = Field((), description="Held-out sources; without any there is no evaluation.")
    tokenizer: Text = Field(
        "model", description="model (the one beside the weights), bytes (one id a byte), or a folder or hub id."
    )
    seq_len: int = Field(512, ge=2, le=10**9, description="Tokens in a row.")
    packing: Literal["none", "concat", "best_fit"] = Field(
        "best_fit", description="How documents share a row; they never see each other."
    )
    loss_on: Literal["all", "completion", "assistant"] = Field("all", description="Which tokens the loss counts.")
    too_long: Literal["auto", "error", "truncate", "drop", "split"] = Field(
        "auto", description="A record longer than seq_len; auto splits text and is an error for the others."
    )
    bad_record: Literal["error", "skip"] = Field("error", description="A record that cannot be read; skip counts it.")
    last_window: Literal["short", "drop"] = Field("short", description="An epoch's last window if it has too few rows.")
    shuffle: bool = Field(True, description="A new order each epoch, from seed and epoch alone.")
    chat_template: Text | None = Field(None, description="A file with a chat template instead of the tokenizer's own.")
    cache: Text | None = Field(None, description="Where prepared data is kept; null is OUT_DIR/.data.")


class Batch(Section):
    micro: int = Field(1, ge=1, description="Sequences that one rank runs at once.")
    global_: int = Field(
        alias="global",
        ge=1,
        description="Sequences in one optimizer step over all ranks; accumulation follows, exactly.",
    )


class Scale(Section):
    mode: Literal["auto", "dynamic", "static", "off"] = Field(
        "auto", description="auto: dynamic where compute or wire is fp16, else off. static keeps init."
    )
    init: ScaleValue = Field(65536.0, description="The first loss scale.")
    growth: float = Field(2.0, gt=1, le=2.0**16, description="The factor after `interval` windows without an overflow.")
    backoff: float = Field(0.5, gt=0, lt=1, description="The factor after an overflow.")
    interval: int = Field(2000, ge=1, description="Windows without an overflow before the scale grows.")
    floor: ScaleValue = Field(1.0, description="The scale never falls below this.")
    patience: int = Field(20, ge=1, description="Consecutive non-finite windows before the run ends with status 5.")
    on_overflow: Literal["retry", "next"] = Field(
        "retry",
        description="After a gradient that is not finite: retry the same window at the lower scale, so that no sample is lost; or go "
        "on to the next. A window whose loss is not finite is passed over either way.",
    )
    per_block: bool = Field(
        False,
        description="Whether each residual block has a dynamic scale of its own inside this one: for FP16 in deep models, "
        "where one scale flushes the gradients of some blocks or overflows in others.",
    )


class Precision(Section):
    compute: Literal["fp32", "bf16", "fp16"] = Field("bf16", description="The dtype of forward and backward.")
    tf32: bool = Field(False, description="Whether FP32 matrix products may use TF32 where the device has it.")
    master: Literal["fp32", "compute"] = Field(
        "fp32", description="What the optimizer updates; compute is pure 16 bit and is named so in every report."
    )
    keep_fp32: Texts = Field((), description="Name patterns of modules computed in FP32.")
    scale: Scale = Field({}, validate_default=True, description="The loss scale of a window.")


class Shard(Section):
    engine: Literal["ddp", "fsdp2", "deepspeed"] = Field(
        "fsdp2", description="ddp replicates, fsdp2 and deepspeed (ZeRO) shard."
    )
    stage: Literal[0, 1, 2, 3] = Field(
        3,
        description="0 replicates (default of ddp); 1 shards the optimizer; 2 gradients too (default of deepspeed); "
        "3 parameters too (default of fsdp2).",
    )
    replicas: int = Field(1, ge=1, description="Copies of the sharded model (HSDP); divides the world.")
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="What is kept in host memory: optimizer (masters and moments), or all (working copies too).",
    )

    @model_validator(mode="before")
    @classmethod
    def _stage_follows_engine(cls, data: Any) -> Any:
        if isinstance(data, dict) and "stage" not in data:
            return {**data, "stage": DEFAULT_STAGE.get(str(data.get("engine")), 3)}
        return data


class Reduce(Section):
    wire: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="The dtype in which gradients travel between ranks."
    )
    sum: Literal["fp32", "wire"] = Field("fp32", description="The dtype in which the ranks' gradients are added up.")
    when: Literal["every", "last"] = Field(
        "every",
        description="every micro-batch (gradients stay sharded), or the last of a window (less traffic, more memory; the "
        "default of deepspeed stage 1).",
    )


class Memory(Section):
    checkpointing: Annotated[str, AfterValidator(_checkpointing)] = Field(
        "none",
        description="Activations computed again in backward: none, full, selective (per operator), or every N blocks.",
    )
    loss_chunk: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="Tokens whose logits exist at once in the loss."
    )


class Optim(Section):
    name: Literal["adamw"] = Field("adamw", description="The optimizer.")
    lr: float = Field(2e-5, ge=0, description="The peak learning rate.")
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = Field((0.9, 0.95), description="Decay of the two moments.")
    eps: float = Field(1e-8, ge=1e-30, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay, scaled by the learning rate.")
    decay: Literal["matrices", "all"] = Field(
        "matrices", description="What decays: matrices and embeddings, or everything."
    )
    clip: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="The largest gradient norm of a window; null is off."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "cosine", description="How lr falls to 0 after the warm-up."
    )
    warmup: float = Field(
        0.03, ge=0, description="Below 1 a share of the horizon, else steps. 0 by default under a constant schedule."
    )
    horizon: Literal["auto"] | Count = Field(
        "auto", description="The steps that the schedule spans; auto is the budget's."
    )
    fused: Literal["auto"] | bool = Field(
        "auto", description="The fused optimizer kernel; auto takes it where it exists."
    )

    @model_validator(mode="before")
    @classmethod
    def _no_warmup_under_constant(cls, data: Any) -> Any:
        if isinstance(data, dict) and "warmup" not in data and data.get("schedule") == "constant":
            return {**data, "warmup": 0.0}
        return data


class Budget(Section):
    steps: Count | None = Field(None, description="Optimizer steps. Exactly one of the four budgets.")
    epochs: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Passes over the training data; 0.5 is half of one."
    )
    tokens: Count | None = Field(None, description="Tokens processed, padding not counted (train/tokens).")
    seconds: Seconds | None = Field(None, description="Time inside training windows (time/train_s), such as 2h30m.")


class Eval(Section):
    every: int = Field(50, ge=0, description="Steps between evaluations; 0 is only at the end.")
    rows: int = Field(
        256, ge=1, description="Rows over all ranks, so that the figure does not depend on the world size."
    )


class Checkpoint(Section):
    every: int = Field(100, ge=0, description="Steps between checkpoints; 0 is only at the end.")
    keep: int = Field(3, ge=1, description="How many of the newest to keep.")
    keep_best: int = Field(
        1, ge=0, description="How many of those with the lowest evaluation loss at their step to keep beside them."
    )
    background: bool = Field(True, description="Write while training goes on, after a copy to host memory.")
    on_error: Literal["stop", "go_on"] = Field(
        "stop",
        description="A save that fails (a full disk, say): stop, or go on to the next one. The last must succeed.",
    )
    resume: Text = Field(
        "auto",
        description="auto goes on where the run directory stands; never; or a checkpoint's path that starts a new run.",
    )


class Wandb(Section):
    mode: Literal["online", "offline", "disabled"] = Field("offline", description="Where Weights & Biases data go.")
    project: Text = Field("mpdist", description="The project's name there.")
    group: Text | None = Field(None, description="Runs of one group stand together there; a sweep groups its runs.")


class Track(Section):
    every: int = Field(10, ge=1, description="Steps between logged rows.")
    peak_tflops: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="TFLOP/s of one device in precision.compute, which speed/mfu divides by; null is the data sheet's, if "
        "the device is known.",
    )
    replay: Literal["auto", "always", "off"] = Field(
        "auto",
        description="Whether a window that was skipped for a non-finite value is computed again to find where it arose: auto "
        "not at the usual falls of an FP16 scale, always, or off.",
    )
    wandb: Wandb = Field({}, validate_default=True, description="Weights & Biases; one rank logs.")


class Launch(Section):
    ranks: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="Ranks on each node; auto is one a GPU, or one on a machine without."
    )
    nodes: int = Field(1, ge=1, description="Nodes; the world is ranks x nodes.")
    timeout: Seconds = Field(
        600.0, le=7 * 86400, description="How long a collective or a missing rank is waited for, such as 10m."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes the GPUs where there are any.")
    port: Literal["auto"] | Annotated[int, Field(ge=1, le=65535)] = Field(
        "auto", description="The rendezvous port; auto takes a free one on one node and a fixed one on several."
    )
    address: Text | None = Field(
        None, description="The first node's host name or address, where there are several nodes."
    )
    retries: int = Field(
        2, ge=1, description="Failures in a row at the same step after which a launch is refused; more tries once more."
    )


class Slurm(Section):
    """What `mpdist submit` asks of Slurm; null asks for nothing, which leaves it to the cluster's defaults."""

    account: Text | None = Field(None, description="Who pays.")
    partition: Text | None = Field(None, description="The partition, or several: `a,b`.")
    qos: Text | None = Field(None, description="The quality of service.")
    constraint: Text | None = Field(None, description="Features that the nodes must have, such as `h100&nvlink`.")
    time: Annotated[Seconds, BeforeValidator(_time_limit)] | None = Field(
        None, description="The time limit of one start of the job, such as 12h, or as Slurm writes it: 12:00:00."
    )
    gpus_per_node: Count | None = Field(
        None, description="GPUs of each node; null asks for launch.ranks where launch.device is cuda."
    )
    gres: Text | None = Field(None, description="Generic resources of each node, such as `gpu:h100:8`.")
    cpus_per_node: Count | None = Field(None, description="CPUs of each node, which its ranks share.")
    mem: Annotated[str, BeforeValidator(_memory)] | None = Field(
        None, description="Memory of each node, such as 200GiB, or as Slurm writes it: 200G; 0 is all of it."
    )
    exclusive: bool = Field(False, description="Whether the nodes are for this job alone.")
    signal_lead: Annotated[Seconds, Field(ge=1, le=65535)] = Field(
        300.0, description="How long before its time limit the job is told to save and stop. Slurm may be 60 s early."
    )
    requeues: Natural = Field(
        20, description="How often a run that was stopped by Slurm with everything saved is queued again; 0 is never."
    )
    array: Annotated[str, AfterValidator(_array)] | None = Field(
        None, description="A job array, such as `0-3%2`: task K trains NAME-seedK with seed K."
    )
    dependency: Text | None = Field(
        None, description="When it may start, such as `afterok:123`; if that can never be, the job is cancelled."
    )
    extra: Texts = Field((), description="Further options of sbatch as they stand, such as [--mail-type=END].")


class OverflowAt(Section):
    attempts: Attempts | Literal["all"] = Field(description="The attempts, from 1, or all.")
    rank: Natural = Field(0, description="The rank.")
    micro: int = Field(1, ge=1, description="After which of its micro-batches' backward, from 1.")


class NanLossAt(Section):
    attempts: Attempts | Literal["all"] = Field(description="The attempts, from 1, or all.")
    rank: Natural = Field(0, description="The rank.")


class FaultAt(Section):
    attempt: int = Field(ge=1, description="The attempt, from 1.")
    rank: Natural = Field(0, description="The rank.")


class KillAt(Section):
    attempt: int = Field(ge=1, description="The attempt, from 1.")
    rank: Natural | Literal["all"] = Field(0, description="The rank, or all.")
    phase: Literal["train", "save"] = Field(
        "train", description="save: inside the first save at or after that attempt."
    )


class StopAt(FaultAt):
    signal: Literal["TERM", "INT", "HUP", "USR1"] = Field("TERM", description="The signal.")


class ExitAt(FaultAt):
    code: int = Field(0, ge=0, le=255, description="The exit code.")


class DiskFullAt(Section):
    save: int = Field(ge=1, description="The save, from 1.")
    rank: Natural = Field(0, description="The rank.")


class CorruptAt(Section):
    save: int = Field(ge=1, description="The save, from 1.")
    how: Literal["flip", "truncate", "stale"] = Field(
        "flip",
        description="flip one byte in its middle; cut the last byte off; or put the checkpoint before's in its place "
        "(zeros where that has another size).",
    )


class Drill(Section):
    overflow_at: OverflowAt | None = Field(
        None, description="Puts +inf into one local gradient element before any reduction."
    )
    nan_loss_at: NanLossAt | None = Field(None, description="Makes the rank's loss NaN.")
    kill_at: KillAt | None = Field(None, description="SIGKILL to the rank.")
    stop_at: StopAt | None = Field(
        None, description="A stop signal to the rank; its attempt finishes, then the run saves."
    )
    hang_at: FaultAt | None = Field(None, description="The rank stops answering.")
    raise_at: FaultAt | None = Field(None, description="The rank raises an exception.")
    exit_at: ExitAt | None = Field(None, description="The rank leaves early.")
    disk_full_at: DiskFullAt | None = Field(None, description="Writing that save fails as on a full disk.")
    corrupt_at: CorruptAt | None = Field(
        None, description="Damages the largest file of tensors of that save, once it is published."
    )


class Config(Section):
    """One run."""

    name: Annotated[str, AfterValidator(_folder_name)] = Field(
        description="The run's name, and its folder's in out_dir."
    )
    out_dir: Text = Field("runs", description="The folder that holds the run's folder.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seeds weights, dropout and the order of the data.")
    deterministic: bool = Field(
        True, description="Bit-exact resume: deterministic algorithms, or an error naming the operation that has none."
    )
    model: Model = Field({}, validate_default=True, description="What is trained.")
    data: Data = Field({}, validate_default=True, description="What it is trained on.")
    batch: Batch = Field({}, validate_default=True, description="Sequences in a step.")
    precision: Precision = Field({}, validate_default=True, description="Float formats.")
    shard: Shard = Field({}, validate_default=True, description="What each rank holds.")
    reduce: Reduce = Field({}, validate_default=True, description="How gradients are summed over ranks.")
    memory: Memory = Field({}, validate_default=True, description="Time for memory.")
    optim: Optim = Field({}, validate_default=True, description="Optimizer and schedule.")
    budget: Budget = Field({}, validate_default=True, description="When the run is done.")
    eval: Eval = Field({}, validate_default=True, description="Evaluation on data.eval.")
    checkpoint: Checkpoint = Field({}, validate_default=True, description="Saves.")
    track: Track = Field({}, validate_default=True, description="Logging.")
    launch: Launch = Field({}, validate_default=True, description="Processes.")
    slurm: Slurm = Field({}, validate_default=True, description="What `mpdist submit` asks for.")
    drill: Drill = Field({}, validate_default=True, description="Rehearsed faults; attempts and saves count from 1.")

    @model_validator(mode="before")
    @classmethod
    def _zero_1_reduces_once(cls, data: Any) -> Any:
        """ZeRO-1 is the stage that keeps gradients whole, so that they travel once."""
        shard, reduce = (data.get(key, {}) for key in ("shard", "reduce")) if isinstance(data, dict) else ({}, {})
        if not isinstance(shard, dict) or (shard.get("engine"), shard.get("stage")) != ("deepspeed", 1):
            return data
        return {**data, "reduce": {"when": "last", **reduce}} if isinstance(reduce, dict) else data
