"""Models of the Hugging Face Hub, by the names that they have there."""

import re
from collections.abc import Callable
from pathlib import Path

from trt_nvfp4.builder.errors import ModelFaultError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Weights as tensors, and texts: nothing that Python would load or run.
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_FILES_OF_OTHERS = ["*.onnx", "onnx/*", "*.gguf", "original/*"]


def local_model(path: Path, say: Callable[[str], object]) -> Path:
    """`path`, or, where nothing lies there and it is a name such as `org/model`, the folder that the Hub's model of
    that name is downloaded to, in the cache; a download that was interrupted goes on. `say` gets what is downloaded.

    Raises ModelFaultError: the Hub cannot be reached, has no such model, or asks for a login.
    """
    name = str(path)
    if path.exists() or path.parent.exists() or not _NAME.fullmatch(name) or path.suffix == ".onnx":
        return path
    by_hand = f"hf download {name} --local-dir DIR, then give DIR"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError:
        raise _error(f"get it from the Hugging Face Hub by: {by_hand} (pip install huggingface_hub)", name) from None
    from trt_nvfp4.plugins.compile.toolchain import cache_dir

    folder = cache_dir() / "models" / name
    say(f"downloading {name} from the Hugging Face Hub to {folder}")
    try:
        snapshot_download(name, local_dir=folder, allow_patterns=_FILES, ignore_patterns=_FILES_OF_OTHERS)
    except GatedRepoError as error:
        raise _error("the Hugging Face Hub wants a login (hf auth login) and its terms accepted", name) from error
    except RepositoryNotFoundError as error:
        raise _error("nor has the Hugging Face Hub such a model", name) from error
    except LocalEntryNotFoundError as error:
        why = "the Hugging Face Hub cannot be reached (offline?)"
        raise _error(f"{why}; where there is a network: {by_hand}", name) from error
    except Exception as error:  # of the network and the disk, in the words of several libraries
        failed = f"its download from the Hugging Face Hub failed ({error}); the same command goes on with it"
        raise _error(failed, name) from error
    return folder


def _error(what: str, name: str) -> ModelFaultError:
    return ModelFaultError(f"{name}: no such file or folder; {what}")
