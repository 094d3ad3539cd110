"""Whatever is written appears whole or not at all, and nothing of others is touched."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ddp_vllm.cache import check_cache, is_own
from ddp_vllm.errors import OutputError
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.output import atomic_file, atomic_folder, check_file, check_output, locked, write_text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as we write them, in a folder of its own."""
    folder = tmp_path / "here" / "pruned"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"old": 1}')
    (folder / "model.safetensors").write_bytes(bytes(100))
    (folder / MASKS_FILE).touch()
    return folder


@pytest.mark.parametrize(("overwrite", "error"), [(False, ValueError), (True, KeyboardInterrupt)])
def test_a_folder_appears_whole_or_not_at_all(
    overwrite: bool, error: type[BaseException], folder: Path, tmp_path: Path
) -> None:
    """And what it would replace stays as it was until then."""
    out = folder if overwrite else tmp_path / "deep" / "out"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(error), atomic_folder(out, overwrite=overwrite) as new:
        (new / "config.json").write_text("{}")
        raise error
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [*out.parent.iterdir()] == [out] * overwrite
    with atomic_folder(out, overwrite=overwrite) as new:
        (new / "sub").mkdir()
        (new / "sub" / "a").write_text("1")
        assert out.exists() == overwrite
    assert {path.name for path in out.rglob("*")} == {"sub", "a"} and [*out.parent.iterdir()] == [out]


def killed(writer: str, written: str, path: Path) -> None:
    """Let a process write to what one of our writers gives it, and die by SIGKILL."""
    imports = "import os, signal, sys; from pathlib import Path; from ddp_vllm import output"
    code = f"{imports}\nwith output.{writer}(Path(sys.argv[1])) as it: {written}; os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -signal.SIGKILL


