"""Writes files under a temporary name, which they lose when they are complete."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.conversion.stored import Bytes
from engine.core.errors import ModelError

Progress = Callable[[int, int], None]  # bytes written so far, total bytes


@contextmanager
def new_place(target: Path, num_bytes: int) -> Iterator[Path]:
    """Yields a temporary path beside the target. If no error occurs, what was written there is
    renamed to the target, else it is removed.
    """
    free = shutil.disk_usage(target.absolute().parent).free
    if num_bytes > free:
        raise ModelError(
            f"{target.name} takes {num_bytes / 1e9:.1f} GB and the disk has {free / 1e9:.1f} GB "
            "left; make room, or choose a smaller --type"
        )
    place = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield place
        os.rename(place, target)
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)


def write_pieces(path: Path, pieces: Iterable[Bytes], size: int, progress: Progress) -> None:
    done = 0
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece.data)
            done += piece.nbytes
            progress(min(done, size), size)
        file.flush()
        os.fsync(file.fileno())
