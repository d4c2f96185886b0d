"""Tokenizers from folders and GGUF files against transformers', chat templates, streaming."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from swarm.errors import CorruptModel, InvalidRequest, ModelNotFound, UnsupportedModel
from swarm_kernels.models.gguf_header import GgufHeader
from swarm_kernels.models.open import ModelSource
from swarm_kernels.models.source import ModelFile
from swarm_kernels.tokenizer.gguf import read_gguf_tokenizer
from swarm_kernels.tokenizer.hf import read_hf_tokenizer
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer, load_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ bos_token + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CODE = Path(__file__).read_text(encoding="utf-8")
TEXTS = [
    *("", " ", "\n", "hello world", "  two  spaces ", "\t\ttabs\r\nand\r\n\r\nlines   \n", "don't we'll I'VE"),
    *(
        "naïve café",
        "e\u0301 combining",
        "日本語のテキスト",
        "emoji 🙂👩‍👩‍👧‍👦🇫🇷",
        "العربية हिन्दी",
        "١٢٣ ½ ²",
        "x = [1, 22, 333]",
    ),
    *("a<|im_end|>b <|im_start|>", "<|im_start|", "\u200b\ufeff\x00\x01", "a" * 300, " " * 100),
    *(CODE[i : i + 400] for i in range(0, 4000, 400)),
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <|im_end|> é\n\n1. x"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "  Why? "},
]


def _trained(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """A small byte-level BPE that has merged runs of whitespace, digits and accents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CODE, *TEXTS, "\n\n1. one\n\n2. two\n   33", "12 123 1234 " * 50], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return _trained(pre_tokenizers.ByteLevel(add_prefix_space=False))


@pytest.fixture(scope="module")
def folder(plain: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token=SPECIAL[1], eos_token=SPECIAL[2])
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(path)
    return path


def _vocabulary(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(merge) for merge in model["merges"]]


def _write(path: Path, add: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    add(writer)
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _byte_level_gguf(path: Path, tokenizer: Tokenizer, pre: str, **flags: bool) -> Path:
    tokens, merges = _vocabulary(tokenizer)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
        writer.add_token_merges(merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(TEMPLATE)
        for name, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    return _write(path, add)


def _read_gguf(path: Path) -> ChatTokenizer:
    file = ModelFile(path)
    try:
        return ChatTokenizer(read_gguf_tokenizer(GgufHeader(file), str(path)))
    finally:
        file.close()


def _assert_same(ours: ChatTokenizer, theirs: Any) -> None:
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    for prompt in (True, False):
        assert ours.render_chat(CHAT, prompt) == theirs.apply_chat_template(
            CHAT, tokenize=False, add_generation_prompt=prompt
        )
        assert ours.apply_chat_template(CHAT, prompt) == theirs.apply_chat_template(
            CHAT, add_generation_prompt=prompt, return_dict=False
        )


def test_a_folder_gives_what_transformers_gives(folder: Path) -> None:
    ours = ChatTokenizer(read_hf_tokenizer(folder))
    theirs = AutoTokenizer.from_pretrained(folder)
    _assert_same(ours, theirs)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_ids == (2,)


def test_a_folder_s_post_processor_wraps_a_text_and_flags_do_not(
    folder: Path, tmp_path: Path, plain: Tokenizer
) -> None:
    wrapped = Tokenizer.from_str(plain.to_str())
    wrapped.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    wrapped.save(str(tmp_path / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    for flags in ({"add_bos_token": False}, {"add_eos_token": True}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **flags}))
        ours = ChatTokenizer(read_hf_tokenizer(tmp_path))
        _assert_same(ours, AutoTokenizer.from_pretrained(tmp_path))
        assert ours.encode("x")[0] == 1
        assert ours.encode("x", add_special_tokens=False) == ours.encode("x")[1:]


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True, "add_eos_token": True}])
def test_a_gguf_file_gives_what_transformers_gives(plain: Tokenizer, tmp_path: Path, flags: dict[str, bool]) -> None:
    path = _byte_level_gguf(tmp_path / "m.gguf", plain, "gpt-2", **flags)
    _assert_same(_read_gguf(path), _transformers_gguf(path))


