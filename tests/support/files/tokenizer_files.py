"""Small vocabularies trained on the spot, as `tokenizer.json` directories and as GGUF metadata."""

import base64
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from gguf import GGUFReader
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.core.text.tokenizer import piece_bytes

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and it's the fox's 3rd jump in 2024.",
    "def add(left, right):\n    return left + right  # sums, nothing more\n\n\n",
    "Größe, naïve, façade, déjà vu; Привет, как дела? 你好，世界。こんにちは 안녕하세요",
    "I'll say we've done it; you'd agree they're right.  Two spaces,\ttabs\t\tand\r\nlines.",
    "HTTPServer camelCase snake_case 1234567890 3.14159 $19.99 50% (a) [b] {c} <d> |e|",
    "🙂🚀 emoji 👩‍👩‍👧 family, flags 🇫🇷🇩🇪, and ½ + ² = ?",
] * 4


@cache
def read_gguf(path: Path) -> dict[str, Any]:
    """The tokenizer's metadata of a GGUF file, read by another library."""
    fields = GGUFReader(path).fields
    return {name: fields[name].contents() for name in fields if name.startswith("tokenizer.")}


def byte_level_engine() -> tokenizers.Tokenizer:
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=list(CONTROL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return engine


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """The GGUF metadata for `byte_level_engine`."""
    model = json.loads(byte_level_engine().to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3 if piece in CONTROL else 1 for piece in pieces],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """Tokens with scores, as SentencePiece's BPE writes them, with byte fallback for all 256
    bytes.
    """
    engine = tokenizers.Tokenizer(models.BPE())
    engine.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    engine.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, show_progress=False))
    model = json.loads(engine.to_str())["model"]
    merged = [left + right for left, right in model["merges"]]
    characters = sorted(set(model["vocab"]) - set(merged))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged))]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(merged) + len(characters))]
    scores += [-float(len(merged) + rank) for rank in range(len(characters))]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + characters,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@cache
def unigram_model() -> Any:
    """A `SentencePieceProcessor` with a small Unigram vocabulary and the usual character map."""
    import sentencepiece  # only a few tests need it

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=300,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def unigram_metadata(**changes: Any) -> dict[str, Any]:
    """The GGUF metadata for `unigram_model`."""
    model = unigram_model()
    ids = range(model.vocab_size())
    normalizer = _proto_field(model.serialized_model_proto(), 3)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [
            2 if model.is_unknown(i) else 3 if model.is_control(i) else 1 for i in ids
        ],
        "tokenizer.ggml.precompiled_charsmap": list(_proto_field(normalizer, 2)),
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def _proto_field(message: bytes, wanted: int) -> bytes:
    """The bytes of one field of a serialized protocol buffer."""

    def number(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (message[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if message[at - 1] < 0x80:
                return value, at

    at = 0
    while at < len(message):
        tag, at = number(at)
        size, after = (4, at) if tag & 7 == 5 else number(at)
        end = after + size if tag & 7 in (2, 5) else after
        if tag >> 3 == wanted:
            return message[after:end]
        at = end
    raise KeyError(wanted)


@cache  # two trainings do not give the same vocabulary
def word_piece_engine() -> tokenizers.Tokenizer:
    engine = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    engine.normalizer = normalizers.BertNormalizer()
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece(cleanup=False)
    control = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=control, show_progress=False)
    engine.train_from_iterator(CORPUS, trainer)
    return engine


def word_piece_metadata(**changes: Any) -> dict[str, Any]:
    """The GGUF metadata for `word_piece_engine`."""
    vocab = json.loads(word_piece_engine().to_str())["model"]["vocab"]
    pieces = sorted(vocab, key=vocab.__getitem__)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": pieces[:5]
        + [piece[2:] if piece.startswith("##") else f"▁{piece}" for piece in pieces[5:]],
        "tokenizer.ggml.token_type": [3] * 5 + [1] * (len(pieces) - 5),
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def ranked_tokens() -> dict[bytes, int]:
    """The tokens of `byte_level_engine` in the order in which they are merged, with ranks."""
    merges = json.loads(byte_level_engine().to_str())["model"]["merges"]
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [piece_bytes(left + right, byte_level=True) for left, right in merges]
    return {token: rank for rank, token in enumerate(tokens)}


def write_tekken(path: Path, pattern: str, **changes: Any) -> Path:
    """A model directory with a `tekken.json` of `ranked_tokens`, and 30 ids for control tokens."""
    ranks = ranked_tokens()
    content = {
        "config": {
            "pattern": pattern,
            "num_vocab_tokens": len(ranks),
            "default_vocab_size": 30 + len(ranks),
            "default_num_special_tokens": 30,
            "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for token, rank in ranks.items()
        ],
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "tekken.json").write_text(json.dumps(content | changes))
    return path


def write_tiktoken(path: Path, name: str, **config: Any) -> Path:
    """A model directory with a tiktoken file of `ranked_tokens`."""
    lines = [
        f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranked_tokens().items()
    ]
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_text("".join(lines))
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_directory(path: Path, **settings: Any) -> Path:
    """A Hugging Face model directory with `byte_level_engine`; its post-processor adds BOS."""
    engine = byte_level_engine()
    engine.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    path.mkdir(parents=True, exist_ok=True)
    engine.save(str(path / "tokenizer.json"))
    config = {
        "bos_token": "<|endoftext|>",
        "eos_token": {"content": "<|im_end|>", "special": True},
        "chat_template": TEMPLATE,
        **settings,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return path
