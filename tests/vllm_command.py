"""vLLM's command line in a fork of the process of `vllm_forks.py`: NAME of its socket, WORDS of the command.

This process waits for the fork, which is killed if this one is.
"""

import json
import os
import socket
import sys
from pathlib import Path

if "vllm" in sys.modules:  # in the fork
    from vllm.entrypoints.cli.main import main

    sys.path.insert(0, str(Path(__file__).with_name("plugins")))
    from serve_tiny import skip_inspection

    skip_inspection()
    main()
else:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0{sys.argv[1]}")
    outputs = [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)]
    request = {"words": [__file__, *sys.argv[2:]], "environment": dict(os.environ), "outputs": outputs}
    connection.send(json.dumps(request).encode())
    sys.exit(int(connection.recv(64)))