def _transformers_gguf(path: Path) -> Any:
    """Straight from the file's tokenizer: `from_pretrained` would first want a whole model's metadata."""
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, content, config = get_gguf_tokenizer(str(path))
    backend, _ = convert_gguf_tokenizer(architecture, content)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **config)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("pre", "steps"),
    [
        ("smollm", [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        (
            "llama-bpe",
            [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)],
        ),
        (
            "qwen2",
            [
                pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"),
                pre_tokenizers.ByteLevel(False, use_regex=False),
            ],
        ),
    ],
)
def test_pre_tokenizers_are_those_of_the_original_models(
    pre: str, steps: list[pre_tokenizers.PreTokenizer], tmp_path: Path
) -> None:
    """As in the tokenizer.json that SmolLM2, Llama 3 and Qwen2 were published with."""
    original = _trained(pre_tokenizers.Sequence(steps))
    if pre == "qwen2":
        original.normalizer = normalizers.NFC()
    ours = _read_gguf(_byte_level_gguf(tmp_path / "m.gguf", original, pre))
    assert (ours.encode("x")[0] == 1) == (pre == "llama-bpe")
    for text in [*TEXTS, "\n\n1. one\n\n  22 two\n   333", "v1.2   3"]:
        assert ours.encode(text, add_special_tokens=False) == original.encode(text).ids, text
    newlines = original.token_to_id("ĊĊ")
    assert newlines in ours.encode("a\n\n1. b")


def test_a_sentencepiece_vocabulary_gives_what_transformers_gives(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first")
    control = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*control, *(f"<0x{i:02X}>" for i in range(256))], show_progress=False
    )
    tokenizer.train_from_iterator([CODE, "hello world two spaces"], trainer)
    tokens, _ = _vocabulary(tokenizer)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_chat_template(TEMPLATE)

    path = _write(tmp_path / "m.gguf", add)
    ours = _read_gguf(path)
    _assert_same(ours, _transformers_gguf(path))
    assert ours.encode("hello")[0] == 1
    for text in TEXTS:
        assert _streamed(ours, ours.encode(text)) == ours.decode(ours.encode(text))


