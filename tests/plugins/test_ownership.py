"""The cache, which code is loaded from: another user's, or one that others can write to, is refused."""

import os
import stat
from pathlib import Path

import pytest

from trt_nvfp4.builder.tensorrt import build_script
from trt_nvfp4.plugins.compile import cache as plugin_cache
from trt_nvfp4.plugins.compile.toolchain import ToolchainError

OTHER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRT_NVFP4_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_cache_is_made_for_its_user_alone(cache: Path) -> None:
    before = os.umask(0)
    try:
        file = plugin_cache.cached("a.txt", lambda file: file.write_text("a") and None)
    finally:
        os.umask(before)
    assert file == cache / "plugins" / "a.txt"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (cache, cache / "plugins")} == {0o700}
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


@needs_root
@pytest.mark.parametrize("what", [".", "plugins", "plugins/a.txt"])
def test_what_another_user_owns(cache: Path, what: str) -> None:
    plugin_cache.cached("a.txt", Path.touch)
    os.chown(cache / what, OTHER, -1)
    with pytest.raises(ToolchainError, match=f"belongs to user {OTHER}.*set TRT_NVFP4_CACHE"):
        plugin_cache.cached("a.txt", Path.touch)


@pytest.mark.parametrize(("what", "mode"), [(".", 0o777), ("plugins", 0o1777), ("plugins/a.txt", 0o666)])
def test_what_others_can_write_to(cache: Path, what: str, mode: int) -> None:
    plugin_cache.cached("a.txt", Path.touch)
    (cache / what).chmod(mode)
    with pytest.raises(ToolchainError, match=r"can be written by other users.*set TRT_NVFP4_CACHE"):
        plugin_cache.cached("a.txt", Path.touch)


def test_a_sticky_folder_may_hold_the_cache(cache: Path) -> None:
    """As /tmp."""
    cache.mkdir()
    cache.chmod(0o1777)
    assert plugin_cache.cached("a.txt", Path.touch).parent == cache / "plugins"


@pytest.mark.parametrize("mode", [0o777, 0o755])
def test_links_on_the_loaders_path(cache: Path, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in a folder that others can write to are not used: a temporary one is made."""
    pytest.importorskip("tensorrt_rtx", reason="needs a link")
    (cache / "links").mkdir(parents=True)
    (cache / "links").chmod(mode)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(build_script.tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.delenv("TRT_NVFP4_LIBRARY_LINKS", raising=False)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(build_script.os, "execve", lambda file, arguments, environment: started.append(environment))
    build_script._offer_unversioned_library("tensorrt_rtx")
    safe = cache / "links" if mode == 0o755 else tmp_path / "temporary"
    assert Path(started[0]["TRT_NVFP4_LIBRARY_LINKS"]).is_relative_to(safe)
