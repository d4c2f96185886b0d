"""Tokenizers made to exhaust or to end the program that loads them, and chat templates made for it."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_models_hostile import array, gguf_of, open_header, text, within
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from swarm.errors import CorruptModel, InvalidRequest
from swarm_kernels.tokenizer import chat_template
from swarm_kernels.tokenizer.bounded_encoder import BoundedEncoder, EncodePolicy
from swarm_kernels.tokenizer.chat_template import MAX_TEMPLATE, ChatTemplate
from swarm_kernels.tokenizer.gguf import read_gguf_tokenizer
from swarm_kernels.tokenizer.hf import read_hf_tokenizer
from swarm_kernels.tokenizer.parts import TokenizerParts
from swarm_kernels.tokenizer.template_process import RENDERER
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer

USER = {"role": "user", "content": "Hi"}


def gguf_tokens(path: Path, tokens: list[bytes], kind: bytes = b"llama", **more: bytes) -> Path:
    values = {
        "tokenizer.ggml.model": struct.pack("<I", 8) + text(kind),
        "tokenizer.ggml.tokens": array(8, len(tokens), b"".join(map(text, tokens))),
        "tokenizer.ggml.scores": array(6, len(tokens), bytes(4 * len(tokens))),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }
    return gguf_of(path, *values.items())


def test_one_token_of_400000_letters(tmp_path: Path) -> None:
    """Every cut of it was looked up: 400,000 slices of 200,000 letters."""
    header = open_header(gguf_tokens(tmp_path / "m.gguf", [b"a", b"b" * 400_000]))
    with within(1, 20), pytest.raises(CorruptModel, match="a text of 400000 bytes"):
        read_gguf_tokenizer(header, "it")


def test_4000_tokens_in_each_other(tmp_path: Path) -> None:
    """Each cut of each is two tokens: eight million merges."""
    header = open_header(gguf_tokens(tmp_path / "m.gguf", [b"a" * n for n in range(1, 2001)]))
    with within(2, 50), pytest.raises(CorruptModel, match="too many and too long"):
        read_gguf_tokenizer(header, "it")


def test_more_tokens_than_any_model_has(tmp_path: Path) -> None:
    header = open_header(gguf_tokens(tmp_path / "m.gguf", [b""] * ((1 << 20) + 1)))
    with pytest.raises(CorruptModel, match="1048577 tokens"):
        read_gguf_tokenizer(header, "it")


@pytest.mark.parametrize(
    ("tokens", "more"),
    [
        ([b"a b", b"c"], {"bos_token_id": struct.pack("<II", 4, 0)}),  # the library splits a template at blanks
        ([b"a", b"$A:0 "], {"bos_token_id": struct.pack("<II", 4, 1)}),
        ([b"t%d" % i for i in range(70_000)], {"token_type": array(0, 70_000, b"\x03" * 70_000)}),
    ],
)
def test_added_tokens_that_the_library_refuses(tmp_path: Path, tokens: list[bytes], more: dict[str, bytes]) -> None:
    header = open_header(gguf_tokens(tmp_path / "m.gguf", tokens, **more))
    with within(10, 100), pytest.raises(CorruptModel):
        read_gguf_tokenizer(header, "it")


def test_a_panic_of_the_library_is_a_corrupt_model(tmp_path: Path) -> None:
    """It is no Exception: it went past every handler and ended the process."""
    merges = array(8, 1, text(b"a b"))
    more = {"merges": merges, "pre": struct.pack("<I", 8) + text(b"gpt-2")}
    with pytest.raises(CorruptModel, match="malformed"):
        read_gguf_tokenizer(open_header(gguf_tokens(tmp_path / "m.gguf", [b"a", b"c"], b"gpt2", **more)), "it")
    with pytest.raises(CorruptModel):
        hf_tokenizer(tmp_path, model={"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": [["a", "b"]]})


def hf_tokenizer(folder: Path, **parts: Any) -> ChatTokenizer:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "model": model, **parts}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    return ChatTokenizer(read_hf_tokenizer(folder))


def nested(depth: int) -> Any:
    value: Any = {"type": "NFC"}
    for _ in range(depth):
        value = {"type": "Sequence", "normalizers": [value]}
    return value


GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}
TWICE = [{"Sequence": {"id": "A", "type_id": 0}}] * 2


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [GROWS] * 10}},  # ten thousand million letters for one
        {"decoder": {"type": "Sequence", "decoders": [GROWS] * 10}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 1000}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},  # reserves 4 GB, or aborts
        {"normalizer": nested(100)},
        {"normalizer": nested(400)},
        {"post_processor": {"type": "TemplateProcessing", "single": TWICE, "pair": TWICE, "special_tokens": {}}},
        {"model": {"type": "BPE", "vocab": {"a" * 5000: 0}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 1 << 40}, "merges": []}},
        {"model": {"type": "Unigram", "unk_id": 9, "vocab": [["a", "b"]]}},
        {"model": {}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(" * 40_000}, "behavior": "Isolated"}},
    ],
)
def test_tokenizer_files_that_would_grow_or_abort(tmp_path: Path, parts: dict[str, Any]) -> None:
    with within(5, 100), pytest.raises(CorruptModel):
        hf_tokenizer(tmp_path, **parts).encode("a" * 100)


def test_steps_of_real_models_are_accepted(tmp_path: Path) -> None:
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    tokenizer = hf_tokenizer(
        tmp_path,
        model={"type": "BPE", "vocab": {"\u2581": 0, "a": 1, "b": 2}, "merges": []},
        normalizer={"type": "Sequence", "normalizers": [prepend, space]},
        decoder={"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]},
    )
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"


def with_expression(expression: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(expression), "isolated")
    return tokenizer


def test_an_expression_that_backtracks_for_ever_fails(tmp_path: Path) -> None:
    """The library gives up after ten million steps, by a panic."""
    tokenizer = ChatTokenizer(TokenizerParts(with_expression("(a|aa)+$")))
    assert tokenizer.encode("ab" * 20)
    with pytest.raises(CorruptModel, match="retry-limit"):
        tokenizer.encode("a" * 60 + "b")


def test_a_text_that_takes_too_long_is_left_behind() -> None:
    """Below the library's limit at each place, but at thousands of them."""
    encoder = BoundedEncoder(with_expression("(a|aa)+$|."), EncodePolicy(base_s=0.05, s_per_character=0.0))
    started = time.monotonic()
    with pytest.raises(CorruptModel, match="takes more than"):
        encoder.encode(("a" * 22 + "b") * 200, False)
    assert time.monotonic() - started < 5
    with pytest.raises(CorruptModel, match="still at work"):
        encoder.encode("b", False)
    assert encoder._stuck is not None
    encoder._stuck.join(60)
    assert encoder.encode("b", False) == [1]


