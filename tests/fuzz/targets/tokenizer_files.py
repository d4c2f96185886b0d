"""tokenizer.json: a tokenizer that encodes and decodes, or CorruptModel; never the end of the process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from swarm.errors import InvalidRequest, ModelError
from swarm_kernels.tokenizer.json_bounds import check_tokenizer_json
from swarm_kernels.tokenizer.parts import MalformedTokenizer, TokenizerParts
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer

INSTRUMENT = ("swarm_kernels.tokenizer",)


def run(data: bytes) -> None:
    try:
        check_tokenizer_json(data, "a file")
        with MalformedTokenizer("a file"):
            library = Tokenizer.from_str(data.decode())
        tokenizer = ChatTokenizer(TokenizerParts(library))
        ids = tokenizer.encode("Hello, ab  12\u00e9\U0001f642 <s>a\n")
        assert isinstance(tokenizer.decode(ids), str)
    except (ModelError, InvalidRequest):
        return


def seeds() -> Iterator[bytes]:
    vocab = {"a": 0, "b": 1, "ab": 2, "\u0120": 3, "<0xC3>": 4, "<unk>": 5}
    added = [{"id": 6, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": True}]  # fmt: skip
    bpe = {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
           "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
           "vocab": vocab, "merges": [["a", "b"]]}  # fmt: skip
    split = {
        "type": "Split",
        "pattern": {"Regex": "\\p{N}{1,3}|\\s+(?!\\S)|\\s+"},
        "behavior": "Isolated",
        "invert": False,
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [6], "tokens": ["<s>"]}}}  # fmt: skip
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    unigram = {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["<unk>", 0.0], ["a", -1.0], ["ab", -2.5]],
        "byte_fallback": False,
    }
    meta = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    files: tuple[dict[str, Any], ...] = (
        {"model": bpe, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}, "decoder": level,
         "post_processor": template, "normalizer": {"type": "NFC"}},
        {"model": unigram, "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"},
         replace]}, "pre_tokenizer": meta, "decoder": {"type": "Sequence", "decoders": [replace,
         {"type": "ByteFallback"},
         {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}, "post_processor": None},
        {"model": {"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##",
         "max_input_chars_per_word": 9, "vocab": vocab}, "normalizer": {"type": "Precompiled",
         "precompiled_charsmap": "BAAAAAAAAAAA"}, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
    )  # fmt: skip
    for file in files:
        yield json.dumps(
            {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **file}
        ).encode()
