"""A model in whole runs: one loss however rows are laid out, ties, frozen parts, buffers, experts, loads and exports."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import engines
import pytest
import tiny
import watched
import worlds

DDP: dict[str, Any] = {"shard": {"engine": "ddp"}}
STAGE2: dict[str, Any] = {"shard": {"engine": "fsdp2", "stage": 2}}
STAGE3: dict[str, Any] = {"shard": {"engine": "fsdp2", "stage": 3}}
BOTH = [pytest.param(DDP, id="ddp"), pytest.param(STAGE3, id="fsdp2")]
# Sums of squares over shards round in another order, and a clip hands that on to the weights.
UNCLIPPED = {"lr": 1e-3, "schedule": "linear", "warmup": 0, "clip": None}
TIED = {**tiny.LLAMA, "tie_word_embeddings": True}
MIXTRAL = {**tiny.LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
           "output_router_logits": True, "router_aux_loss_coef": 0.1}  # fmt: skip


def folder_of(path: Path, config: dict[str, Any], dtype: str = "float32", **options: Any) -> Path:
    """A Hugging Face folder of a random model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    made.to(getattr(torch, dtype)).save_pretrained(path, **options)
    return path


def own_modules(cache: str) -> None:
    """Foreign code is copied to a folder of the test, not to the user's."""
    from transformers import dynamic_module_utils

    dynamic_module_utils.HF_MODULES_CACHE = cache


