"""Settings of what the server keeps: responses and files, past requests, activations.

The sentence below a field is its line in docs/reference/settings.md.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from engine.core.config_types import Flag, Megabytes, Section
from engine.core.folders import data_directory


class StorageSettings(Section):
    """Storage of data that outlives a request and the server: responses, conversations, stored
    chat completions, files, batches.
    """

    path: Annotated[
        Path | None, Flag("Directory of stored responses, files and batches.", "--storage-path")
    ] = None
    """Storage directory; unset, `engine` in the user's data directory."""
    response_ttl_s: float = Field(default=30 * 86400.0, gt=0, le=10**9)
    """Seconds after its last use when a response, conversation or chat completion is deleted."""
    max_responses: int = Field(default=10_000, ge=1, le=10**7)
    """Max responses, conversations, chat completions; the tenant's least used one is deleted."""
    max_size_mb: Megabytes = 1024
    """Max MiB of uploaded files and batch results, and again of responses and the like."""
    file_ttl_s: float = Field(default=30 * 86400.0, gt=0, le=10**9)
    """Age at which an uploaded file or a batch result is deleted."""

    @property
    def directory(self) -> Path:
        if self.path is not None:
            return self.path.expanduser()
        return data_directory()


class RequestsSettings(Section):
    """What the server keeps of past requests, to explain and to replay them."""

    keep: int = Field(default=512, ge=0, le=100_000)
    """Number of past requests that `/v1/admin/requests` explains; 0: none."""
    show_text: bool = False
    """Show the few words at which a prompt begins to differ from the cached one."""
    record: bool = False
    """Store the tokens, parameters and seed of each request, for `engine replay`."""
    max_recorded: int = Field(default=1000, ge=1, le=10**6)
    """Max recorded requests; the oldest is deleted."""


class InterpSettings(Section):
    """Requests that read or change activations, and what they store."""

    max_capture_mb: int = Field(default=128, ge=1, le=65_536)
    """Max MiB that one request may take for what it reads, changes and sends back. It is computed
    before the request runs."""
    max_stored_mb: int = Field(default=256, ge=1, le=65_536)
    """Max MiB of results that one tenant stores; beyond it, its oldest result is deleted. All
    tenants together store at most four times as much."""
    result_ttl_s: float = Field(default=600.0, gt=0, le=86_400)
    """Seconds after which a stored result is deleted."""
    inline_kb: int = Field(default=256, ge=0, le=2_048)
    """Results of up to this many KiB are sent in the answer; larger ones by their id."""
    vectors_dir: Path | None = None
    """Directory of named vectors; unset, `vectors` in the storage directory."""


class FinetuningSettings(Section):
    """Fine-tuning jobs, which run beside the requests in a process of their own."""

    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")
    """Where adapters are trained: cpu, cuda or cuda:1."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of a job; unset, one per usable core. Requests always come first."""
    memory_mb: Megabytes | None = None
    """Max MiB of the training process. An engine on the same GPU leaves them free, and if this is
    unset, as much as its model's training needs. On a CPU, unset means no limit."""
    checkpoint_s: float = Field(default=30.0, gt=0, le=86_400)
    """Seconds between checkpoints. A job that is killed repeats at most so much work."""
    yield_to_requests: bool = True
    """Hold training while requests are open; else it runs beside them at the lowest priority."""
