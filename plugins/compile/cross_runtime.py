"""The static CUDA runtime for another machine than this one, from its PyPI package: what the toolkit of an x86 machine
lacks when it compiles the plugin library for Thor or Spark (aarch64)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from trt_nvfp4.plugins.compile.ownership import own_folder

PACKAGE = "nvidia-cuda-runtime"
LIBRARY = "libcudart_static.a"
_FETCH = ".fetch-"


class RuntimeUnavailableError(RuntimeError):
    """The package could not be had; the message says why and what else serves."""


def cuda_runtime(machine: str, version: str, cache: Path) -> Path:
    """The folder in `cache` that holds ``libcudart_static.a`` for `machine` (``aarch64``), downloaded on first use.

    `version` is nvcc's, for example ``13.0.88``; the runtime is of the same major and minor version.

    Raises RuntimeUnavailableError.
    """
    release = ".".join(version.split(".")[:2])
    folder = cache / "cuda-runtime" / f"{machine}-{release}"
    library = folder / LIBRARY
    own_folder(cache, *folder.relative_to(cache).parts)
    if library.is_file():
        return folder
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    with lock, tempfile.TemporaryDirectory(dir=folder, prefix=_FETCH) as temporary:
        for left in folder.glob(f"{_FETCH}*"):  # by a run that was killed
            if left != Path(temporary):
                shutil.rmtree(left, ignore_errors=True)
        if library.is_file():
            return folder
        wheel = _download(machine, release, Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith(f"/{LIBRARY}")), None)
            if member is None:
                raise RuntimeUnavailableError(f"{wheel.name} holds no {LIBRARY}")
            os.replace(archive.extract(member, temporary), library)
    return folder


def _download(machine: str, release: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version=3.12", f"--dest={folder}", f"{PACKAGE}=={release}.*"]
    command += [f"--platform={tag}_{machine}" for tag in ("manylinux2014", "manylinux_2_17", "manylinux_2_28")]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = result.stderr.strip().splitlines()
        raise RuntimeUnavailableError(
            f"pip could not download {PACKAGE} {release} for {machine}: {lines[-1] if lines else 'no wheel came'}"
        )
    return wheels[-1]