def loaded(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


def exported(run: tiny.Result, path: Path, dtype: str | None = None) -> Any:
    from mpdist import export

    export.run(str(run.folder), str(path), dtype)
    return loaded(path)


def good(runs: list[watched.Watched]) -> list[watched.Watched]:
    for run in runs:
        assert run.status == 0, run.message
    return runs


# -- one loss, however the rows are laid out ----------------------------------------------------------------------------


def losses_of_batches(_: int, compute: str, batches: list[list[list[int]]], width: int) -> list[tuple[float, int]]:
    """(summed loss, label tokens) of each batch of token lists, padded on the right to `width`; [] is a filler row."""
    import torch

    made = engines.rig(0, compute=compute, scale={"dynamic": False, "scale": 1.0})
    found = []
    for lists in batches:
        ids = torch.zeros(len(lists), width, dtype=torch.int64)
        labels = torch.full_like(ids, -100)
        for row, tokens in enumerate(lists):
            ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            labels[row, : max(len(tokens) - 1, 0)] = torch.tensor(tokens[1:], dtype=torch.int64)
        rows = engines.Rows(ids, labels)
        found.append((made.forward(rows, 1.0)[1].item(), rows.tokens))
    return found


def test_c74_c126_padding_and_filler_rows_change_no_loss() -> None:
    long, short = [5, 9, 2, 44, 61, 7, 13, 90], [31, 8, 77]
    for compute in ("fp32", "bf16", "fp16"):
        together, filled, alone, other = worlds.run(
            losses_of_batches, 1, compute, [[long, short], [long, short, []], [long], [short]], 8
        )[0]
        assert (together[1], filled[1], alone[1] + other[1]) == (9, 9, 9)
        close = {"fp32": 1e-6, "bf16": 4e-3, "fp16": 5e-4}[compute]
        assert together[0] == pytest.approx(alone[0] + other[0], rel=close)
        assert filled[0] == pytest.approx(together[0], rel=close)
        tight = worlds.run(losses_of_batches, 1, compute, [[short]], 3)[0][0]  # no padding at all
        assert tight[0] == pytest.approx(other[0], rel=close)


def test_c75_labels_are_shifted_once(tmp_path: Path) -> None:
    """After 150 steps on 123123... the model goes on with 2 after 1; shifted twice it would say 3, at the same loss."""
    import torch

    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": "123" * 10}) + "\n" for _ in range(8)))
    run = tiny.train(tmp_path, 1, budget__steps=150, optim__lr=1e-2, optim__schedule="constant", data__packing="none",
                     data__seq_len=32, track__every=50, batch={"micro": 8, "global": 8})  # fmt: skip
    assert run.status == 0, run.message
    assert run.column("train/loss")[-1] < 0.05
    made = exported(run, tmp_path / "export").eval()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    ids = torch.tensor([tokenizer("1231").input_ids])
    following = made.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert tokenizer.decode(following) == "231"
    (tmp_path / "plain").touch()
    written = [tmp_path / "export" / "model.safetensors", *run.folder.glob("checkpoints/step-*/rng/*")]
    assert {path.stat().st_mode for path in written} == {(tmp_path / "plain").stat().st_mode}, "the umask decides"


def influence(_: int, cache: str, data: str, packing: str, model_type: str) -> tuple[int, float, float]:
    """Through the data's own rows: documents a row, and the largest gradient of a document's loss in the embeddings of
    other documents and in its own."""
    import torch

    from mpdist.data import IGNORED, Source, collate, open_rows, prepare

    rows = open_rows(prepare([Source(data)], tokenizer="bytes", seq_len=64, packing=packing, cache=Path(cache),
                             say=lambda _: None))  # fmt: skip
    made = engines.rig(0, model_type=model_type, vocab_size=260)
    embedding = made.engine.module.get_input_embeddings()
    kept: list[Any] = []
    embedding.register_forward_hook(lambda _, __, out: kept.append(out))
    batch = {k: torch.from_numpy(v) for k, v in collate(rows, torch.arange(1).numpy(), 1, 64).items()}
    labels, places = batch["labels"][0], batch["position_ids"][0]
    documents = (places == 0).cumsum(0)
    count = int(documents.max())
    others, own = 0.0, 0.0
    for document in range(1, count + 1):
        kept.clear()
        index = ((documents == document) & (labels != IGNORED)).nonzero()[:, 0]
        objective = made.engine.module(input_ids=batch["input_ids"], position_ids=batch["position_ids"], index=index,
                                       targets=labels[index], factor=torch.tensor(1.0))[0]  # fmt: skip
        (grad,) = torch.autograd.grad(objective, kept[0])
        inside = documents == document
        others = max(others, grad[0][~inside].abs().max().item())
        own = max(own, grad[0][inside].abs().max().item())
    return count, others, own


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_c76_c77_a_packed_document_feels_no_other_in_attention_or_loss(tmp_path: Path, packing: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("hello there", "abc", "one two three four")))
    for model_type in ("llama", "qwen3"):
        count, others, own = worlds.run(influence, 1, str(tmp_path / "cache"), str(data), packing, model_type)[0]
        assert count >= 3
        assert others == 0.0
        assert own > 0.0


def test_c78_packed_and_unpacked_runs_are_the_same(tmp_path: Path) -> None:
    """Ten documents of very different lengths, all of them in each window: ten rows, or four, or one."""
    words = [1, 40, 3, 25, 2, 8, 33, 5, 14, 2]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": "ab " * n}) + "\n" for n in words))
    model = {"config": {**tiny.LLAMA, "max_position_embeddings": 512}}
    cuts = [("none", 128, 5, 10), ("best_fit", 128, 1, 4), ("best_fit", 512, 1, 1), ("concat", 512, 1, 1)]
    runs = good(watched.sessions(tmp_path, 1, [
        {"model": model, "budget__steps": 3, "data__seq_len": length, "data__packing": packing,
         "batch": {"micro": micro, "global": rows}}
        for packing, length, micro, rows in cuts
    ]))  # fmt: skip
    for run, (_, _, _, rows) in zip(runs, cuts, strict=True):
        assert sum(len(numbers) for numbers in run.attempts[0].rows) == rows
        assert run.column("train/label_tokens") == runs[0].column("train/label_tokens")
        assert run.column("train/loss") == pytest.approx(runs[0].column("train/loss"), rel=1e-6)
        assert run.column("train/grad_norm") == pytest.approx(runs[0].column("train/grad_norm"), rel=1e-5)


