"""Tells whether the Hugging Face hub can be reached, in a second and before anything is loaded."""

import os
import socket
import urllib.request
from urllib.parse import urlsplit

CONNECT_SECONDS = 5.0


def hub_fault() -> str:
    """Return why the hub cannot be reached, or "" if it can, or if a proxy decides.

    Without this check the hub's clients retry for half a minute and end in tracebacks that name
    neither cause nor remedy.
    """
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name} is set"
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if urllib.request.getproxies().get(endpoint.scheme):
        return ""
    host, port = endpoint.hostname or "", endpoint.port or {"http": 80}.get(endpoint.scheme, 443)
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return f"{host} cannot be reached: {error.strerror or error}"
    return ""
