"""Wheels with compiled plugin libraries, so that whoever installs them needs neither nvcc nor a C++ compiler:

    python -m trt_nvfp4.builder.cli.wheels --targets rtx-blackwell,thor --output dist

Run in a checkout, it writes a wheel of this package with the libraries of all targets inside, and for each of them a
wheel of only its library, which goes with the package's ordinary wheel. A library is used where it was made of
the same sources.
"""

import argparse
import base64
import hashlib
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from trt_nvfp4.builder.errors import BuilderError
from trt_nvfp4.builder.targets import Target, find_target
from trt_nvfp4.plugins.compile.library import build_library, packaged_name
from trt_nvfp4.plugins.compile.prebuilt import PACKAGE
from trt_nvfp4.plugins.compile.toolchain import ToolchainError


def write_wheels(targets: list[Target], output: Path) -> list[Path]:
    """The wheels, in `output`. Raises ToolchainError where a library cannot be compiled."""
    output.mkdir(parents=True, exist_ok=True)
    libraries = [(target, _library(target)) for target in {target.arch: target for target in targets}.values()]
    version = metadata.version("trt-nvfp4")
    wheels = []
    for target, files in libraries:
        name = f"trt_nvfp4_kernels_{target.arch}"
        about = f"Name: {name}\nVersion: {version}\nSummary: The plugin library of trt-nvfp4 for {target.arch}\n"
        info = {f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\n{about}".encode()}
        wheels.append(_write(output, name, version, target.host, {**files, **info}))
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={temporary}", "."]
        subprocess.run(command, check=True)
        (plain,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(plain) as archive:
            own = {name: archive.read(name) for name in archive.namelist()}
    files = {name: data for name, data in own.items() if not name.endswith((".dist-info/RECORD", ".dist-info/WHEEL"))}
    for _, library in libraries:
        files |= library
    wheels.append(_write(output, "trt_nvfp4", version, platform.machine(), files))
    return wheels


def _library(target: Target) -> dict[str, bytes]:
    print(f"compiling the plugin library for {target.arch} ...", flush=True)
    library = build_library(target.arch, machine=target.host, packaged=False)
    return {f"{PACKAGE}/{packaged_name(target.arch, target.host)}": library.read_bytes()}


def _write(output: Path, name: str, version: str, machine: str, files: Mapping[str, bytes]) -> Path:
    """A wheel for Linux on `machine`, as the packaging guide's binary distribution format has it."""
    tag, info = f"py3-none-linux_{machine}", f"{name}-{version}.dist-info"
    described = f"Wheel-Version: 1.0\nGenerator: trt-nvfp4\nRoot-Is-Purelib: false\nTag: {tag}\n"
    complete = {**files, f"{info}/WHEEL": described.encode()}
    record = "".join(f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in complete.items())
    complete[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = output / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in complete.items():
            archive.writestr(path, data)
    return wheel


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def main() -> int:
    parser = argparse.ArgumentParser(description="Write wheels with compiled plugin libraries.")
    parser.add_argument("--targets", required=True, help="names of targets, with commas between them")
    parser.add_argument("--output", type=Path, default=Path("dist"), help="folder of the wheels (default: dist)")
    arguments = parser.parse_args()
    try:
        for wheel in write_wheels([find_target(name) for name in arguments.targets.split(",")], arguments.output):
            print(wheel)
    except (BuilderError, ToolchainError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
