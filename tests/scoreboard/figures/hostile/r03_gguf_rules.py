"""R03: a GGUF file that breaks one rule is refused for that reason; valid files are read."""

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from engine.core.errors import ModelFormatError
from engine.weights.gguf import open_gguf
from tests.scoreboard.figure import Run, Values, at_least, figure
from tests.scoreboard.mutations import gguf as mutations_gguf
from tests.scoreboard.mutations.reading import read_model
from tests.security.files.test_gguf_rules import DAMAGED, SOUND
from tests.support.files.gguf_files import gguf_layout, random_weights, tiny_config, write_gguf
from tests.support.files.tokenizer_files import byte_level_metadata
from tests.unit.weights.test_gguf_model import CONTRADICTIONS, stored_tiny

MODEL = "a whole model"


@figure(
    "R03",
    "hand-made GGUF files, one for each rule",
    minutes=0.2,
    limits={"refused_for_the_reason_pct": at_least(100), "sound_read_pct": at_least(100)},
)
def gguf_rules(run: Run) -> Values:
    with TemporaryDirectory() as folder:
        refused = [_is_refused(run, *case) for case in _broken(Path(folder))]
        read = [_is_read(run, *case) for case in _sound(Path(folder))]
    run.notes |= {"broken": len(refused), "sound": len(read)}
    run.cases = len(refused) + len(read)
    return {
        "refused_for_the_reason_pct": 100 * sum(refused) / len(refused),
        "sound_read_pct": 100 * sum(read) / len(read),
    }


def _broken(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Name, file and expected reason of each broken file."""
    path = folder / "m.gguf"
    for name, (content, reason) in DAMAGED.items():
        path.write_bytes(content)
        yield name, path, reason
    config = tiny_config("llama")
    for extra, reason in CONTRADICTIONS:
        write_gguf(path, config, stored_tiny(), extra)
        yield str(extra), path, reason
    for bad in (np.nan, np.inf):
        stored = stored_tiny()
        stored["blk.1.ffn_up.weight"][0, 0] = bad
        write_gguf(path, config, stored)
        yield f"a weight of {bad}", path, "holds NaN or infinite"
    vocabulary = byte_level_metadata(eot_token_id=2)
    config = tiny_config("llama", vocab_size=len(vocabulary["tokenizer.ggml.tokens"]))
    stored = gguf_layout(config, random_weights(config))
    for template in ("{% include 'x' %}", "{% for"):
        write_gguf(path, config, stored, vocabulary | {"tokenizer.chat_template": template})
        yield f"the template {template}", path, "does not compile"


def _sound(folder: Path) -> Iterator[tuple[str, Path]]:
    path = folder / "m.gguf"
    for name, content in SOUND.items():
        path.write_bytes(content)
        yield name, path
    for path in mutations_gguf.sound_files(folder):
        yield MODEL, path


def _is_refused(run: Run, name: str, path: Path, reason: str) -> bool:
    try:
        read_model(path)
    except ModelFormatError as error:
        if re.search(reason, str(error)):
            return True
        run.fail(f"{name}: refused, but because {error}")
    except Exception as error:
        run.fail(f"{name}: {type(error).__name__}: {error}")
    else:
        run.fail(f"{name}: was read")
    return False


def _is_read(run: Run, name: str, path: Path) -> bool:
    try:
        for stored in open_gguf(path).tensors.values():
            assert stored.raw().size == stored.nbytes
        if name == MODEL:
            read_model(path)
    except Exception as error:
        run.fail(f"{name}: {type(error).__name__}: {error}")
        return False
    return True
