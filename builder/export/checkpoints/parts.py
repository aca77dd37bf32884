"""Sorts the tensors of a quantized directory by the weight that they are parts of."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_nvfp4.builder.export.checkpoints.settings import Settings
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.safetensors_files import SafetensorsFiles

# Roles of what a weight is multiplied with.
ACTIVATION_ROLES = frozenset({"input_scale", "input_global_scale", "input_zero_point", "input_scale_ub"})
_OF_WEIGHT = "packed|scale|scale_inv|scale_2|global_scale|zero_point|shape|g_idx"
# Names in use, with the weight's name (`weight` behind the module, where the group says no more) and the part's role.
_NAMES = (
    re.compile(rf"(?P<module>.*\.)weight_(?P<role>{_OF_WEIGHT})"),  # ModelOpt, compressed-tensors, DeepSeek
    re.compile(r"(?P<module>.*\.)_weight_(?P<role>qdata|scale|zero_point)"),  # torchao
    re.compile(r"(?P<module>.*\.)(?P<role>qweight|qzeros|scales|g_idx)"),  # AWQ, GPTQ
    re.compile(r"(?P<module>.*\.)(?P<role>SCB|weight_format)"),  # bitsandbytes, 8 bits
    re.compile(r"(?P<weight>.*\.weight)\.(?P<role>(nested_)?(absmax|quant_map)|quant_state\.bitsandbytes__\w+)"),
    re.compile(rf"(?P<module>.*\.)(?P<role>pre_quant_scale|{'|'.join(sorted(ACTIVATION_ROLES))})"),
)
# Parameters that are not a module's `weight`, such as those of fused experts.
_FUSED = (
    re.compile(r"(?P<weight>.*)_(?P<role>blocks|scales)"),  # GPT-OSS
    re.compile(rf"(?P<weight>.*?)_(weight_)?(?P<role>{_OF_WEIGHT}|{'|'.join(sorted(ACTIVATION_ROLES))})"),
)
_VALUES = ("weight", "packed", "qweight", "qdata", "blocks")
# Types of quantized values; of bytes, tables are, too (GPT-2's masks).
_SMALL_TYPES = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"})
_BYTES = frozenset({"I8", "U8"})
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})


@dataclass(frozen=True)
class Parts:
    """The tensors of one quantized weight: `keys` by role, `weight` being the values' where they have the weight's own
    name."""

    weight: str
    keys: Mapping[str, str]
    files: SafetensorsFiles
    settings: Settings

    @property
    def roles(self) -> frozenset[str]:
        """The roles, but for those of activations and of AWQ's factors of the input, which go with any format."""
        return frozenset(self.keys) - ACTIVATION_ROLES - {"pre_quant_scale"}

    def has(self, needed: Collection[str], optional: Collection[str] = ()) -> bool:
        """Whether the roles are these."""
        return set(needed) <= self.roles <= {*needed, *optional}

    def read(self, role: str) -> Tensor:
        """The tensor in that role."""
        return self.files.read(self.keys[role])

    def shape(self, role: str) -> tuple[int, ...]:
        """Its shape, without reading it."""
        return self.files.shape(self.keys[role])

    def dtype(self, role: str) -> str:
        """Its type, as safetensors names it."""
        return self.files.dtype(self.keys[role])

    def metadata(self, role: str) -> dict[str, str]:
        """The metadata of its file."""
        return self.files.metadata(self.keys[role])

    def scale(self, role: str) -> Tensor:
        """A tensor of scales in float32; of 8-bit unsigned integers, E8M0's powers of two.

        Raises CalibrationError for other types and for scales that are not finite.
        """
        scale = self.unchecked_scale(role)
        if not (finite := scale.isfinite()).all():
            raise self.error(f"{self.keys[role]} holds scales that are not finite, such as {scale[~finite][0]:g}")
        return scale

    def unchecked_scale(self, role: str) -> Tensor:
        """As `scale`, which may be NaN or infinite."""
        tensor, dtype = self.read(role), self.dtype(role)
        if dtype in ("U8", "F8_E8M0"):
            exponents = tensor.view(torch.uint8)
            scale = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
            scale[exponents == 255] = torch.nan
        elif dtype in _FLOATS:
            scale = tensor.float()
        else:
            raise self.error(f"{self.keys[role]} must hold scales, found {dtype}")
        return scale

    def error(self, what: str) -> CalibrationError:
        """An error that says what is wrong with the tensors."""
        return CalibrationError(f"{self.files.path}: {what}; download the checkpoint again, or give the original model")


def quantized_parts(files: SafetensorsFiles, settings: Settings) -> Iterator[Parts]:
    """The weights of which the files hold more than the values, or values of a type that only quantization has."""
    found: dict[str, dict[str, str]] = {}
    for key in files:
        if (place := _place(key, files)) is not None:
            weight, role = place
            found.setdefault(weight, {})[role] = key
    for weight in files:
        if weight in found or _is_small(files.dtype(weight), weight):
            found.setdefault(weight, {})["weight"] = weight
    taken = {key for keys in found.values() for role, key in keys.items() if role != "weight"}
    for weight, keys in sorted(found.items()):
        # Scales without values belong elsewhere; without quantized values or scales of its own a weight is plain.
        plain = "weight" in keys and not _is_small(files.dtype(weight), weight) and not keys.keys() - _NOT_OF_VALUES
        if weight not in taken and not plain and keys.keys() & set(_VALUES):
            yield Parts(weight, keys, files, settings)


_NOT_OF_VALUES = ACTIVATION_ROLES | {"weight"}


def _is_small(dtype: str, name: str) -> bool:
    return dtype in _SMALL_TYPES or (dtype in _BYTES and name.endswith("weight"))


def _place(key: str, files: SafetensorsFiles) -> tuple[str, str] | None:
    """The weight that a tensor is a part of, and its role."""
    for name in _NAMES:
        if match := name.fullmatch(key):
            parts = match.groupdict()
            return parts.get("weight") or f"{parts['module']}weight", parts["role"]
    for name in _FUSED:
        if match := name.fullmatch(key):
            weight, role = match["weight"], match["role"]
            if weight in files or {f"{weight}_blocks", f"{weight}_scales"} <= files.keys():
                return weight, role
            if f"{weight}_packed" in files or f"{weight}_weight_packed" in files:
                return weight, role
    return None
