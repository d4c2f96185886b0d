"""How the byte-level tokenizers inside GGUF files split a text before merging."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import gguf
import pytest
from tokenizers import pre_tokenizers

from swarm_kernels.models.gguf_header import GgufHeader
from swarm_kernels.models.source import ModelFile
from swarm_kernels.tokenizer.gguf import read_gguf_tokenizer


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-4o", "I'Ll use HTMLParser 12345//\n", ["I'Ll", " use", " HTMLParser", " ", "123", "45", "//\n"]),
        ("llama4", "don't", ["don't"]),
        ("minimax-m2", "x=1", ["x", "=", "1"]),
        ("tekken", "don't 123", ["don", "'t", " ", "1", "2", "3"]),
        ("deepseek-v3", "a1234 漢字.foo!\n", ["a", "123", "4", " ", "漢字", ".foo", "!\n"]),
        ("seed-coder", "don't 12 a!\n", ["don", "'t", " ", "1", "2", " a", "!", "\n"]),
        ("dbrx", "don't 1234", ["don", "'t", " ", "123", "4"]),
        ("glm4", "don't 1234", ["don", "'t", " ", "123", "4"]),
        ("qwen35", "e\u0301\u0301a 12", ["é\u0301a", " ", "1", "2"]),
    ],
)
def test_text_is_split_before_merging_as_llama_cpp_does(pre: str, text: str, pieces: list[str], tmp_path: Path) -> None:
    """The expressions of llama-vocab.cpp, by what they do with digits, contractions, case and marks."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(pre_tokenizers.ByteLevel.alphabet()))
    writer.add_token_merges([])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with closing(ModelFile(tmp_path / "m.gguf")) as file:
        tokenizer = read_gguf_tokenizer(GgufHeader(file), "m.gguf").tokenizer
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    found = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert found == pieces
