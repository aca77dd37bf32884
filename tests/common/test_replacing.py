"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trt_nvfp4.common.replacing import check_writable, made_folder, replacing


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
