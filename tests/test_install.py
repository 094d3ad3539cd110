"""`make install` hands pip's settings to uv."""

import json
import os
import subprocess
import sys
from pathlib import Path

INSTALL = Path(__file__).parent.parent / "requirements"
PRINT = "import install, json; print(json.dumps(install.uv_settings()))"


def test_uv_gets_the_indexes_and_folders_of_pip(tmp_path: Path) -> None:
    """Folders that do not exist are passed over, as pip does; what is set for uv stays."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "pip.conf").write_text(
        f"[global]\nfind-links = {tmp_path}/wheels\n  {tmp_path}/none\nindex-url = https://global.example/simple\n"
        "extra-index-url = https://one.example/simple https://two.example/simple\n"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    own = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_INDEX_URL": "https://env.example/simple"}
    words = [sys.executable, "-c", PRINT]
    printed = subprocess.check_output(words, cwd=INSTALL, env=inherited | own | {"UV_INDEX": "https://mine.example"})
    settings = json.loads(printed)
    assert settings["UV_FIND_LINKS"] == f"{tmp_path}/wheels"
    assert settings["UV_DEFAULT_INDEX"] == "https://env.example/simple"  # the environment before the file
    assert "UV_INDEX" not in settings
    printed = subprocess.check_output(words, cwd=INSTALL, env=inherited | own)
    assert json.loads(printed)["UV_INDEX"] == "https://one.example/simple https://two.example/simple"