@pytest.mark.parametrize("engine", BOTH)
def test_c76_an_architecture_that_mixes_packed_documents_is_refused_unless_unpacked(
    tmp_path: Path, engine: Any
) -> None:
    bloom = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 260}
    model = {"config": bloom}
    packed, unpacked, half = watched.sessions(
        tmp_path, 2, [{**engine, "model": model}, {**engine, "model": model, "data__packing": "none"},
                      {**engine, "model": model, "precision__compute": "bf16"}]
    )  # fmt: skip
    assert unpacked.status == 0, unpacked.message
    for refused in (packed, half):
        assert [rank.status for rank in refused.ranks] == [2, 2]
        assert "data.packing: in BloomForCausalLM a packed document sees the one before it" in refused.message


# -- frozen and kept parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", BOTH)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_frozen_parameters_hold_no_master_gradient_or_moment(tmp_path: Path, engine: Any, compute: str) -> None:
    model = {"config": tiny.LLAMA, "freeze": ["model.embed_tokens.*", "*.layers.0.*"]}
    run = good(watched.sessions(tmp_path, 2, [{**engine, "model": model, "precision__compute": compute}]))[0]
    seen = run.ranks[0]
    names = set(seen.start)
    frozen = {name for name in names if "embed_tokens" in name or ".layers.0." in name}
    moved = {name for name in names if not bool((seen.start[name] == seen.end[name]).all())}
    assert moved == names - frozen
    assert set(seen.masters) == names - frozen
    trained = sum(seen.start[name].numel() for name in names - frozen)
    held = sum(seen.start[name].numel() for name in frozen)
    rows: dict[tuple[str, str], int] = {}
    for row in run.ledger():
        if row["elements"]:
            key = row["row"], row["dtype"]
            rows[key] = rows.get(key, 0) + row["elements"]
    copies = 2 if engine is DDP else 1
    assert rows["parameters", "float32"] == rows["gradients", "float32"] == copies * trained
    assert rows["moments", "float32"] == 2 * copies * trained
    # Frozen ones exist once, in the compute dtype; under ddp the trained ones have a working copy beside the master.
    working = copies * held + (copies * trained if engine is DDP and compute == "bf16" else 0)
    assert rows["working", {"fp32": "float32", "bf16": "bfloat16"}[compute]] == working


KEPT = [["*norm*"], ["*.mlp"], ["lm_head"], ["model.embed_tokens"], ["model.layers.1", "lm_head"]]


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept[0])
def test_modules_kept_in_fp32_are_the_same_bits_on_both_engines(tmp_path: Path, kept: list[str]) -> None:
    base = {"precision": {"compute": "bf16", "keep_fp32": kept}, "optim": UNCLIPPED}
    bare = {**DDP, "precision": {"compute": "bf16"}, "optim": UNCLIPPED, "name": "bare"}
    *runs, plain = good(watched.sessions(tmp_path, 2, [{**base, **DDP}, {**base, **STAGE3}, {**base, **STAGE2}, bare]))
    for run in runs[1:]:
        assert run.column("train/loss") == runs[0].column("train/loss")
        assert tiny.same(run.ranks[0].end, runs[0].ranks[0].end)
    assert not tiny.same(plain.ranks[0].end, runs[0].ranks[0].end)


@pytest.mark.parametrize("engine", BOTH)
def test_half_of_a_tied_pair_cannot_be_kept_in_fp32(tmp_path: Path, engine: Any) -> None:
    keep = {"precision": {"compute": "bf16", "keep_fp32": ["lm_head"]}, "model": {"config": TIED}}
    run = watched.sessions(tmp_path, 2, [{**engine, **keep}])[0]
    assert [rank.status for rank in run.ranks] == [2, 2]
    assert "tied to model.embed_tokens.weight" in run.message


