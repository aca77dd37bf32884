"""The commands. What all of them import is imported here, where a file in its place still ends with one message."""

import importlib
import sys

from trt_nvfp4.builder.cli.shadowed import shadowed
from trt_nvfp4.builder.errors import UNAVAILABLE

try:
    importlib.import_module(f"{__name__}.command")
except BaseException as error:
    if (text := shadowed(error)) is None:
        raise
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(UNAVAILABLE) from None
