"""Adds the routes of /v1/files, /v1/uploads, /v1/batches, /v1/messages/batches and /v1/fine_tuning,
which share one database and one folder of files.
"""

from fastapi import FastAPI

from engine.servers.anthropic.batches import add_message_batches_routes
from engine.servers.batches import store as batch_store
from engine.servers.batches.caller import Caller
from engine.servers.batches.routes import add_batches_routes
from engine.servers.batches.run import Bench
from engine.servers.batches.runner import BatchRunner, line_slots
from engine.servers.batches.store import BatchStore
from engine.servers.files import store as file_store
from engine.servers.files import uploads
from engine.servers.files.routes import add_files_routes
from engine.servers.files.store import FileStore
from engine.servers.fine_tuning import store as job_store
from engine.servers.fine_tuning.routes import FineTuning, add_fine_tuning_routes
from engine.servers.fine_tuning.runner import JobRunner
from engine.servers.fine_tuning.store import JobStore
from engine.servers.serving.services import Services
from engine.servers.storage.database import Database
from engine.servers.storage.fair_slots import FairSlots

# Input files that are checked at a time. Each takes a thread, of which the server has few.
MAX_READS = 2


def add_files_and_batches_routes(app: FastAPI, services: Services) -> None:
    settings = services.settings.storage
    schemas = file_store.SCHEMA + batch_store.SCHEMA + uploads.SCHEMA + job_store.SCHEMA
    added = (*batch_store.ADDED, *job_store.ADDED)
    database = Database(settings.directory / "batches.db", schemas, added)
    files = FileStore(settings.directory / "files", database, settings.max_size_mb * 2**20)
    store = BatchStore(files)
    reads = FairSlots(MAX_READS)
    bench = Bench(services, store, files, Caller(app), line_slots(services), reads)
    runner = BatchRunner(bench)
    jobs = JobStore(database)
    job_runner = JobRunner(services, jobs, files)
    services.components.extend((database, job_runner, runner))
    add_files_routes(app, services, files)
    uploads.add_uploads_routes(app, services, files)
    add_batches_routes(app, services, store, runner)
    add_message_batches_routes(app, bench, runner)
    add_fine_tuning_routes(app, FineTuning(services, jobs, files, job_runner, reads))
