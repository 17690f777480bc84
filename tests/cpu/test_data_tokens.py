"""Ids as at inference, and which of them are targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpdist.data import Rows, Source, byte_tokenizer, load_tokenizer, open_rows, prepare
from mpdist.errors import UsageError

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "no"},
]
PLAIN_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def save_jsonl(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def word_tokenizer(folder: Path, words: int = 97, bos: bool = False, eos: bool = False, template: str = "") -> str:
    """A tokenizer of w0, w1, ... without a pad token; <s> is 0, </s> is 1, w2 is 2."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {"<s>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, words)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="w2"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["<s>", "</s>"])
    if bos or eos:
        single = "<s> $A" * bos or "$A"
        core.post_processor = processors.TemplateProcessing(
            single=single + " </s>" * eos, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    return str(folder)


def rows_of(tmp_path: Path, kind: str, record: dict[str, Any] | list[dict[str, Any]], **settings: Any) -> Rows:
    records = record if isinstance(record, list) else [record]
    path = save_jsonl(tmp_path / "data.jsonl", *records)
    settings = {"tokenizer": "bytes", "seq_len": 128, "packing": "none", "cache": tmp_path / "cache"} | settings
    return open_rows(prepare([Source(path, kind)], say=lambda _: None, **settings))


def first(rows: Rows) -> tuple[list[int], list[int]]:
    """ids and targets of the first row."""
    ids, labels, positions = rows.read(0)
    assert positions.tolist() == list(range(len(ids)))
    return ids.tolist(), [label for label in labels.tolist() if label != -100]


def test_bytes_encode_anything_and_give_it_back(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == 260
    text = "".join(map(chr, [*range(1, 1000), 0x1F600, 0x4E2D]))
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    tokenizer.save_pretrained(str(tmp_path))
    again = load_tokenizer(str(tmp_path))
    assert len(again) == 260
    assert again(text)["input_ids"] == ids
    assert again.convert_ids_to_tokens([0, 1, 2, 3]) == ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    assert again.apply_chat_template(CHAT)["input_ids"] == tokenizer.apply_chat_template(CHAT)["input_ids"]


def test_the_byte_template_is_chatml_with_the_answers_marked(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    expected = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == expected
    prompt = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids, targets = first(rows_of(tmp_path, "messages", {"messages": CHAT}, loss_on="assistant"))
    assert tokenizer.decode(ids) == expected
    assert tokenizer.decode(targets) == "yes<|im_end|>no<|im_end|>"


def test_completion_of_messages_is_the_last_answer(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    more = [*CHAT, {"role": "user", "content": "thanks"}]
    for chat in (CHAT, more):
        ids, targets = first(rows_of(tmp_path, "messages", {"messages": chat}, loss_on="completion"))
        assert tokenizer.decode(targets) == "no<|im_end|>"
        prompt = tokenizer.apply_chat_template(CHAT[:3], add_generation_prompt=True)["input_ids"]
        assert ids[: len(prompt)] == prompt
    plain = tmp_path / "plain.jinja"
    plain.write_text(PLAIN_CHATML)
    rows = rows_of(tmp_path, "messages", {"messages": CHAT}, loss_on="completion", chat_template=str(plain))
    assert tokenizer.decode(first(rows)[1]) == "no<|im_end|>"


def test_assistant_loss_is_refused_where_the_template_cannot_mark_it(tmp_path: Path) -> None:
    plain = tmp_path / "plain.jinja"
    plain.write_text(PLAIN_CHATML)
    with pytest.raises(UsageError, match=r"generation %\} marks"):
        rows_of(tmp_path, "messages", {"messages": CHAT}, loss_on="assistant", chat_template=str(plain))
    folder = word_tokenizer(tmp_path / "words")
    with pytest.raises(UsageError, match="no chat template"):
        rows_of(tmp_path, "messages", {"messages": CHAT}, tokenizer=folder)
    with pytest.raises(UsageError, match="only messages have an assistant"):
        rows_of(tmp_path, "text", {"text": "x"}, loss_on="assistant")
    with pytest.raises(UsageError, match="a text has no completion"):
        rows_of(tmp_path, "text", {"text": "x"}, loss_on="completion")


def test_a_template_that_rewrites_what_came_before_is_refused_for_completion(tmp_path: Path) -> None:
    odd = tmp_path / "odd.jinja"
    odd.write_text("{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(UsageError, match="cannot be had from this chat template"):
        rows_of(tmp_path, "messages", {"messages": CHAT}, loss_on="completion", chat_template=str(odd))


def test_a_template_that_refuses_a_record_makes_it_a_bad_one(tmp_path: Path) -> None:
    strict = tmp_path / "strict.jinja"
    strict.write_text(
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('users first') }}{% endif %}" + PLAIN_CHATML
    )
    records = [{"messages": CHAT}, {"messages": CHAT[1:]}, {"messages": CHAT[2:]}]
    with pytest.raises(UsageError, match=r"data\.jsonl:2: users first"):
        rows_of(tmp_path, "messages", records, chat_template=str(strict))
    rows = rows_of(tmp_path, "messages", records, chat_template=str(strict), bad_record="skip")
    assert rows.report["sources"][0]["dropped"] == {"refused by the chat template": 1}
    assert len(rows) == 2


def test_tools_reach_the_template(tmp_path: Path) -> None:
    shown = tmp_path / "tools.jinja"
    shown.write_text("{% for tool in tools or [] %}{{ tool['name'] }};{% endfor %}{{ messages[0]['content'] }}")
    records = [{"messages": CHAT, "tools": [{"name": "look"}]}, {"messages": CHAT}]
    rows = rows_of(tmp_path, "messages", records, chat_template=str(shown))
    tokenizer = byte_tokenizer()
    assert [tokenizer.decode(rows.read(i)[0]) for i in range(2)] == ["look;hi", "hi"]


def test_prompt_and_completion_meet_between_tokens(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    record = {"prompt": "2 + 2 =", "completion": " 4"}
    ids, targets = first(rows_of(tmp_path, "prompt_completion", record, loss_on="completion"))
    assert tokenizer.decode(ids) == "2 + 2 = 4<|endoftext|>"
    assert tokenizer.decode(targets) == " 4<|endoftext|>"
    assert ids[:7] == tokenizer("2 + 2 =")["input_ids"]
    ids, targets = first(rows_of(tmp_path, "prompt_completion", record, loss_on="all"))
    assert targets == ids[1:]


def test_a_tokenizer_that_puts_a_space_first_does_not_put_it_into_a_completion(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"</s>": 0, "\u2581": 1} | {c: i for i, c in enumerate(alphabet, 2)} | {"\n": 300}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>").save_pretrained(str(tmp_path / "spm"))
    record = {"prompt": "a=", "completion": "b c"}
    rows = rows_of(tmp_path, "prompt_completion", record, tokenizer=str(tmp_path / "spm"), loss_on="completion")
    ids, targets = first(rows)
    words = load_tokenizer(str(tmp_path / "spm")).convert_ids_to_tokens(ids)
    assert words == ["\u2581", "a", "=", "b", "\u2581", "c", "</s>"]
    assert len(targets) == 4


TEMPLATE_WITH_BOS = "{{ bos_token }} {% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
TEMPLATE_WITHOUT = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"


@pytest.mark.parametrize("template", [TEMPLATE_WITH_BOS, TEMPLATE_WITHOUT])
@pytest.mark.parametrize("loss_on", ["all", "completion"])
def test_c85_one_begin_token_whoever_puts_it_there(tmp_path: Path, template: str, loss_on: str) -> None:
    folder = word_tokenizer(tmp_path / "words", bos=True, template=template)
    chat = {"messages": [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}]}
    ids, _ = first(rows_of(tmp_path, "messages", chat, tokenizer=folder, loss_on=loss_on))
    assert ids == [0, 5, 6, 7]


def test_c85_text_and_prompts_begin_once_and_end_once(tmp_path: Path) -> None:
    for eos in (False, True):
        folder = word_tokenizer(tmp_path / f"words{eos}", bos=True, eos=eos)
        for text in ("w5 w6", "<s> w5 w6", "<s> w5 w6 </s>", "w5 w6 </s>"):
            ids, targets = first(rows_of(tmp_path, "text", {"text": text}, tokenizer=folder))
            assert ids == [0, 5, 6, 1], (text, eos)
            assert targets == [5, 6, 1]
        record = {"prompt": "w5", "completion": "w6"}
        ids, targets = first(rows_of(tmp_path, "prompt_completion", record, tokenizer=folder, loss_on="completion"))
        assert ids == [0, 5, 6, 1]
        assert targets == [6, 1]
    none = word_tokenizer(tmp_path / "none")
    assert first(rows_of(tmp_path, "text", {"text": "w5"}, tokenizer=none))[0] == [5, 1]


def test_c73_no_pad_token_is_needed_and_an_id_outside_the_embedding_is_named(tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path / "words", words=98)
    good = [{"text": "w5 w6"}, {"text": "w96"}]
    assert load_tokenizer(folder).pad_token is None
    rows = rows_of(tmp_path, "text", good, tokenizer=folder, vocab_rows=97)
    assert rows.report["max_id"] == 96
    bad = [*good, {"text": "w4 w97"}]
    with pytest.raises(UsageError, match=r"data\.jsonl:3: token id 97 is outside .* 97 rows"):
        rows_of(tmp_path, "text", bad, tokenizer=folder, vocab_rows=97)
    assert len(rows_of(tmp_path, "text", bad, tokenizer=folder)) == 3
    with pytest.raises(UsageError, match=r"data\.jsonl:3: token id 97"):  # also from what is prepared already
        rows_of(tmp_path, "text", bad, tokenizer=folder, vocab_rows=97)


def test_c121_a_tokenizer_smaller_than_the_embedding_is_fine(tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path / "words", words=97)
    assert len(rows_of(tmp_path, "text", {"text": "w5 w96"}, tokenizer=folder, vocab_rows=104)) == 1


def test_c74_a_pad_token_that_is_the_end_token_stays_a_target(tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path / "words")
    tokenizer = load_tokenizer(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    assert first(rows_of(tmp_path, "text", {"text": "w5 w6"}, tokenizer=folder))[1] == [6, 1]


def test_a_slow_tokenizer_gives_the_same_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mpdist.data.tokens as tokens

    records = [{"text": "abc \u00e4"}, {"text": "d"}]
    fast = rows_of(tmp_path, "text", records)
    monkeypatch.setattr(tokens, "_fast_core", lambda _: None)
    slow = rows_of(tmp_path, "text", records, cache=tmp_path / "other")
    assert fast.digest == slow.digest


def test_tokenizers_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    for name, why in {
        str(tmp_path / "gguf"): "quantised",
        str(tmp_path / "gguf" / "model.gguf"): "quantised",
        str(tmp_path / "empty"): "cannot be loaded",
        str(tmp_path / "nowhere"): "neither bytes",
    }.items():
        with pytest.raises(UsageError, match=why):
            rows_of(tmp_path, "text", {"text": "a"}, tokenizer=name)