def test_tokenizers_that_cannot_be_read_are_named(plain: Tokenizer, folder: Path, tmp_path: Path) -> None:
    def unigram(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_token_list(["a"])

    with pytest.raises(UnsupportedModel, match="t5"):
        _read_gguf(_write(tmp_path / "a.gguf", unigram))
    with pytest.raises(UnsupportedModel, match="no tokenizer"):
        _read_gguf(_write(tmp_path / "b.gguf", lambda writer: None))
    with pytest.raises(UnsupportedModel, match="nobody-knows"):
        _read_gguf(_byte_level_gguf(tmp_path / "c.gguf", plain, "nobody-knows"))
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        read_hf_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(UnsupportedModel, match="make one with transformers"):
        read_hf_tokenizer(tmp_path)
    for content in ("{", "{}", json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": 3}}), "\x00"):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(CorruptModel):
            read_hf_tokenizer(tmp_path)


def test_merges_of_unknown_tokens_are_corrupt(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b"])
        writer.add_token_merges(["a zzz"])

    with pytest.raises(CorruptModel, match="malformed"):
        _read_gguf(_write(tmp_path / "m.gguf", add))


@pytest.fixture(scope="module")
def ours(folder: Path) -> ChatTokenizer:
    return ChatTokenizer(read_hf_tokenizer(folder))


def _streamed(tokenizer: ChatTokenizer, ids: list[int], *, skip: bool = True) -> str:
    decoder = tokenizer.stream(skip_special_tokens=skip)
    return "".join([decoder.push(token) for token in ids]) + decoder.finish()


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_streamed_pieces_join_to_the_whole(ours: ChatTokenizer, data: st.DataObject, skip: bool) -> None:
    """Also where the bytes are no UTF-8 at all, as an untrained model's are."""
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=60))
    assert _streamed(ours, ids, skip=skip) == ours.decode(ids, skip_special_tokens=skip)


def test_long_runs_of_broken_bytes_are_given_out_as_they_come(ours: ChatTokenizer) -> None:
    rng = random.Random(0)
    broken = [token for token in range(ours.vocab_size) if ours.decode([token]) == "\ufffd"]
    ids = [rng.choice(broken) for _ in range(500)]
    decoder = ours.stream()
    pieces = [decoder.push(token) for token in ids]
    assert "".join(pieces[:100])
    assert "".join(pieces) + decoder.finish() == ours.decode(ids)


def test_a_character_in_several_tokens_comes_out_whole(ours: ChatTokenizer) -> None:
    ids = ours.encode("𓀀!")
    assert len(ids) > 2
    decoder = ours.stream()
    assert [decoder.push(token) for token in ids if token != ids[-1]][-1] == "𓀀"
    decoder = ours.stream()
    assert decoder.push(ids[0]) == ""
    assert decoder.finish() == "\ufffd"


def test_bad_text_and_ids_are_invalid_requests(ours: ChatTokenizer) -> None:
    with pytest.raises(InvalidRequest):
        ours.encode("\ud800")
    with pytest.raises(InvalidRequest):
        ours.decode([-1])
    with pytest.raises(InvalidRequest):
        ours.decode([1 << 40])


@pytest.mark.parametrize(
    "messages",
    [[], [{}], ["hi"], [{"role": "user"}], [{"role": "user", "content": None}], [{"role": 1, "content": "x"}]],
)
def test_malformed_messages_are_invalid_requests(ours: ChatTokenizer, messages: list[Any]) -> None:
    with pytest.raises(InvalidRequest):
        ours.apply_chat_template(messages)


def _with_template(folder: Path, tmp_path: Path, template: str) -> ChatTokenizer:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return ChatTokenizer(read_hf_tokenizer(tmp_path))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ dict.__subclasses__() }}",
        "{% set ns = namespace(__class__=1) %}{{ ns }}",
        "{{ raise_exception('Conversation roles must alternate') }}",
        "{{ 1 / 0 }}",
        "{{ messages[99].content.x }}",
        "{{ 'a' * 10 ** 15 }}",
    ],
)
def test_templates_that_misbehave_are_stopped(folder: Path, tmp_path: Path, template: str) -> None:
    tokenizer = _with_template(folder, tmp_path, template)
    with pytest.raises(InvalidRequest):
        tokenizer.apply_chat_template(CHAT)


def test_templates_that_cannot_be_parsed_are_corrupt(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CorruptModel, match="chat template"):
        _with_template(folder, tmp_path, "{% for %}")


def test_the_words_templates_use(folder: Path, tmp_path: Path) -> None:
    template = (
        "{% generation %}{{ messages[0] | tojson }}{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}"
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
        "{{ strftime_now('%Y') | length }}{{ dict(a=1).a }}{% if tools %}t{% endif %}"
    )
    ours = _with_template(folder, tmp_path, template)
    assert ours.render_chat([{"role": "user", "content": "<é>"}]) == '{"role": "user", "content": "<é>"}141'


def test_without_a_template_there_is_no_chat(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    tokenizer = ChatTokenizer(read_hf_tokenizer(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(UnsupportedModel, match="no chat template"):
        tokenizer.apply_chat_template(CHAT)


@pytest.mark.real_model
def test_the_built_in_tokenizer(real_model: ModelSource) -> None:
    ours = load_tokenizer(real_model)
    theirs = _transformers_gguf(real_model.path)
    # transformers does not know `smollm` and keeps GPT-2's rule; give it the rule SmolLM2 was published with
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    _assert_same(ours, theirs)
    assert ours.eos_token_ids == (2,)
    assert ours.vocab_size == 49152
    assert ours.render_chat([{"role": "user", "content": "Hi"}]).endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
