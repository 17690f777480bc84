"""From records to token ids, and which of them the loss counts.

The ids are those that the model would see at inference:
* A text is what the tokenizer makes of it, with the special tokens that it adds by default, and one end token.
* A prompt is encoded alone, as it will be at inference, and its completion alone after it, so that no token straddles
  the boundary and the first token of the completion is predicted from exactly the prompt's ids. Tokenizers that put a
  space before whatever they encode (SentencePiece) get the completion as it follows other text, without that space.
* Messages go through the chat template, whose text already holds the special tokens.
There is one begin token where the tokenizer adds one by default, whether a template wrote it or not, and never two; and
one end token after each document or completion, never two. A chat ends as its template ends.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from mpdist import hub
from mpdist.data.records import Bad
from mpdist.errors import UsageError
from mpdist.inputs import looks_local

# {% generation %} marks what the assistant says. A line break after a block tag would be dropped by Jinja's
# trim_blocks, hence the line breaks as values.
CHAT_TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
BYTE_SPECIALS = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
TOKENIZER_FILES = (
    "tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "config.json", "*.py",
)  # fmt: skip


class Document(NamedTuple):
    """Token ids, and whether each is a target: from index ``targets`` on, or one number 0 or 1 a token."""

    ids: list[int]
    targets: int | list[int]


def byte_tokenizer() -> Any:
    """256 bytes and four special tokens: encodes any text, needs no training and no file. Ids are 0 to 259."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*BYTE_SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in BYTE_SPECIALS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        extra_special_tokens=list(BYTE_SPECIALS[2:]),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tokenizer_folder(name: str, revision: str | None = None, key: str = "data.tokenizer") -> Path | None:
    """The folder that holds a tokenizer's files, fetched from the hub if ``name`` is an id; None for ``bytes``.

    key: what gave the name, for messages. Raises UsageError, and MachineError where the hub cannot be asked.
    """
    if name == "bytes":
        return None
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf" or (
        path.is_dir() and any(path.glob("*.gguf")) and not any(path.glob("tokenizer*"))
    ):
        raise UsageError(
            f"{key} = {name} is a GGUF file",
            "its weights are quantised: what is trained from it cannot be saved as it was, nor resumed exactly",
            "convert it first (load with gguf_file, copy into a plain model, save_pretrained), or take the original",
        )
    if path.is_dir():
        return path
    if path.exists() or looks_local(name):
        why = "it is neither bytes, nor a folder that exists, nor a hub id"
        raise UsageError(f"{key} = {name}", why, "correct the path; it is relative to the folder of the start")
    # What was fetched before is taken as it is: all ranks get the same, and none asks the hub.
    need = hub.Need(key, "tokenizer", name, revision)
    lacking = need.lacking()
    if lacking is None:
        return need.folder
    hub.require([(need, lacking)])
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(TOKENIZER_FILES)))
    except Exception as error:
        raise hub.refused(need, error) from None


def tokenizer_digest(folder: Path | None) -> str:
    """sha256 of what decides the ids: the tokenizer's files, or this module's recipe, and the libraries' versions."""
    digest = hashlib.sha256(json.dumps([version("tokenizers"), version("transformers")]).encode())
    if folder is None:
        digest.update(json.dumps(["bytes", BYTE_SPECIALS, CHAT_TEMPLATE]).encode())
        return digest.hexdigest()
    for file in sorted({file for pattern in TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}):
        digest.update(json.dumps([file.name, hashlib.sha256(file.read_bytes()).hexdigest()]).encode())
    return digest.hexdigest()


def load_tokenizer(
    name: str, *, chat_template: str | None = None, trust_remote_code: bool = False, revision: str | None = None
) -> Any:
    """The transformers tokenizer for ``bytes``, a folder or a hub id. ``chat_template``: a file that replaces its own.

    Raises UsageError where it cannot be had.
    """
    folder = tokenizer_folder(name, revision)
    if folder is None:
        tokenizer = byte_tokenizer()
    else:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        except Exception as error:  # AutoTokenizer raises nearly anything for a folder that it cannot read
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UsageError(
                f"data.tokenizer = {name} cannot be loaded", f"{type(error).__name__}: {first}",
                "it needs tokenizer.json or its class's files; code in it runs only with model.trust_remote_code: true",
            ) from None  # fmt: skip
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"data.chat_template = {chat_template} cannot be read", str(error)) from None
    return tokenizer


