"""Published vocabularies against golden token ids from their authors' tokenizers.

The source distribution of llama-cpp-python has vocabulary-only GGUF files, test inputs, and the
token ids that each model's Hugging Face tokenizer returned for them.
"""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from engine.core.text.tokenizer import Tokenizer
from tests.support.files.tokenizer_files import read_gguf

CACHE = Path.home() / ".cache" / "engine" / "tests"
SOURCE = "llama-cpp-python==0.3.36"
SEPARATOR = "\n__ggml_vocab_test__\n"
VOCABULARIES = [
    *("bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2"),
    *("llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
]


@pytest.fixture(scope="module")
def golden() -> Path:
    """A folder with `ggml-vocab-*.gguf`, `.inp` and `.out` files, downloaded once."""
    folder = CACHE / "ggml-vocab"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--no-binary", "llama-cpp-python"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", *options, "-d", str(CACHE), SOURCE],
        check=True,
    )
    partial = CACHE / "ggml-vocab.partial"
    partial.mkdir(exist_ok=True)
    with tarfile.open(next(CACHE.glob("llama_cpp_python-*.tar.gz"))) as archive:
        for member in archive:
            name = Path(member.name).name
            content = archive.extractfile(member) if name.startswith("ggml-vocab-") else None
            if content is not None:
                (partial / name).write_bytes(content.read())
    return partial.rename(folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_published_vocabularies_give_the_golden_token_ids(golden: Path, name: str) -> None:
    model = golden / f"ggml-vocab-{name}.gguf"
    tokenizer = Tokenizer.from_gguf(read_gguf(model))
    texts = model.with_suffix(".gguf.inp").read_bytes().decode().split(SEPARATOR)
    lines = model.with_suffix(".gguf.out").read_text().splitlines()
    assert len(lines) >= 46
    for text, line in zip(texts, lines, strict=False):
        assert tokenizer.encode(text) == [int(i) for i in line.split()], text