# -- ties, buffers, vocabulary ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pretrained", [False, True])
def test_c114_c115_tied_weights_stay_one_parameter(tmp_path: Path, pretrained: bool) -> None:
    import torch

    source = {"path": str(folder_of(tmp_path / "start", TIED, "bfloat16"))} if pretrained else {"config": TIED}
    changes = [{**engine, "model": source, "budget__steps": 3, "optim": UNCLIPPED} for engine in (DDP, STAGE2, STAGE3)]
    runs = good(watched.sessions(tmp_path, 2, changes))
    for i, run in enumerate(runs):
        seen = run.ranks[0]
        assert len(seen.start) == 20
        assert "lm_head.weight" not in seen.start
        assert not torch.equal(seen.start["model.embed_tokens.weight"], seen.end["model.embed_tokens.weight"])
        assert tiny.same(seen.end, runs[0].ranks[0].end)
        moments = sum(row["elements"] for row in run.ledger() if row["row"] == "moments")
        assert moments == 2 * (2 if i == 0 else 1) * sum(t.numel() for t in seen.start.values())
    made = exported(runs[2], tmp_path / "export", "fp32")
    assert made.lm_head.weight is made.model.embed_tokens.weight
    assert torch.equal(made.lm_head.weight, runs[2].ranks[0].end["model.embed_tokens.weight"])
    if pretrained:  # and they began as the file has them
        start = loaded(tmp_path / "start").model.embed_tokens.weight
        assert torch.equal(runs[0].ranks[1].start["model.embed_tokens.weight"], start.float())


def buffers_after_dirty_memory(rank: int, path: str | None, **options: Any) -> dict[str, Any]:
    import torch

    dirty = [torch.full((n,), float("nan")) for n in (8, 16, 32, 64, 128, 1024, 4096) for _ in range(50)]
    del dirty
    made = engines.rig(rank, path=path, **options)
    loss = made.forward(engines.draw(), 1.0)[1].item()
    return {"buffers": {n: b.clone() for n, b in made.engine.module.named_buffers()}, "loss": loss}


def test_c117_buffers_are_those_of_a_normally_built_model_on_every_rank(tmp_path: Path) -> None:
    import torch

    folder = folder_of(tmp_path / "start", engines.TINY)
    plain = loaded(folder)
    expected = dict(plain.named_buffers())
    losses = set()
    for options in ({"engine": "ddp"}, {"engine": "fsdp2", "stage": 3}, {"engine": "fsdp2", "stage": 2}):
        for found in worlds.run(buffers_after_dirty_memory, 2, str(folder), **options):
            assert found["buffers"].keys() == expected.keys()
            for name, buffer in found["buffers"].items():
                assert buffer.dtype == expected[name].dtype == torch.float32
                assert torch.equal(buffer, expected[name]), name
            losses.add(found["loss"])
    assert len(losses) == 1
    rows = engines.draw()
    logits = plain(input_ids=rows.ids, use_cache=False).logits
    truth = torch.nn.functional.cross_entropy(logits.view(-1, 97), rows.labels.view(-1), reduction="sum")
    assert losses.pop() == pytest.approx(truth.item(), rel=1e-6)


def test_c121_a_padded_vocabulary_keeps_its_rows_and_a_small_one_is_refused(tmp_path: Path) -> None:
    padded = {"model": {"config": {**tiny.LLAMA, "vocab_size": 264}}}
    small = {"model": {"config": {**tiny.LLAMA, "vocab_size": 100}}}
    first, second = watched.sessions(tmp_path, 2, [padded, small])
    assert first.status == 0, first.message
    made = exported(first, tmp_path / "export")
    assert made.get_input_embeddings().weight.shape[0] == made.lm_head.weight.shape[0] == made.config.vocab_size == 264
    assert [rank.status for rank in second.ranks] == [2, 2]
    assert "100" in second.message


# -- experts --------------------------------------------------------------------------------------------------------------

# A router loss that does not depend on the rows: whatever the cut, its gradient must come in once.
CONSTANT = """
from transformers import LlamaConfig, LlamaForCausalLM
class Constant(LlamaForCausalLM):
    router_aux_loss_coef = 0.1
    def forward(self, output_router_logits=None, **kwargs):
        out = super().forward(**kwargs)
        out.aux_loss = self.lm_head.weight.float().norm()
        return out
"""