class Encoder:
    """Records of one format to documents. ``say`` hears what a user should know once."""

    def __init__(self, tokenizer: Any, format: str, loss_on: str, say: Callable[[str], None]) -> None:
        self.tokenizer, self.format, self.loss_on = tokenizer, format, loss_on
        self._fast = _fast_core(tokenizer)
        plain, full = self.encode(["x"])[0], list(tokenizer("x")["input_ids"])
        at = next((i for i in range(len(full)) if plain and full[i : i + len(plain)] == plain), None)
        if at is None:
            raise UsageError(
                f"the tokenizer {type(tokenizer).__name__} encodes otherwise with special tokens than without",
                f"'x' is {full} with them and {plain} without",
            )
        self.begin: list[int] = full[:at]
        self.end: int | None = tokenizer.eos_token_id
        if self.end is None and format != "messages":
            say("the tokenizer has no end token: documents end without one")
        self._anchor = self._find_anchor()
        added = tokenizer.added_tokens_decoder.values()
        self._specials = (*tokenizer.all_special_tokens, *(str(token) for token in added if token.special))
        if format == "messages":
            self._check_template()
        elif loss_on == "assistant":
            raise UsageError(
                f"data.loss_on = assistant, and a source has the format {format}",
                "only messages have an assistant", "use loss_on: completion for prompts and completions, all for text",
            )  # fmt: skip
        elif loss_on == "completion" and format == "text":
            raise UsageError(
                "data.loss_on = completion, and a source has the format text",
                "a text has no completion", "use loss_on: all, or records of prompt and completion",
            )  # fmt: skip

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens added. Ids only: offsets and masks are what makes encoding slow."""
        if self._fast is not None:
            return [encoding.ids for encoding in self._fast.encode_batch_fast(texts, add_special_tokens=False)]
        return [list(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]]

    def documents(self, batch: list[dict[str, Any]]) -> list[Document | Bad]:
        """One document a record, or why there is none. A bad record does not spoil its neighbours."""
        work = {"text": self._texts, "prompt_completion": self._pairs, "messages": self._chats}[self.format]
        try:
            return work(batch)
        except Exception as error:  # templates raise anything, tokenizers TypeError for text that is not Unicode
            if len(batch) > 1:
                half = len(batch) // 2
                return self.documents(batch[:half]) + self.documents(batch[half:])
            if isinstance(error, UsageError):
                raise
            return [_why_not(batch[0], error)]

    def _texts(self, batch: list[dict[str, Any]]) -> list[Document | Bad]:
        return [Document(self._close(self._open(ids)), 0) for ids in self.encode([r["text"] for r in batch])]

    def _pairs(self, batch: list[dict[str, Any]]) -> list[Document | Bad]:
        return self._join([(r["prompt"], r["completion"]) for r in batch], end=True)

    def _join(self, pairs: list[tuple[str, str]], end: bool) -> list[Document | Bad]:
        prompts = [self._open(ids) for ids in self.encode([prompt for prompt, _ in pairs])]
        completions = self._encode_after([completion for _, completion in pairs])
        documents: list[Document | Bad] = []
        for prompt, completion in zip(prompts, completions, strict=True):
            targets = len(prompt) if self.loss_on == "completion" else 0
            documents.append(Document(prompt + (self._close(completion) if end else completion), targets))
        return documents

    def _chats(self, batch: list[dict[str, Any]]) -> list[Document | Bad]:
        if self.loss_on == "completion":
            return self._join([self._last_turn(record) for record in batch], end=False)
        if self.loss_on == "all":
            texts = [self._render(r["messages"], r.get("tools")) for r in batch]
            return [Document(self._open(ids), 0) for ids in self.encode(texts)]
        if len(batch) > 1 and any("tools" in record for record in batch):
            return [document for record in batch for document in self._chats([record])]  # tools are one list a call
        out = self.tokenizer.apply_chat_template(
            [r["messages"] for r in batch], tools=batch[0].get("tools"), tokenize=True, return_dict=True,
            return_assistant_tokens_mask=True,
        )  # fmt: skip
        documents: list[Document | Bad] = []
        for ids, mask in zip(out["input_ids"], out["assistant_masks"], strict=True):
            opened = self._open(list(ids))
            grown = len(opened) - len(ids)
            documents.append(Document(opened, [0] * grown + mask if grown >= 0 else mask[-grown:]))
        return documents

    def _render(self, messages: list[dict[str, Any]], tools: Any, prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)

    def _last_turn(self, record: dict[str, Any]) -> tuple[str, str]:
        """The text up to the last answer, as the model is prompted at inference, and that answer with its end mark.

        What follows the last answer is left out: no token of it is a target, and none is seen by one.
        """
        messages, tools = record["messages"], record.get("tools")
        last = next((i for i in range(len(messages) - 1, -1, -1) if messages[i]["role"] == "assistant"), None)
        if last is None:
            return self._render(messages, tools), ""
        before = self._render(messages[:last], tools, prompt=True)
        whole = self._render(messages[: last + 1], tools)
        if not whole.startswith(before):
            raise UsageError(
                "data.loss_on = completion cannot be had from this chat template",
                "a conversation up to the last answer is rendered otherwise than as the beginning of the whole one: "
                f"{_tail(before)} is not how {_tail(whole)} begins",
                "use loss_on: assistant with a template that has {% generation %} marks, or loss_on: all",
            )
        bare = whole.rstrip()
        if bare.endswith(self._specials):
            whole = bare  # the line break behind an end mark is the template's, and no model gets to write it
        return before, whole[len(before) :]

    def _open(self, ids: list[int]) -> list[int]:
        """With the begin tokens that the tokenizer adds by default, once, whoever put them there."""
        begin = self.begin
        if not begin:
            return ids
        count = len(begin)
        while ids[:count] == begin and ids[count : 2 * count] == begin:
            ids = ids[count:]
        return ids if ids[:count] == begin else begin + ids

    def _close(self, ids: list[int]) -> list[int]:
        if self.end is not None and (not ids or ids[-1] != self.end):
            ids.append(self.end)
        return ids

    def _find_anchor(self) -> tuple[str, int] | None:
        """A text to put before a completion, and its number of ids, where the tokenizer would else add a space."""
        first = self.encode(["x"])[0][0]
        if not str(self.tokenizer.convert_ids_to_tokens(first)).startswith(("\u2581", "\u0120")):
            return None
        return "\n", len(self.encode(["\n"])[0])

    def _encode_after(self, texts: list[str]) -> list[list[int]]:
        """Ids of texts that follow other text."""
        if self._anchor is None:
            return self.encode(texts)
        anchor, count = self._anchor
        lead = self.encode([anchor])[0]
        alone = self.encode(texts)
        after = self.encode([anchor + text for text in texts])
        # a completion that merges with the anchor keeps the ids that it has alone
        return [b[count:] if b[:count] == lead else a for a, b in zip(alone, after, strict=True)]

    def _check_template(self) -> None:
        template = self.tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            raise UsageError(
                "a source has the format messages, and the tokenizer has no chat template",
                "nothing says how messages become text", "name a Jinja file in data.chat_template",
            )  # fmt: skip
        if self.loss_on != "assistant":
            return
        if not re.search(r"\{%-?\s*generation\s*-?%\}", template):
            raise UsageError(
                "data.loss_on = assistant, and the chat template has no {% generation %} marks",
                "without them nothing says which tokens the assistant wrote",
                "name a template that has them in data.chat_template, or use loss_on: completion (the last answer)",
            )
        if self._fast is None:
            raise UsageError(
                f"data.loss_on = assistant, and the tokenizer {type(self.tokenizer).__name__} gives no offsets",
                "the marks are in the text and must be found in the ids", "use a tokenizer with a tokenizer.json",
            )  # fmt: skip


def _fast_core(tokenizer: Any) -> Any:
    """The Rust tokenizer, where calling it directly gives what the Python class would give; else None."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    plain = PreTrainedTokenizerFast
    if any(getattr(type(tokenizer), name) is not getattr(plain, name) for name in ("_encode_plus", "__call__")):
        return None  # a class with its own way of encoding
    core = tokenizer.backend_tokenizer
    core.encode_special_tokens = tokenizer.split_special_tokens
    core.no_truncation()
    core.no_padding()
    return core


def _why_not(record: dict[str, Any], error: Exception) -> Bad:
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as surrogate:
        return Bad("not Unicode", f"the record holds half a character: {surrogate}")
    except (TypeError, ValueError):
        pass  # values that are no JSON can still be what the template stumbled over, which `error` tells
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return Bad("refused by the chat template" if "messages" in record else "refused by the tokenizer", first)


def _tail(text: str) -> str:
    return repr(text if len(text) <= 60 else "..." + text[-57:])
