"""FSDP's keys, which accelerate and the Trainer share: version 1 by a strategy, version 2 by reshard_after_forward."""

from __future__ import annotations

from typing import Any

from mpdist.translate.document import Document, Wrong, flag, whole, words
from mpdist.translate.draft import NONE, OTHER, SAME, TRANSLATED, Draft, Rule, Verdict, none, off, same

_STRATEGIES = {
    "full_shard": "full_shard", "shard_grad_op": "shard_grad_op", "no_shard": "no_shard",
    "hybrid_shard": "hybrid_shard", "hybrid_shard_zero2": "hybrid_shard_zero2",
    "1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2",
}  # fmt: skip


def setting(document: Document, name: str, default: Any = None) -> Any:
    """A key of fsdp_config, which stands there with or without its prefix."""
    found = document.get(f"fsdp_config.fsdp_{name}")
    return document.get(f"fsdp_config.{name}", default) if found is None else found


def active(document: Document) -> bool:
    if document.format == "accelerate":
        return str(document.get("distributed_type", "")).upper() == "FSDP"
    return options(document) != []


def options(document: Document) -> list[str]:
    """The Trainer's `fsdp`: true, or words such as `full_shard auto_wrap offload`."""
    value = document.get("fsdp", False)
    if isinstance(value, bool):
        return ["on"] if value else []
    return [word for word in words(value) if word not in ("", "false", "no", "none")]


def strategy(document: Document) -> str:
    version = whole(setting(document, "version", 1 if document.format == "accelerate" else 2))
    reshard = setting(document, "reshard_after_forward")
    written = setting(document, "sharding_strategy", reshard)
    for word in options(document) if document.format == "trainer" else ():
        if word in _STRATEGIES:
            return _STRATEGIES[word]
    if version >= 2 and reshard is not None:
        return "full_shard" if flag(reshard) else "shard_grad_op"
    if written is None:
        return "full_shard"
    if isinstance(written, bool):
        return "full_shard" if written else "shard_grad_op"
    if str(written).lower() not in _STRATEGIES:
        raise Wrong("FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2")
    return _STRATEGIES[str(written).lower()]


def layout(draft: Draft, document: Document) -> tuple[dict[str, Any], str]:
    """Our shard keys, and what to know of them."""
    chosen = strategy(document)
    offload = flag(setting(document, "offload_params", setting(document, "cpu_offload", False)))
    offload = offload or "offload" in options(document)
    if chosen == "no_shard":
        return {"shard.engine": "ddp"}, "offload needs shards and is left out" if offload else ""
    sets: dict[str, Any] = {
        "shard.engine": "fsdp2",
        "shard.stage": 2 if chosen in ("shard_grad_op", "hybrid_shard_zero2") else 3,
    }
    if offload:
        sets["shard.offload"] = "all"
    key = "parallelism_config.parallelism_config_dp_replicate_size"
    copies = whole(draft.accelerate.get(key, draft.accelerate.get("parallelism_config.dp_replicate_size", 1)))
    if chosen.startswith("hybrid"):
        copies = max(copies, draft.world.nodes)
    if copies > 1:
        sets["shard.replicas"] = copies
    return sets, ""


def _layout_rule(document_of: Any, *ours: str) -> Rule:
    def rule(_: Any, draft: Draft) -> Verdict:
        document = document_of(draft)
        sets, text = layout(draft, document)
        if any(draft.get(key, value) != value for key, value in sets.items() if key in ours):
            return Verdict(
                OTHER, "sharding is decided by the other file", {key: sets[key] for key in ours if key in sets}
            )
        if strategy(document).startswith("hybrid") and "shard.replicas" not in sets:
            text = text or "one node: a single copy, so nothing is replicated"
        return Verdict(OTHER if text else TRANSLATED, text, {key: sets[key] for key in ours if key in sets})

    return rule


def rules(document_of: Any) -> dict[str, Rule]:
    """For the keys below fsdp_config. ``document_of`` takes the draft and gives the document they are in."""
    plain = _plain()
    shape = _layout_rule(document_of, "shard.engine", "shard.stage", "shard.replicas")
    offload = _layout_rule(document_of, "shard.offload")

    def offloads(value: Any, draft: Draft) -> Verdict:
        return offload(value, draft) if flag(value) else Verdict(SAME, "shard.offload is none here too")

    def version(value: Any, draft: Draft) -> Verdict:
        return Verdict(
            SAME, "mpdist shards with FSDP2; version 1 does the same sums" if str(value) == "1" else "the same"
        )

    plain |= {"sharding_strategy": shape, "reshard_after_forward": shape, "version": version}
    plain |= {"offload_params": offloads, "cpu_offload": offloads}

    def guarded(rule: Rule) -> Rule:
        def judge(value: Any, draft: Draft) -> Verdict:
            if not active(document_of(draft)):
                return Verdict(SAME, "no effect there: the run is not FSDP")
            return rule(value, draft)

        return judge

    named = {f"fsdp_config.{prefix}{name}": guarded(rule) for name, rule in plain.items() for prefix in ("fsdp_", "")}
    return {"fsdp_config": same("empty"), **named, "fsdp_config.xla_fsdp_settings.**": none("for TPUs")}


def _plain() -> dict[str, Rule]:
    fine = "performance of theirs, no number changes; FSDP2 does this by itself"
    blocks = "each block is a unit here; mpdist finds the blocks of the model"

    def wrap(value: Any, _: Draft) -> Verdict:
        if "TRANSFORMER" in str(value).upper():
            return Verdict(SAME, blocks)
        return Verdict(OTHER, f"{blocks}; the units there are others, which changes memory and no number")

    def checkpointing(value: Any, _: Draft) -> Verdict:
        return Verdict(TRANSLATED, "", {"memory.checkpointing": "full" if flag(value) else "none"})

    def state(value: Any, _: Draft) -> Verdict:
        return Verdict(
            NONE, "checkpoints are always sharded here; `mpdist export` writes one that from_pretrained loads"
        )

    return {
        "auto_wrap_policy": wrap,
        "transformer_layer_cls_to_wrap": same(blocks),
        "min_num_params": off("units by size: each block is one here"),
        "backward_prefetch": same(fine),
        "backward_prefetch_policy": same(fine),
        "forward_prefetch": same(fine),
        "limit_all_gathers": same(fine),
        "use_orig_params": same("FSDP2 always keeps the original parameters"),
        "sync_module_states": same("all ranks start from the same weights, which is checked"),
        "cpu_ram_efficient_loading": same("each rank reads its shards only"),
        "state_dict_type": state,
        "activation_checkpointing": checkpointing,
        "activation_checkpointing_offload": off("activations are recomputed or kept, never moved to the host"),
        "ignored_modules": off("every parameter is sharded"),
        "xla": off("for TPUs"),
        "xla_fsdp_v2": off("for TPUs"),
        "xla_fsdp_grad_ckpt": off("for TPUs"),
    }