def test_c119_an_auxiliary_loss_does_not_grow_with_ranks_or_micro_batches(tmp_path: Path) -> None:
    arm = functools.partial(own_modules, str(tmp_path / "modules"))
    folder = folder_of(tmp_path / "start", tiny.LLAMA)
    (folder / "own.py").write_text(CONSTANT)
    stored = json.loads((folder / "config.json").read_text())
    own = {
        "auto_map": {"AutoModelForCausalLM": "own.Constant"},
        "architectures": ["Constant"],
        "output_router_logits": True,
    }
    (folder / "config.json").write_text(json.dumps({**stored, **own}))
    base = {"model": {"path": str(folder), "trust_remote_code": True}, "budget__steps": 2, "optim": UNCLIPPED}

    def cut(name: str, micro: int, **more: Any) -> dict[str, Any]:
        return {**base, "batch": {"micro": micro, "global": 8}, "name": name, **more}

    alone = good(watched.sessions(tmp_path, 1, [cut("a", 8), cut("b", 2, **DDP)], arm=arm))
    pair = good(watched.sessions(tmp_path, 2, [cut("c", 4), cut("d", 1, **DDP), cut("e", 2, **STAGE2)], arm=arm))
    norm = loaded(folder).lm_head.weight.norm().item()
    for run in alone + pair:
        assert run.column("train/aux_loss")[0] == pytest.approx(0.1 * norm, rel=1e-6)
        for name in ("train/loss", "train/grad_norm", "train/aux_loss"):
            assert run.column(name) == pytest.approx(alone[0].column(name), rel=1e-5), name
    # The control: without that term the gradient is another one.
    (folder / "config.json").write_text(json.dumps({**stored, **own, "output_router_logits": False}))
    without = good(watched.sessions(tmp_path, 1, [cut("f", 8)], arm=arm))[0]
    assert without.column("train/grad_norm")[0] != pytest.approx(alone[0].column("train/grad_norm")[0], rel=1e-3)


def test_a_mixture_of_experts_trains_alike_on_both_engines_and_comes_back(tmp_path: Path) -> None:
    import torch

    folder = folder_of(tmp_path / "start", MIXTRAL)
    changes = [
        {**engine, "model": {"path": str(folder)}, "budget__steps": 2, "optim": UNCLIPPED}
        for engine in (DDP, STAGE3, STAGE2)
    ]
    runs = good(watched.sessions(tmp_path, 2, changes))
    for run in runs:
        assert run.column("train/loss") == runs[0].column("train/loss")
        assert run.column("train/aux_loss") == runs[0].column("train/aux_loss")
        assert tiny.same(run.ranks[0].end, runs[0].ranks[0].end)
    # The router loss of 4 experts, 2 a token, is 2 where the load is even, times its weight.
    assert 0.1 * 2 * 0.95 < runs[0].column("train/aux_loss")[0] < 0.1 * 2 * 1.3
    start = dict(loaded(folder).named_parameters())
    assert all(torch.equal(runs[0].ranks[1].start[name], p) for name, p in start.items())
    end = dict(exported(runs[1], tmp_path / "export").named_parameters())
    assert all(torch.equal(runs[1].ranks[0].end[name], p) for name, p in end.items())


# -- loads ----------------------------------------------------------------------------------------------------------------


