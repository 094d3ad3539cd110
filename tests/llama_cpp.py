"""llama.cpp's server over one file, in this process."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp


class Server:
    def __init__(self, file: Path, *, threads: int, context: int = 1024, **settings: Any) -> None:
        params = xllamacpp.CommonParams()
        params.model.path, params.port, params.n_ctx, params.n_parallel = str(file), 0, context, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        for name, value in settings.items():
            setattr(params, name, value)
        self._server = xllamacpp.Server(params)

    def ask(self, path: str, **body: Any) -> Any:
        """Return the answer to a request. The API is that of `llama-server`."""
        url, headers = self._server.listening_address + path, {"Content-Type": "application/json"}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy leads here
        with opener.open(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
            return json.load(answer)
