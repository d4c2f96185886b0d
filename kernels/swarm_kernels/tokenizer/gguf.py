"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library.

Owns llama.cpp's `tokenizer.ggml.*` keys and its pre-tokenizer names (`llama-vocab.cpp`). Where
transformers' GGUF reader and the original tokenizer differ, the original is followed: `smollm` splits digits first,
so that "\\n\\n1." becomes the tokens the model was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from swarm.errors import CorruptModel, UnsupportedModel
from swarm_kernels.models.gguf_header import GgufHeader
from swarm_kernels.tokenizer.parts import (
    MAX_TOKEN,
    MAX_TOKENS,
    MalformedTokenizer,
    TokenizerParts,
    add_tokens,
    wrap_with,
)

_MAX_CUT_WORK = 1 << 27  # sum of the tokens' squared lengths; that of Gemma's 262,144 tokens is 2^24
_CONTROL, _USER_DEFINED = 3, 4
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_SPLIT = _QWEN2_SPLIT.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
_SEED_SPLIT = _QWEN2_SPLIT.replace(r"]+[\r\n]*|", r"]+|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}"
_AFTER_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O_SPLIT = _CASED.replace("{0}", _CONTRACTED) + r"|\p{N}{1,3}" + _AFTER_WORDS
_TEKKEN_SPLIT = _CASED.replace("{0}", "") + r"|\p{N}" + _AFTER_WORDS
_DEEPSEEK3_SPLITS = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True)
class _Pre:
    """How text is split before merging: single digits first, then by `splits`, or by GPT-2's expression if none."""

    digits: bool = False
    splits: tuple[str, ...] = ()
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token is not split by merges
    add_bos: bool = False  # if the file has no such key


_GPT2 = _Pre()
_DIGITS = _Pre(digits=True)
_LLAMA3 = _Pre(splits=(_LLAMA3_SPLIT,), ignore_merges=True, add_bos=True)
_DBRX = _Pre(splits=(_LLAMA3_SPLIT,))
_GLM4 = _Pre(splits=(_LLAMA3_SPLIT,), ignore_merges=True)
_QWEN2 = _Pre(splits=(_QWEN2_SPLIT,), nfc=True)
_GPT4O = _Pre(splits=(_GPT4O_SPLIT,))
_PRE_TOKENIZERS = {
    "": _GPT2, "default": _GPT2, "gpt-2": _GPT2, "mpt": _GPT2, "olmo": _GPT2,
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "command-r": _DIGITS, "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "lfm2": _LLAMA3, "dbrx": _DBRX, "smaug-bpe": _DBRX, "chatglm-bpe": _DBRX, "glm4": _GLM4, "glm5": _GLM4,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "qwen35": _Pre(splits=(_QWEN35_SPLIT,), nfc=True),
    "gpt-4o": _GPT4O, "llama4": _GPT4O, "minimax-m2": _GPT4O,
    "tekken": _Pre(splits=(_TEKKEN_SPLIT,), ignore_merges=True, add_bos=True),
    "seed-coder": _Pre(splits=(_SEED_SPLIT,)), "deepseek-v3": _Pre(splits=_DEEPSEEK3_SPLITS),
}  # fmt: skip


def read_gguf_tokenizer(header: GgufHeader, where: str) -> TokenizerParts:
    """Raises CorruptModel, UnsupportedModel."""
    tokens = header.strings("tokenizer.ggml.tokens", MAX_TOKEN)
    kinds = header.numbers("tokenizer.ggml.token_type")
    if not tokens:
        raise UnsupportedModel(f"{where} has no tokenizer inside; use a file that has one")
    if len(tokens) > MAX_TOKENS:
        raise CorruptModel(f"{where}: its tokenizer has {len(tokens)} tokens; fetch it again")
    if kinds and len(kinds) != len(tokens):
        raise CorruptModel(f"{where}: {len(tokens)} tokens but {len(kinds)} token types; fetch it again")
    model = header.text("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(header, tokens, kinds, where)
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(header, tokens, where), True
    else:
        raise UnsupportedModel(f"{where} has a tokenizer of kind {model[:40]!r}; gpt2 and llama are read")
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    user_defined = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    special = _named_tokens(header, tokens, where)
    bos = special.get("bos_token") if header.flag("tokenizer.ggml.add_bos_token", add_bos) else None
    eos = special.get("eos_token") if header.flag("tokenizer.ggml.add_eos_token", False) else None
    with MalformedTokenizer(f"the tokenizer in {where}"):
        add_tokens(tokenizer, control, user_defined)
        wrap_with(tokenizer, bos, eos)
    eos_id = header.integer("tokenizer.ggml.eos_token_id")
    template = header.text("tokenizer.chat_template") or None
    return TokenizerParts(tokenizer, template, special, () if eos_id is None else (eos_id,))


def _named_tokens(header: GgufHeader, tokens: Sequence[str], where: str) -> dict[str, str]:
    named = {}
    for name, key in _NAMED.items():
        token = header.integer(f"tokenizer.ggml.{key}")
        if token is None:
            continue
        if not 0 <= token < len(tokens):
            raise CorruptModel(f"{where}: {key} is {token}, but there are {len(tokens)} tokens")
        named[name] = tokens[token]
    return named


def _byte_level(header: GgufHeader, tokens: list[str], kinds: Sequence[float], where: str) -> tuple[Tokenizer, bool]:
    """GPT-2's byte-level BPE with the pre-tokenizer of the file."""
    name = header.text("tokenizer.ggml.pre")
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{where} splits text by the unknown pre-tokenizer {name[:40]!r}; use the safetensors model"
        )
    pre = _PRE_TOKENIZERS[name]
    merges = []
    for merge in header.strings("tokenizer.ggml.merges", 2 * MAX_TOKEN + 1):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    tokenizer = _bpe(tokens, merges, where, ignore_merges=pre.ignore_merges)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pre.splits))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(header: GgufHeader, tokens: list[str], where: str) -> Tokenizer:
    """A SentencePiece BPE vocabulary as transformers' LlamaTokenizer runs it; merges recovered from the scores."""
    scores = header.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise CorruptModel(f"{where}: {len(tokens)} tokens but {len(scores)} scores; fetch it again")
    unknown = header.integer("tokenizer.ggml.unknown_token_id")
    tokenizer = _bpe(
        tokens,
        _merges_from_scores(tokens, scores, where),
        where,
        fuse_unk=True,
        byte_fallback=True,
        unk_token=tokens[unknown] if unknown is not None and 0 <= unknown < len(tokens) else None,
    )
    prefix = header.flag("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first" if prefix else "never", split=False)
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(tokens: Sequence[str], scores: Sequence[float], where: str) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, best score first, as transformers' `generate_merges`."""
    if sum(len(token) ** 2 for token in tokens) > _MAX_CUT_WORK:
        raise CorruptModel(f"{where}: the tokens of its tokenizer are too many and too long; fetch it again")
    ids = {token: i for i, token in enumerate(tokens)}
    score_of = dict(zip(tokens, scores, strict=True))
    ranked = []
    for token, score in score_of.items():
        splits = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ids and token[i:] in ids]
        splits.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        ranked += [(score, len(left), len(right), left, right) for left, right in splits]
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    return [(left, right) for *_, left, right in ranked]


def _bpe(tokens: Sequence[str], merges: list[tuple[str, str]], where: str, **options: object) -> Tokenizer:
    with MalformedTokenizer(f"the tokenizer in {where}"):
        return Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, **options))
