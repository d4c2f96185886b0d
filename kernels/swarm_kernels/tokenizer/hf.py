"""The tokenizer of a Hugging Face folder: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`.

`tokenizer.json` defines all ids, those added around a text included; as in transformers 5, the flags `add_bos_token`
and `add_eos_token` beside it are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from swarm.errors import CorruptModel, ModelNotFound, UnsupportedModel
from swarm_kernels.models.safetensors import read_json
from swarm_kernels.tokenizer.chat_template import MAX_TEMPLATE
from swarm_kernels.tokenizer.json_bounds import MAX_FILE, check_tokenizer_json
from swarm_kernels.tokenizer.parts import MalformedTokenizer, TokenizerParts

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OTHER_KINDS = ("tokenizer.model", "vocab.json", "tekken.json", "vocab.txt", "tiktoken.model")


def read_hf_tokenizer(folder: Path) -> TokenizerParts:
    """Raises ModelNotFound, CorruptModel, UnsupportedModel."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        if any((folder / name).is_file() for name in _OTHER_KINDS):
            raise UnsupportedModel(
                f"{folder} has no tokenizer.json; make one with transformers: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        raise ModelNotFound(f"{folder} has no tokenizer.json")
    text = _read_text(file, MAX_FILE)
    check_tokenizer_json(text.encode(), str(file))
    with MalformedTokenizer(str(file)):
        tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()  # set in some files, and never used here
    tokenizer.no_padding()
    settings = read_json(folder / "tokenizer_config.json", required=False)
    special = _named_tokens(settings)
    eos = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    templates = _chat_templates(folder, settings)
    eos_ids = () if eos is None else (eos,)
    return TokenizerParts(tokenizer, templates.get("default"), special, eos_ids, templates.get("tool_use"))


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Each is a string, or an object whose `content` is the string."""
    named = {}
    for key in _NAMED:
        value = settings.get(key)
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str) and value:
            named[key] = value
    return named


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """By name; "default" is the usual one, and "tool_use" the one with tools, as in transformers."""
    named: dict[str, str] = {}
    file, tool_file = folder / "chat_template.jinja", folder / "additional_chat_templates" / "tool_use.jinja"
    if tool_file.is_file():
        named["tool_use"] = _read_text(tool_file, 4 * MAX_TEMPLATE)
    if file.is_file():
        return {**named, "default": _read_text(file, 4 * MAX_TEMPLATE)}
    beside = read_json(folder / "chat_template.json", required=False)
    given = settings.get("chat_template") or beside.get("chat_template")
    entries = given if isinstance(given, list) else [{"name": "default", "template": given}]
    for entry in entries:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None)
        if isinstance(name, str) and isinstance(text, str):
            named[name] = text
    return named


def _read_text(file: Path, limit: int) -> str:
    try:
        if file.stat().st_size > limit:
            raise CorruptModel(f"{file} is too large: more than {limit} bytes")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelNotFound(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CorruptModel(f"{file} is not UTF-8; fetch it again") from None
