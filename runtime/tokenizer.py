"""A bundle's tokenizer: loaded once at start, then text to ids and ids to text per request, from any thread."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Vocabulary

from ostinato.engines.errors import BundleError, RequestError

from .chat_template import Message, load_chat_template
from .token_bytes import TokenBytes, token_bytes_of
from .tool_style import ToolStyle
from .word_memo import MAX_TEXT_CHARS, WordMemo, cuts_words

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
_COMPOSED = 3
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenText(NamedTuple):
    """A token as logprobs show it. `text` of bytes that are not whole UTF-8 is bytes:\\xe2\\x82, so it is distinct."""

    text: str
    raw: bytes


class Tokenizer:
    """Reads tokenizer.json, tokenizer_config.json and the chat template of a bundle's tokenizer/ folder.

    `vocab_size` is one more than the highest id that has a token; an engine's logits may be wider. `table` holds every
    token's bytes where the decoder works token by token, else it is None. Raises BundleError for a folder that can't
    be read.
    """

    def __init__(self, folder: Path) -> None:
        self._vocabulary, table, config = _read(folder)
        # Cutting and padding are the runtime's affair; set once, as changing them later is not thread-safe.
        self._vocabulary.no_truncation()
        self._vocabulary.no_padding()
        named = _named_tokens(config)
        self._template = load_chat_template(folder, config, named)
        tokens = {token_id: token for token, token_id in self._vocabulary.get_vocab().items()}
        added = self._vocabulary.get_added_tokens_decoder()
        tokens.update({token_id: token.content for token_id, token in added.items()})
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max(tokens) + 1
        self.bos_id = self._id_of(named.get("bos_token"))
        self.eos_id = self._id_of(named.get("eos_token"))
        self.table: TokenBytes | None = token_bytes_of(table.get("decoder"), tokens, self.special_ids)
        self._longest = _longest_bytes(self.table, self._vocabulary.normalizer is not None)
        self._adds_bos = self.bos_id is not None and self._vocabulary.encode("").ids[:1] == [self.bos_id]
        self._memo = WordMemo(partial(self._look_up, add_special_tokens=False)) if cuts_words(table) else None
        self._prefix = self._prefix_ids()

    def _prefix_ids(self) -> list[int] | None:
        """What the tokenizer's own template puts before a text; None where it does more than that."""
        bare, framed = self._look_up("a", False), self._look_up("a", True)
        num_before = len(framed) - len(bare)
        return framed[:num_before] if framed[num_before:] == bare else None

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._vocabulary.token_to_id(token)

    def to_json(self) -> str:
        """What tokenizer.json says, for another reader of such files."""
        return self._vocabulary.to_str()

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def tool_style(self) -> ToolStyle | None:
        """How the model writes tool calls; None without a chat template."""
        return None if self._template is None else self._template.style

    def special_id(self, text: str) -> int | None:
        """The id of the special token whose name `text` is."""
        token_id = self._vocabulary.token_to_id(text) if text else None
        return token_id if token_id in self.special_ids else None

    def encode(self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]:
        """Token ids. With `add_special_tokens` the tokenizer's own template adds BOS, unless `text` begins with it.

        Raises RequestError for text that is not Unicode (a lone surrogate), and, before it takes the time to find its
        tokens, for text that can't have as few as `max_tokens`.
        """
        ids = self._encode(text, add_special_tokens, "prompt", max_tokens)
        twice = add_special_tokens and self._adds_bos and ids[1:2] == [self.bos_id]
        return ids[1:] if twice else ids

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        *,
        continues_last: bool = False,
        variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation; the template writes its own special tokens, so none are added.

        Raises RequestError `chat_template_error` without a template, without messages, or when the template refuses.
        """
        if self._template is None:
            raise RequestError(
                "the bundle has no chat template: send a prompt to completions instead, or build from a checkpoint "
                "that has one",
                param="messages",
                code="chat_template_error",
            )
        if not messages:
            raise RequestError("messages is empty: send one or more", param="messages", code="chat_template_error")
        if not all(isinstance(message, Mapping) for message in messages):
            raise RequestError(
                "messages holds something else than objects: give each a role and content",
                param="messages",
                code="chat_template_error",
            )
        text = self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continues_last=continues_last,
            tools=tools,
            variables=variables,
        )
        return self._encode(text, False, "messages", max_tokens)

    def _encode(self, text: str, add_special_tokens: bool, param: str, max_tokens: int | None) -> list[int]:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise RequestError(f"{param} has a lone surrogate, which is no text: send Unicode", param=param) from None
        if max_tokens is not None and self._longest is not None and num_bytes > max_tokens * self._longest:
            raise RequestError(
                f"{param} has {num_bytes} bytes, more than {max_tokens} tokens can hold, which is all the context: "
                "shorten it",
                param=param,
                code="context_length_exceeded",
            )
        prefix = self._prefix if add_special_tokens else []
        if self._memo is None or prefix is None or len(text) > MAX_TEXT_CHARS:
            return self._look_up(text, add_special_tokens)
        return prefix + self._memo.encode(text)

    def _look_up(self, text: str, add_special_tokens: bool) -> list[int]:
        """Unlike encode(), the batch call lets other threads run: a large text takes seconds. It leaves offsets out."""
        return self._vocabulary.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole id list; ids without a token have none.

        Each maximal ill-formed part becomes one U+FFFD. (The `tokenizers` library agrees, but for SentencePiece byte
        pieces: there one bad byte makes it mark every byte of the run, whole characters too.)
        """
        if self.table is not None:
            return self.table.decode(ids, skip_special_tokens)
        return self._vocabulary.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text; a special token's are its name. Empty for an id without a token."""
        if self.table is not None:
            return self.table.every.get(token_id, b"")
        return self._vocabulary.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> TokenText:
        raw = self.token_bytes(token_id)
        try:
            return TokenText(raw.decode(), raw)
        except UnicodeDecodeError:
            return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw)


def _longest_bytes(table: TokenBytes | None, has_normalizer: bool) -> int | None:
    """The most bytes of a text that one token stands for; None where that is not known.

    Composing characters, as normalizers do, makes a text up to three times shorter.
    """
    if table is None:
        return None
    return max(len(raw) for raw in table.every.values()) * (_COMPOSED if has_normalizer else 1)


def _read(folder: Path) -> tuple[Vocabulary, Mapping[str, Any], Mapping[str, Any]]:
    """The tokenizer, tokenizer.json and tokenizer_config.json."""
    texts = []
    for name in (TOKENIZER_FILE, CONFIG_FILE):
        if not (folder / name).is_file():
            raise BundleError(f"{folder / name} is missing: build the bundle again")
        texts.append((folder / name).read_text())
    try:
        return Vocabulary.from_str(texts[0]), json.loads(texts[0]), json.loads(texts[1])
    except Exception as error:  # the library raises bare Exception
        raise BundleError(f"{folder} does not read as a tokenizer ({error}): build the bundle again") from None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … as text: each is a string or an object with `content`, or null."""
    found = {name: config[name] for name in _NAMED_TOKENS if config.get(name) is not None}
    return {name: token if isinstance(token, str) else token["content"] for name, token in found.items()}
