"""Pre-tokenizers of byte-level BPE, by their name in the GGUF key `tokenizer.ggml.pre`.

A name stands for a list of regular expressions. The first expression splits the text, and each of
the others splits the parts further. Matches and the text between them both become parts. Names and
patterns are the ones of llama.cpp, or of the model's own tokenizer.json where llama.cpp notes that
it deviates. The slow golden test lists the vocabularies whose results were compared with the
model's own tokenizer. The other vocabularies are unverified.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from engine.core.errors import ModelFormatError

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cl100k(digits: str) -> str:
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased(digits: str, contraction: str) -> str:
    """A pattern that splits words where lower case changes to upper case, as in "camelCase"."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3 = _cl100k(r"\p{N}{1,3}")
_QWEN2 = _cl100k(r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_PUNCTUATED = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3 = rf"{_PUNCTUATED}[\r\n]*|{_SPACES}"
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    "ὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ"
    "-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
_HAN_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
# Groups of three digits, counted from the end of a number. One expression with a lookahead to the
# end would take quadratic time for a long number.
_THOUSANDS = (r"\p{N}+", r"\A\p{N}{1,2}(?=(?:\p{N}{3})+\z)", r"\p{N}{3}")
# As above, but only for digits that no letter follows. `\G` continues the number of the last match.
_WORDLESS_THOUSANDS = r"(?<!\d)\d{1,3}(?=(?:\d{3})*+\b)|(?<=\d)\G\d{3}"


_GPT4O = _cased(r"\p{N}{1,3}", f"{_CONTRACTION}?")
# A class with `&&` holds the characters that both of its sides hold.
_KIMI = r"\p{Han}+|" + _cased(r"\p{N}{1,3}", f"{_CONTRACTION}?").replace(
    r"\p{M}]", r"\p{M}&&[^\p{Han}]]"
).replace(r"[\r\n/]*", r"[\r\n]*")
_JAIS2 = _LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + (
    "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
)
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_YOUTU_SCRIPTS = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
_ASIAN_SCRIPTS = (
    "[一-鿿㐀-䶿豈-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff"
    "가-\ud7afᄀ-ᇿ]+"
)


@dataclass(frozen=True, slots=True)
class WordSplit:
    patterns: tuple[str, ...]
    # If true, a word that is in the vocabulary is one token, without merging.
    ignore_merges: bool = False
    add_bos: bool = False  # whether to add BOS, if the file does not set `add_bos_token`


_SPLITS: dict[WordSplit, tuple[str, ...]] = {
    WordSplit((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): ("default",),
    WordSplit((_GPT2,)): (
        *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"),
        *("gigachat", "modern-bert", "mellum", "a.x-4.0", "roberta-bpe", "jina-es", "jina-de"),
        *("jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code"),
    ),
    WordSplit((r"\p{N}", _GPT2)): (
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        "mellum2",
    ),
    WordSplit((_LLAMA3,), ignore_merges=True, add_bos=True): (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
        *("midm-2.0", "jina-v5-nano"),
    ),
    WordSplit((_LLAMA3,)): ("dbrx", "smaug-bpe", "chatglm-bpe"),
    WordSplit((_LLAMA3,), ignore_merges=True): ("glm4", "glm5"),
    WordSplit((r"\p{N}{1,3}", _cl100k(r"\p{N}+")), ignore_merges=True): ("minicpm5",),
    WordSplit((_JAIS2,)): ("jais-2",),
    WordSplit((_QWEN2,)): (
        *("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez", "solar-open", "grok-2"),
        *("kormo", "f2llmv2"),
    ),
    WordSplit((r"[^\n]+|\n+", _QWEN2)): ("laguna",),
    WordSplit((_QWEN2.removeprefix(f"{_CONTRACTION}|"),)): ("ufakzeka",),
    WordSplit((_QWEN35,)): ("qwen35",),
    WordSplit((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")): ("falcon",),
    WordSplit(
        ("[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+")
        + (r"\s+$", _CJK, r"\p{N}+")
    ): ("deepseek-llm",),
    WordSplit(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")): ("deepseek-coder",),
    WordSplit((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3)): (
        *("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
    ),
    WordSplit((r"\p{N}{1,3}", _HAN_KANA, rf"{_PUNCTUATED}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")): (
        "spark2_5",
    ),
    WordSplit((*_THOUSANDS, _ASIAN_SCRIPTS, _DEEPSEEK3)): ("afmoe",),
    WordSplit(_THOUSANDS): ("superbpe",),
    WordSplit((_cased(r"\p{N}", ""),), ignore_merges=True, add_bos=True): ("tekken",),
    WordSplit((_GPT4O,)): ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
    WordSplit((_GPT4O,), ignore_merges=True): ("granite-embed-multi-97m",),
    WordSplit((_WORDLESS_THOUSANDS, _GPT4O)): ("tiny_aya", "cohere2moe"),
    WordSplit((_YOUTU_SCRIPTS, _cased(r"\p{N}", f"{_CONTRACTION}?")), ignore_merges=True): (
        "youtu",
    ),
    WordSplit((_KIMI,)): ("kimi-k2",),
    WordSplit((_BLOOM,)): ("bloom", "poro-chat", "gpt3-finnish"),
    WordSplit((_BLOOM, r"\p{N}")): ("viking",),
    WordSplit((_BAILING,)): ("bailingmoe", "bailingmoe2", "llada-moe"),
    WordSplit((_SEED,)): ("seed-coder",),
    WordSplit((_EXAONE_MOE,)): ("exaone-moe",),
    WordSplit(
        ("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}")
        + (r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
        add_bos=True,
    ): ("chameleon",),
}
# Names of SentencePiece-style BPE: pieces are plain text with "▁" for a space, and only newlines
# separate words.
SPACE_MARKED = frozenset(("gemma4", "granite-embed-multi-311m", "sarvam-moe"))

KNOWN_SPLITS: dict[str, WordSplit] = {
    name: split for split, names in _SPLITS.items() for name in names
}


def word_split(name: str) -> WordSplit:
    split = KNOWN_SPLITS.get(name)
    if split is None:
        raise ModelFormatError(
            f"tokenizer.ggml.pre is {name!r}, which this engine does not know, and a guess would "
            "change the model's input. Use the model's safetensors files with their tokenizer.json "
            "instead."
        )
    return split


def byte_level_words(split: WordSplit) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)