def test_a_huge_template_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("x" * (MAX_TEMPLATE + 1))
    with pytest.raises(CorruptModel, match="cannot be parsed"):
        hf_tokenizer(tmp_path)


def repeated(change: str, last: str = "{{ s.x }}") -> str:
    loop = "{% for i in range(60) %}{% set s.x = CHANGE %}{% endfor %}".replace("CHANGE", change)
    return "{% set s = namespace(x='a', y='a') %}" + loop + last


BOMBS = {
    "center": "{{ 'a' | center(10 ** 5 * 10 ** 5) }}",
    "a constant that Jinja computes at once": "{{ 'a' | center(10000000000) }}",
    "format": "{{ '%010000000000d' | format(1) }}",
    "percent": "{{ '%010000000000d' % 1 }}",
    "method format": "{{ '{:10000000000}'.format(1) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "doubling by ~": repeated("s.x ~ s.x"),
    "doubling by +": repeated("s.x + s.x"),
    "replace": repeated("s.x.replace('a', 'aa')"),
    "indent": "{{ ('a\n' * 100000) | indent(100000) }}",
    "batch": "{{ [1] | batch(10000000000, 0) | list | length }}",
    "lists in each other": repeated("[s.x, s.x]", "{{ s.x | tojson }}"),
    "equal lists in each other": repeated("[s.x, s.x] %}{% set s.y = [s.y, s.y]", "{{ s.x == s.y }}"),
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "range": "{% for i in range(10 ** 5 * 10 ** 4) %}{% endfor %}",
}


@pytest.mark.parametrize("template", BOMBS.values(), ids=BOMBS.keys())
def test_templates_that_take_memory_or_time(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, so that whatever a template finds, this one goes on."""
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.3)
    started = time.monotonic()
    with pytest.raises(InvalidRequest, match="does not take these messages"):
        ChatTemplate(template, {}).render([USER], True)
    assert time.monotonic() - started < 20
    assert ChatTemplate("{{ messages[0].content }}", {}).render([USER], True) == "Hi"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in x %}" * 30 + "{% endfor %}" * 30,  # Python has a limit of 20 blocks in each other
        "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
        "{{ " + "-" * 5000 + "1 }}",
        "{% if x %}" * 5000 + "{% endif %}" * 5000,
        "{{ '%z' % 1 }}{% macro a() %}{% endmacro %}{{ '\ud800' }}",
    ],
)
def test_templates_that_python_cannot_compile(template: str) -> None:
    with pytest.raises((CorruptModel, InvalidRequest)):
        ChatTemplate(template, {}).render([USER], True)


def test_a_worker_that_was_killed_is_started_again() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render([USER], True) == "Hi"
    worker = RENDERER._process
    assert worker is not None
    for end in (signal.SIGKILL, signal.SIGTERM):
        os.kill(worker.pid, end)
        worker.wait()
        assert template.render([USER], True) == "Hi"
        worker = RENDERER._process
        assert worker is not None


def test_the_worker_ends_with_its_program() -> None:
    code = (
        "from swarm_kernels.tokenizer.chat_template import ChatTemplate as T, MAX_TEMPLATE\n"
        "from swarm_kernels.tokenizer.template_process import RENDERER\n"
        "T('{{ 1 }}', {}).render([{'role': 'user', 'content': ''}], True)\n"
        "import os; print(RENDERER._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=60, check=False)
    worker = int(done.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the worker outlives its program"
        time.sleep(0.05)


def test_an_added_token_that_matches_nothing() -> None:
    library = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    library.add_special_tokens([AddedToken("", special=True)])
    assert ChatTokenizer(TokenizerParts(library)).encode("aa") == [0, 0]
