"""The keys of the servers: two tenants, one of which has two keys, and an administrator."""

import hashlib
import json
from pathlib import Path

KEYS = {None: "key-a", "b": "key-b", "c": "key-a2"}  # by the drawn tenant
TENANTS = {None: "a", "b": "b", "c": "a"}
ADMIN = "key-admin"


def write_keys(path: Path) -> Path:
    """Write a keys file with them."""
    keys = [
        {"name": key, "sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": TENANTS[who]}
        for who, key in KEYS.items()
    ]
    admin = {"name": ADMIN, "sha256": hashlib.sha256(ADMIN.encode()).hexdigest(), "role": "admin"}
    path.write_text(json.dumps({"keys": [*keys, admin]}))
    path.chmod(0o600)
    return path
