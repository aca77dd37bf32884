"""Files that appear whole or not at all."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from trt_nvfp4.common.replacing import check_writable, made_folder, replacing, scratch


def test_replacing_leaves_nothing_when_interrupted(tmp_path: Path) -> None:
    destination = tmp_path / "file"
    destination.write_text("old")

    def interrupted() -> None:
        with replacing(destination) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert destination.read_text() == "old"
    assert list(tmp_path.iterdir()) == [destination]


def test_a_write_that_fails_names_the_destination(tmp_path: Path) -> None:
    def full() -> None:
        with replacing(tmp_path / "file"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space") as failure:
        full()
    assert failure.value.filename == str(tmp_path / "file")
    with pytest.raises(FileNotFoundError) as failure, replacing(tmp_path / "none" / "file") as temporary:
        temporary.write_text("text")
    assert failure.value.filename == str(tmp_path / "none" / "file")


def test_made_folders_that_hold_nothing_go_again(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        with made_folder(folder):
            assert folder.is_dir()
            raise KeyboardInterrupt

    (tmp_path / "there").mkdir()
    for name in ("there", "new", "there/a/b"):
        with pytest.raises(KeyboardInterrupt):
            interrupted(tmp_path / name)
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]
    with made_folder(tmp_path / "there" / "a" / "b"):
        (tmp_path / "there" / "a" / "file").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "file", "there"]
    with pytest.raises(OSError, match="file"), made_folder(tmp_path / "there" / "a" / "file"):
        pass
    with pytest.raises(OSError, match="under"), made_folder(tmp_path / "there" / "a" / "file" / "under"):
        pass


def test_a_folder_is_tried_before_the_work(tmp_path: Path) -> None:
    check_writable(tmp_path)
    assert not list(tmp_path.iterdir())
    for destination in (None, tmp_path / "none" / "file"):
        with pytest.raises(FileNotFoundError) as failure:
            check_writable(tmp_path / "none", destination)
        assert failure.value.filename == str(destination or tmp_path / "none")


def test_nobody_can_put_a_link_where_a_file_is_written(tmp_path: Path) -> None:
    """The name cannot be known, and the folder is this user's alone."""
    names = set()
    for _ in range(3):
        with replacing(tmp_path / "file") as temporary:
            names.add(str(temporary.parent))
            assert stat.S_IMODE(temporary.parent.stat().st_mode) == 0o700
            temporary.write_text("text")
    assert len(names) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "link").symlink_to("file")
    with replacing(tmp_path / "link") as temporary:
        temporary.write_text("other")
    assert (tmp_path / "file").read_text() == "text"
    assert not (tmp_path / "link").is_symlink()


KILLED = """
import os, signal, sys
from pathlib import Path
from trt_nvfp4.common.replacing import scratch
with scratch(Path(sys.argv[1])) as folder:
    (folder / "sub").mkdir()
    (folder / "sub" / "weights").write_bytes(bytes(1000))
    print(folder.name, flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """Not while it goes on, nor what is called alike."""
    for name in (".trt-nvfp4-mine", ".build-12345678", ".trt-nvfp4-1234567-"):
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".trt-nvfp4-abcdefgh").symlink_to("elsewhere")
    others = sorted(tmp_path.iterdir())
    run = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout
    left = tmp_path / run.stdout.readline().strip()
    with scratch(tmp_path):
        assert (left / "sub" / "weights").exists()
    run.communicate("")
    assert left.exists()
    with replacing(tmp_path / "file") as temporary:
        temporary.write_text("text")
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "file"])
