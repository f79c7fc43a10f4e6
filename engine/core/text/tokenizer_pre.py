"""Pre-tokenizers of byte-level BPE, by their name in the GGUF key `tokenizer.ggml.pre`.

A name stands for a list of regular expressions. The first expression splits the text, and each of
the others splits the parts further. Matches and the text between them both become parts. Names and
patterns are the ones of llama.cpp. The slow golden test lists the vocabularies whose results were
compared with llama.cpp. The other vocabularies are unverified.
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
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{_SPACES}"
)
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"


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
        *("gigachat", "modern-bert", "mellum", "a.x-4.0"),
    ),
    WordSplit((r"\p{N}", _GPT2)): (
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    ),
    WordSplit((_LLAMA3,), ignore_merges=True, add_bos=True): (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
    ),
    WordSplit((_LLAMA3,)): ("dbrx", "smaug-bpe", "chatglm-bpe"),
    WordSplit((_LLAMA3,), ignore_merges=True): ("glm4",),
    WordSplit((_QWEN2,)): (
        *("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez", "solar-open", "grok-2"),
    ),
    WordSplit((_QWEN35,)): ("qwen35",),
    WordSplit((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")): ("falcon",),
    WordSplit(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")): ("deepseek-coder",),
    WordSplit((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)): (
        *("deepseek-v3", "hunyuan-dense", "joyai-llm"),
    ),
    WordSplit((_cased(r"\p{N}", ""),), ignore_merges=True, add_bos=True): ("tekken",),
    WordSplit((_cased(r"\p{N}{1,3}", f"{_CONTRACTION}?"),)): ("gpt-4o", "llama4", "kanana2"),
}

KNOWN_SPLITS: dict[str, WordSplit] = {
    name: split for split, names in _SPLITS.items() for name in names
}


def word_split(name: str) -> WordSplit:
    split = KNOWN_SPLITS.get(name)
    if split is None:
        raise ModelFormatError(
            f"tokenizer.ggml.pre is {name!r}, which this engine does not know, and a guess would "
            f"change the model's input. Known names: {', '.join(sorted(KNOWN_SPLITS))}."
        )
    return split


def byte_level_words(split: WordSplit) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)
