"""Tells whether the Hugging Face hub can be reached, in a second and before anything is loaded.

Without this check the hub's clients retry for half a minute and end in tracebacks that name neither cause nor remedy.
"""

import os
import socket
import urllib.request
from urllib.parse import urlsplit

SECONDS = 5.0


def hub_fault() -> str:
    """Return why the hub cannot be reached, or "" if it can, or if a proxy decides."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name} is set"
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if urllib.request.getproxies().get(endpoint.scheme):
        return ""
    host, port = endpoint.hostname or "", endpoint.port or {"http": 80}.get(endpoint.scheme, 443)
    try:
        socket.create_connection((host, port), timeout=SECONDS).close()
    except OSError as error:
        return f"{host} cannot be reached: {error.strerror or error}"
    return ""