def test_what_a_killed_process_left_goes_with_the_next(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(2):  # a hundred gigabytes each, of a large model
        killed("atomic_folder", "(it / 'half').mkdir(); (it / 'half' / 'model.safetensors').write_bytes(bytes(9))", out)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", ".out.tmp"]
    with atomic_folder(out) as folder:
        (folder / "config.json").write_text("{}")
    assert {path.name for path in tmp_path.rglob("*")} == {"out", "config.json"}


def test_what_was_put_aside_stays_while_there_is_nothing_else(folder: Path) -> None:
    """Killed between the two renames: the next attempt begins with the old one."""
    folder.rename(folder.with_name(".pruned.old"))
    with pytest.raises(ValueError), atomic_folder(folder, overwrite=True):
        raise ValueError
    assert (folder / "config.json").read_text() == '{"old": 1}'
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_what_a_kill_left_goes_also_where_nothing_is_written(folder: Path) -> None:
    """A command that only reports that its output exists clears it, unless another process is still writing."""
    lock = folder.with_name(".pruned.lock")
    for name in (".pruned.old", ".pruned.tmp"):
        shutil.copytree(folder, folder.with_name(name))
    lock.touch()
    with locked(lock, ""), pytest.raises(OutputError, match="exists"):
        check_output(folder, overwrite=False)
    assert folder.with_name(".pruned.tmp").exists()
    lock.touch()
    with pytest.raises(OutputError, match="exists"):
        check_output(folder, overwrite=False)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_the_temporary_file_of_a_killed_process_goes_with_the_next(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    others = tmp_path / ".x.gguf.note.tmp"
    others.touch()
    for clears in (lambda: write_text("new", file), lambda: check_file(file, overwrite=True, begins="")):
        killed("atomic_file", "it.write_bytes(bytes(1000))", file)
        assert len(list(tmp_path.glob(".x.gguf.*.tmp"))) == 2
        with atomic_file(file) as temporary:  # the living writer's stays
            temporary.write_text("old")
            clears()
            assert [*tmp_path.glob(".x.gguf.????????.tmp")] == [temporary]
    assert {path.name for path in tmp_path.iterdir()} == {"x.gguf", others.name}


def test_two_cannot_write_the_same_folder(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "config.json").write_text("{}")
        with pytest.raises(OutputError, match=r"another process writes .*out; wait"), atomic_folder(tmp_path / "out"):
            pass
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json"]


@pytest.mark.parametrize(("umask", "modes"), [(0o077, (0o700, 0o600)), (0, (0o777, 0o666))])
def test_who_may_read_is_what_the_user_set(
    umask: int, modes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors writes files that only their owner may read, whatever the umask. States and the cache are private."""
    monkeypatch.setenv("DDP_VLLM_CACHE", str(tmp_path / "cache"))
    state, before = tmp_path / "state", os.umask(umask)
    try:
        with atomic_folder(tmp_path / "out") as folder:
            save_file({"x": np.ones(1)}, folder / "model.safetensors")
            (folder / "config.json").write_text("{}")
        with atomic_file(state, private=True) as temporary:
            assert temporary.stat().st_mode & 0o777 == 0o600
        check_cache()
    finally:
        os.umask(before)
    written = [tmp_path / "out", *(tmp_path / "out").iterdir(), tmp_path / "cache"]
    assert [path.stat().st_mode & 0o777 for path in written] == [modes[0], modes[1], modes[1], 0o700]
    assert is_own(state)
    state.chmod(0o666)  # code in it might be anyone's
    assert not is_own(state)


def test_outputs_that_are_refused(folder: Path, tmp_path: Path) -> None:
    """A folder of ours holds the masks file that every writer puts in."""
    (tmp_path / "link").symlink_to(tmp_path / "disk")  # a rename would replace the link, not the folder behind it
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="is a link"):
            check_output(tmp_path / "link", overwrite=overwrite)
    with pytest.raises(OutputError, match=r"cannot be written .*too long"):
        check_output(tmp_path / ("x" * 300), overwrite=False)
    (tmp_path / "thesis.txt").write_text("years of work")
    check_output(folder, overwrite=True)
    (folder / "sparsity-0.2").mkdir()
    (folder / "sparsity-0.2" / "config.json").write_text("{}")  # of a size that was written into a model's folder
    with pytest.raises(OutputError, match=r"holds another model, .*sparsity-0.2, which would be lost"):
        check_output(folder, overwrite=True)
    shutil.rmtree(folder / "sparsity-0.2")
    (folder / MASKS_FILE).unlink()
    for place in (tmp_path, tmp_path / "thesis.txt", folder):
        with pytest.raises(OutputError, match="did not write it"):
            check_output(place, overwrite=True)
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty", overwrite=True)
    check_output(tmp_path / "new", overwrite=False)


@pytest.mark.parametrize("name", [".out.tmp", ".out.old", "out"])
def test_files_of_others_are_not_deleted(name: str, tmp_path: Path) -> None:
    """A config.json does not make a folder ours."""
    (tmp_path / name).mkdir()
    for file in ("thesis.txt", "config.json"):
        (tmp_path / name / file).write_text("years of work")
    with pytest.raises(OutputError, match="did not write"), atomic_folder(tmp_path / "out", overwrite=True):
        pass
    assert (tmp_path / name / "thesis.txt").read_text() == "years of work"


def test_a_file_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither through one in its place nor through one planted under the name of its temporary file."""
    thesis, file = tmp_path / "thesis.txt", tmp_path / "file"
    thesis.write_text("years of work")
    file.symlink_to(thesis)
    write_text("page", file)
    assert file.read_text() == "page" and not file.is_symlink()
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    (tmp_path / ".file.guessed.tmp").symlink_to(thesis)
    with pytest.raises(OutputError, match="exists"):
        write_text("new", file)
    assert thesis.read_text() == "years of work"


def test_a_planted_link_is_neither_followed_nor_removed(tmp_path: Path) -> None:
    """In a folder that others may write to."""
    (tmp_path / "others").mkdir()
    thesis = tmp_path / "others/thesis.txt"
    thesis.write_text("years of work")
    for name, target in ((".out.tmp", thesis.parent), (".out.old", thesis.parent), (".out.lock", thesis)):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(OutputError), atomic_folder(tmp_path / "out"):
            pass
        assert thesis.read_text() == "years of work"
        (tmp_path / name).unlink()