def test_every_kind_of_folder_gives_the_same_masters_on_every_engine(tmp_path: Path) -> None:
    import torch

    one = folder_of(tmp_path / "one", tiny.LLAMA, "bfloat16")
    several = folder_of(tmp_path / "several", tiny.LLAMA, "bfloat16", max_shard_size="20KB")
    pickled = folder_of(tmp_path / "pickled", tiny.LLAMA, "bfloat16")
    torch.save(loaded(pickled).state_dict(), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    expected = {name: p.float() for name, p in loaded(one).named_parameters()}
    changes = [{**engine, "model": {"path": str(path)}, "budget__steps": 1, "data__packing": "none"}
               for path in (one, several, pickled) for engine in (DDP, STAGE3)]  # fmt: skip
    for i, run in enumerate(good(watched.sessions(tmp_path, 2, changes))):
        for rank in run.ranks:
            assert tiny.same(rank.start, expected)
        env = json.loads((run.folder / "sessions" / "0001" / "env.json").read_text())
        assert env["weights"] == ("each rank reads its rows" if i < 4 else "rank 0 reads and sends")


@pytest.mark.parametrize("engine", BOTH)
def test_a_folder_that_lacks_a_tensor_is_refused_on_every_rank(tmp_path: Path, engine: Any) -> None:
    from safetensors.torch import load_file, save_file

    folder = folder_of(tmp_path / "start", tiny.LLAMA)
    path = folder / "model.safetensors"
    lost = "model.layers.1.mlp.up_proj.weight"
    save_file({n: t for n, t in load_file(path).items() if n != lost}, path, metadata={"format": "pt"})
    run = watched.sessions(tmp_path, 2, [{**engine, "model": {"path": str(folder)}}])[0]
    assert [rank.status for rank in run.ranks] == [6, 6]
    assert lost in run.message


def resident_growth(rank: int, path: str, **options: Any) -> tuple[int, int]:
    """(growth of this process's anonymous peak memory while it builds, shards and fills the model; FP32 model), bytes."""
    import os
    import threading

    def anonymous() -> int:  # of this process alone; pages of mapped files are the kernel's cache
        with open(f"/proc/{os.getpid()}/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    import torch.distributed as dist

    engines.rig(rank, **{k: v for k, v in options.items() if k == "engine"}, stage=3)  # imports and pools
    before, peak, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.0005):
            peak[0] = max(peak[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    made = engines.rig(rank, path=path, **options)
    done.set()
    watcher.join()
    dist.barrier()
    size = sum(4 * math.prod(part.shape) for part in made.engine.parts)
    return max(peak[0], anonymous()) - before, size


def test_a_sharded_load_never_holds_the_whole_model_in_fp32(tmp_path: Path) -> None:
    """A model of 100 MB in FP32 over four ranks: each grows by its quarter and little more."""
    large = {**engines.TINY, "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 10}
    folder = folder_of(tmp_path / "start", large, "bfloat16", max_shard_size="10MB")
    found = worlds.run(resident_growth, 4, str(folder), engine="fsdp2", stage=3)
    size = found[0][1]
    assert size > 90e6
    for growth, _ in found:
        assert growth > size / 4  # its own shard: something was measured
        assert growth < 0.5 * size


# -- deterministic algorithms -------------------------------------------------------------------------------------------------

# `put_` has no deterministic implementation, on a CPU neither.
UNCERTAIN = """
import torch
from transformers import LlamaForCausalLM
class Uncertain(LlamaForCausalLM):
    def forward(self, **kwargs):
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))
        return super().forward(**kwargs)
"""


def test_deterministic_refuses_an_operation_that_is_not_and_names_it(tmp_path: Path) -> None:
    arm = functools.partial(own_modules, str(tmp_path / "modules"))
    folder = folder_of(tmp_path / "start", tiny.LLAMA)
    (folder / "own.py").write_text(UNCERTAIN)
    stored = json.loads((folder / "config.json").read_text())
    own = {"auto_map": {"AutoModelForCausalLM": "own.Uncertain"}, "architectures": ["Uncertain"]}
    (folder / "config.json").write_text(json.dumps({**stored, **own}))
    base = {"model": {"path": str(folder), "trust_remote_code": True}, "budget__steps": 1, "data__packing": "none"}
    strict, packed, free = watched.sessions(
        tmp_path, 2, [base, {**base, "data__packing": "best_fit"}, {**base, "deterministic": False}], arm=arm
    )
    assert free.status == 0, free.message
    for refused in (strict, packed):
        assert [rank.status for rank in refused.ranks] == [2, 2]
        assert "deterministic = true, but the model uses put_" in refused.message
