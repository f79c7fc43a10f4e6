"""The audit log: who may read it, and what it tells."""

import json
import os
from pathlib import Path

from engine.plugins.audit_log import RequestAudit
from tests.support.fakes.plugin_hosts import a_chat, fed, running


async def test_the_audit_log_is_private_and_rotated(tmp_path: Path) -> None:
    path = tmp_path / "log" / "audit.jsonl"
    options = {"path": str(path), "record": "texts", "max_size_mb": 0.002, "max_files": 2}
    async with running([RequestAudit()], options=options) as made:
        for number in range(8):
            await fed(made, a_chat(f"line\u2028{number}\n", tenant="t"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(path.parent)) == ["audit.jsonl", "audit.jsonl.1"]
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert entries[-1]["asked"]["messages"][0]["content"] == "line\u20287\n"
    assert entries[-1]["answered"][0]["text"] == "Hello from a fake model."
    assert entries[-1]["completion_tokens"] == 6


async def test_audit_log_digests_reveal_only_equality(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    async with running([RequestAudit()], options={"path": str(path)}) as made:
        await fed(made, a_chat("secret words"))
        await fed(made, a_chat("secret words"))
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert "secret" not in path.read_text() and "fake" not in json.dumps(first["answered"])
    assert first["asked"] == second["asked"] and first["asked"]["bytes"] > 10
