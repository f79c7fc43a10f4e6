"""Opens the tiers of the prefix cache that the options name.

Blocks are found by the content of the model's files, and not by their names. So the files are
hashed when an engine first uses tiers with them. The digests are kept for later starts.
"""

import hashlib
import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from engine import __version__
from engine.core.errors import ConfigError
from engine.core.folders import store_directory
from engine.core.sandbox.private_files import write_private
from engine.core.store.checkpoint_files import mmproj_beside
from engine.ipc.options import PeerOptions, TierOptions
from engine.runtime.kv_cache import KVCache
from engine.runtime.model_runner import Bytes, ModelRunner
from engine.runtime.tiers.base import Tier
from engine.runtime.tiers.block_server import BlockServer
from engine.runtime.tiers.disk import DiskTier
from engine.runtime.tiers.host import HostTier
from engine.runtime.tiers.kv_tiers import BlockMover, PinnedMover, attach_tiers
from engine.runtime.tiers.offload_worker import OffloadWorker
from engine.runtime.tiers.peers import PeerTier
from engine.runtime.tiers.record import identity_of
from engine.weights.model import ModelSource

log = logging.getLogger(__name__)

DIGESTS_FILE = "digests.json"
MAX_DIGESTS = 256


class FileDigest(msgspec.Struct, frozen=True):
    """The SHA-256 of a file that had this size and time when it was read."""

    size: int
    mtime_ns: int
    sha256: str


def add_tiers(
    options: TierOptions | None,
    peers: PeerOptions | None,
    kv: KVCache,
    runner: ModelRunner,
    source: ModelSource | None,
    prompt_s: Callable[[int], float | None],
) -> None:
    """Open the tiers, and start the threads that move blocks."""
    what = "[cache.tiers]" if peers is None else f"the role {peers.role}"
    if source is None or not isinstance(runner, BlockMover):
        raise ConfigError(
            f"this backend can't copy blocks of its KV cache to the host, which {what} needs;"
            f" use --backend native, torch or jax with one rank, or do without {what}"
        )
    if not kv.sharing:
        raise ConfigError(f"{what} needs cache.enabled = true; set it, or do without {what}")
    kind = "full" if source.config.latent is None else "latent"
    identity = cache_identity(source, runner)
    new_row = runner.row_maker() if isinstance(runner, PinnedMover) else None
    tiers = [] if options is None else open_tiers(options, new_row)
    if peers is None:
        attach_tiers(kv, runner, runner.spec, tiers, identity, prompt_s, kind).start()
    elif peers.role == "decode":
        tiers.insert(0, PeerTier())
        attach_tiers(kv, runner, runner.spec, tiers, identity, prompt_s, kind).start()
    else:
        outgoing = HostTier(peers.kept_bytes, "lru", None, name="outgoing")
        tiers.append(outgoing)
        mover = attach_tiers(kv, runner, runner.spec, tiers, identity, prompt_s, kind)
        _add_server(kv, outgoing, peers, mover)
        mover.start()
    log.info("cache tiers: %s", ", ".join(tier.name for tier in tiers))


def _add_server(kv: KVCache, outgoing: HostTier, peers: PeerOptions, mover: OffloadWorker) -> None:
    """Let other engines fetch blocks. The block server starts when it gets its token."""
    assert kv.tiers is not None
    files = (peers.cert_file, peers.key_file) if peers.cert_file else None
    try:
        kv.tiers.block_server = BlockServer(outgoing, peers.listen, lambda: mover.is_writing, files)
    except OSError as error:
        raise ConfigError(f"{peers.cert_file}: {error.strerror or error}") from None


def open_tiers(options: TierOptions, new_row: Callable[[int], Bytes] | None = None) -> list[Tier]:
    """The tiers that have a size, fastest first. `new_row` returns memory of the host tier."""
    tiers: list[Tier] = []
    if options.host_bytes:
        tiers.append(HostTier(options.host_bytes, options.host_policy, options.host_ttl_s, new_row))
    if options.disk_bytes:
        directory = Path(options.disk_path).expanduser()
        check_directory(directory)
        tiers.append(
            DiskTier(directory, options.disk_bytes, options.disk_policy, options.disk_ttl_s)
        )
    if options.redis_bytes:
        from engine.runtime.tiers.redis_tier import RedisTier, connect

        client = connect(options.redis_url)
        tiers.append(
            RedisTier(client, options.redis_bytes, options.redis_policy, options.redis_ttl_s)
        )
    return tiers


def check_directory(directory: Path) -> None:
    """Create the folder of the disk tier. Raises `ConfigError` if another user could write to it,
    because its content decides what the model sees.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise ConfigError(
            f"cache.tiers.disk_path: {directory} can't be used: {error.strerror}",
            param="tiers.disk_path",
        ) from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise ConfigError(
            f"cache.tiers.disk_path: others may write to {directory}; give it to this user and"
            f" chmod 700 it",
            param="tiers.disk_path",
        )


def cache_identity(source: ModelSource, runner: ModelRunner) -> bytes:
    """Whatever decides the bytes of a block, besides its tokens and the tenant."""
    assert isinstance(runner, BlockMover)
    config, spec = source.config, runner.spec
    parts = [f"engine {__version__}", runner.kv_identity, f"block {spec.block_size}"]
    if any(rope.kind in ("dynamic", "longrope") for rope in config.ropes):
        parts.append(f"context {spec.max_seq_len}")  # it decides the RoPE frequencies
    parts.append(f"window pool {spec.window}")
    paths = [file.path for file in source.checkpoint.files]
    if config.vision is not None and (encoder := mmproj_beside(source.path)) is not None:
        paths.append(encoder)  # blocks depend on the embeddings of images
    digests = Digests(store_directory().parent / DIGESTS_FILE)
    parts += [digests.of(path) for path in sorted(path.resolve() for path in paths)]
    parts.append(repr(config))
    return identity_of(parts)


class Digests:
    """Computes the SHA-256 of large files once, and keeps it in a JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, FileDigest] = {}
        with suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
            self._known = msgspec.json.decode(path.read_bytes(), type=dict[str, FileDigest])

    def of(self, path: Path) -> str:
        status = path.stat()
        known = self._known.pop(str(path), None)
        if known is None or (known.size, known.mtime_ns) != (status.st_size, status.st_mtime_ns):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            known = FileDigest(status.st_size, status.st_mtime_ns, digest)
        self._known[str(path)] = known
        while len(self._known) > MAX_DIGESTS:
            del self._known[next(iter(self._known))]
        with suppress(OSError):  # the next start hashes the file again
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(self._path, msgspec.json.encode(self._known))
        return known.sha256
