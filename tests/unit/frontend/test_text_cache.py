"""What a frontend keeps of a model: the same as read anew, and nothing that may be out of date."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.backends.custom.engine_settings import VALIDATOR
from engine.core.errors import ModelFormatError
from engine.core.sandbox.checkpoint_validation import Validation, validate
from engine.frontend import text_cache
from engine.frontend.text_cache import TextCache, cache_directory, keep_text, key_of
from engine.frontend.text_model import TextModel, load_text
from engine.weights import model as weights_model
from tests.support.files.gguf_files import gguf_layout, random_weights, tiny_config, write_gguf
from tests.support.files.tokenizer_files import byte_level_metadata, sentencepiece_metadata

LONG_AGO = (10**9, 10**9)
TEXTS = ("Hello there!", " naïve  \n日本 <|im_end|> <s>", "")


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_model(path: Path, metadata: dict[str, Any], **writer_options: Any) -> Path:
    config = tiny_config("llama", vocab_size=len(metadata["tokenizer.ggml.tokens"]))
    keys = metadata | {"tokenizer.ggml.eot_token_id": None}
    stored = gguf_layout(config, random_weights(config))
    write_gguf(path, config, stored, keys, **writer_options)
    for file in path.parent.glob("*.gguf"):
        os.utime(file, LONG_AGO)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf", byte_level_metadata())


@pytest.fixture
def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the model file was read")

    return lambda: monkeypatch.setattr(weights_model, "open_model", refuse)


def kept() -> Path:
    (path,) = cache_directory().glob(f"*{text_cache.SUFFIX}")
    return path


def facts(text: TextModel) -> tuple[Any, ...]:
    """All that a text model does and says, as far as it can be compared."""
    tokenizer = text.tokenizer
    ids = [tokenizer.encode_prompt(each) for each in TEXTS]
    messages = [{"role": "user", "content": "Hi <|im_end|>"}]
    rendered = text.chat.template.render(messages, tokenizer.specials) if text.can_chat else None
    return (
        *(text.config, text.quantization, text.size_bytes, text.capabilities, text.emulated),
        *(text.eos_ids, tokenizer.special_ids, tokenizer.bos, tokenizer.eos),
        *(ids, [tokenizer.decode(each) for each in ids], text.vocabulary().tokens),
        rendered and tokenizer.encode_rendered(rendered),
    )


@pytest.mark.parametrize(
    "metadata",
    [
        byte_level_metadata(),
        byte_level_metadata(add_bos_token=1),
        sentencepiece_metadata(),
        sentencepiece_metadata(add_space_prefix=0),
    ],
)
def test_a_cached_tokenizer_equals_one_read_from_the_file(
    metadata: dict[str, Any], tmp_path: Path, forbid_reading: Callable[[], None]
) -> None:
    path = write_model(tmp_path / "model.gguf", metadata)
    fresh = facts(load_text(path))
    forbid_reading()
    assert facts(load_text(path)) == fresh


def test_a_template_that_cannot_work_fails_at_load_and_nothing_is_kept(tmp_path: Path) -> None:
    metadata = byte_level_metadata() | {"tokenizer.chat_template": "{% for %}"}
    path = write_model(tmp_path / "model.gguf", metadata)
    for _ in range(2):
        with pytest.raises(ModelFormatError, match="chat template does not compile"):
            load_text(path)
    assert not list(cache_directory().glob("*"))


def test_a_replaced_file_of_the_same_size_is_read_again(tmp_path: Path, model: Path) -> None:
    load_text(model)
    size = model.stat().st_size
    write_model(model, byte_level_metadata(bos_token_id=1))
    assert (model.stat().st_size, model.stat().st_mtime) == (size, LONG_AGO[1])
    assert load_text(model).tokenizer.bos_id == 1
    assert load_text(model).tokenizer.bos_id == 1


def test_a_cache_entry_of_another_version_is_ignored(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_text(model)
    monkeypatch.setattr(text_cache, "FORMAT_VERSION", text_cache.FORMAT_VERSION + 1)
    key = key_of(model)
    assert key is not None
    assert TextCache().read(model, key) is None


def _flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def _other_content(path: Path) -> None:
    content = b"\x80"  # an empty map
    path.write_bytes(path.read_bytes()[:32] + hashlib.sha256(content).digest() + content)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: os.truncate(path, 0),
    "key alone": lambda path: os.truncate(path, 32),
    "a byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a byte changed": _flip_last_byte,
    "something else": _other_content,
    "written by others": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_cache_file_is_rewritten(
    damage: Callable[[Path], None], model: Path, forbid_reading: Callable[[], None]
) -> None:
    fresh = facts(load_text(model))
    damage(kept())
    assert facts(load_text(model)) == fresh
    forbid_reading()
    assert facts(load_text(model)) == fresh


def test_a_file_that_changed_just_now_is_not_cached(model: Path) -> None:
    os.utime(model)
    load_text(model)
    assert not list(cache_directory().iterdir())


def test_a_model_of_several_files_is_not_cached(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", byte_level_metadata(), split_max_tensors=8)
    first = min(tmp_path.glob("model-*.gguf"))
    assert load_text(first).can_chat
    assert not cache_directory().exists()


def test_the_tokenizer_found_by_validation_is_not_read_again(
    model: Path, forbid_reading: Callable[[], None]
) -> None:
    expected = facts(load_text(model))
    kept().unlink()
    keep_text(model, validate(model, VALIDATOR))
    forbid_reading()
    assert facts(load_text(model)) == expected


def test_a_file_changed_during_validation_is_read_again(model: Path) -> None:
    validation = Validation(model, VALIDATOR)
    os.utime(model, (10**9, 10**9 + 1))
    assert validation.finish() == b""


@pytest.mark.parametrize("found", [b"", b"not facts"])
def test_an_unusable_validation_result_is_ignored(model: Path, found: bytes) -> None:
    keep_text(model, found)
    assert load_text(model).can_chat


def test_only_the_newest_text_caches_are_kept(tmp_path: Path, model: Path) -> None:
    key = key_of(model)
    load_text(model)
    assert key is not None
    found = TextCache().read(model, key)
    assert found is not None
    cache = TextCache(tmp_path / "few", max_files=2)
    copies = [tmp_path / f"copy{index}.gguf" for index in range(4)]
    for index, copy in enumerate(copies):
        copy.touch()
        os.utime(copy, LONG_AGO)
        cache.write(copy, key, msgspec.msgpack.encode(found))
        (written,) = cache.directory.glob(f"{copy.stem}-*")
        os.utime(written, (index, index))
    assert [cache.read(copy, key) is not None for copy in copies] == [False, False, True, True]


def test_a_model_loads_where_the_cache_cannot_be_written(model: Path) -> None:
    cache_directory().parent.mkdir(parents=True)
    cache_directory().touch()  # a file where the folder should be
    assert load_text(model).can_chat
