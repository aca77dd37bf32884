"""Reads integers of fewer than 8 bits: compressed-tensors' pack-quantized, GPTQ, AWQ and ModelOpt's INT4."""

import math

import torch
from torch import Tensor

from trt_nvfp4.builder.export.checkpoints.parts import Parts
from trt_nvfp4.builder.export.checkpoints.scales import check_zero_points, group_size, spread
from trt_nvfp4.builder.export.checkpoints.weight import QuantizedWeight

_WORD, _BYTE = 32, 8
GPTQ_METHODS = ("gptq", "auto-round", "intel/auto-round")
# Versions of AWQ whose files hold the same; others lie in orders for one kernel.
_AWQ_LAYOUTS = (None, "gemm", "exllama", "ipex", "auto_round:auto_awq")
# Columns of AWQ's eight values in a word, from the lowest bits on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_quantized(parts: Parts) -> QuantizedWeight | None:
    """compressed-tensors': int32 words along K, values and zero points from -2^(bits - 1) on; zero points in words
    along N. `weight_g_idx` says which group a column is of."""
    if not parts.has({"packed", "scale", "shape"}, {"zero_point", "g_idx"}) or parts.dtype("packed") != "I32":
        return None
    shape, packed = tuple(parts.read("shape").reshape(-1).tolist()), parts.shape("packed")
    fitting = [bits for bits in range(1, 9) if packed == (*shape[:-1], -(-shape[-1] * bits // _WORD))]
    if len(shape) != 2 or min(shape) < 1 or len(fitting) != 1:
        raise parts.error(f"{parts.weight} must hold the packed values of {list(shape)}, found words {list(packed)}")
    bits = fitting[0]
    _check_bits(parts, bits)

    def dequantize() -> Tensor:
        half = 1 << bits - 1
        values = (_unpack(parts.read("packed"), bits, shape[1]) - half).float()
        scale = parts.scale("scale")
        zero_point = torch.zeros(())
        if "zero_point" in parts.keys:
            words = parts.read("zero_point")
            if words.dtype != torch.int32 or words.dim() != 2 or len(words) != -(-shape[0] * bits // _WORD):
                raise parts.error(f"{parts.keys['zero_point']} must hold the packed zero points of {shape[0]} rows")
            zero_point = (_unpack(words.T, bits, shape[0]).T - half).float()
        check_zero_points(parts, zero_point if "zero_point" in parts.keys else None)
        _check_groups(parts, scale, shape[1])
        if "g_idx" in parts.keys:
            groups = _groups(parts, "g_idx", shape[1], scale.shape[-1] if scale.dim() else 1)
            scale, zero_point = (t.index_select(1, groups) if t.dim() == 2 else t for t in (scale, zero_point))
        if zero_point.dim():
            values -= spread(parts, "zero_point", zero_point, shape)
        return values * spread(parts, "scale", scale, shape)

    return QuantizedWeight(parts, f"INT{bits} (pack-quantized)", shape, dequantize)


def gptq(parts: Parts) -> QuantizedWeight | None:
    """int32 words along K [K * bits / 32, N], scales [G, N], zero points in words along N, one too small in all but
    the format gptq_v2, and `g_idx` [K], the group of each row of K."""
    if not parts.has({"qweight", "qzeros", "scales"}, {"g_idx"}):
        return None
    words, scales = parts.shape("qweight"), parts.shape("scales")
    if len(words) != 2 or len(scales) != 2 or words[1] != scales[1]:
        return None
    bits, layout = _bits_by_groups(parts) or parts.settings.bits, parts.settings.layout or "gptq"
    if parts.settings.method not in GPTQ_METHODS or bits is None or bits > 8 or layout not in ("gptq", "gptq_v2"):
        raise parts.error(
            f"{parts.weight} is packed as by GPTQ, and config.json must say how: quant_method gptq or auto-round, bits "
            f"up to 8, checkpoint_format gptq or gptq_v2; found {parts.settings.method}, {bits}, {layout}"
        )
    n, k = scales[1], words[0] * _WORD // bits
    if words[0] * _WORD % bits or parts.shape("qzeros") != (scales[0], -(-n * bits // _WORD)):
        raise parts.error(
            f"{parts.weight} does not hold {bits} bits a value: found qweight {list(words)}, scales {list(scales)}, "
            f"qzeros {list(parts.shape('qzeros'))}"
        )
    _check_bits(parts, bits)
    group = _group(parts, k, scales[0]) if parts.settings.groups or "g_idx" not in parts.keys else None

    def dequantize() -> Tensor:
        zeros = _gptq_zero_points(parts, _unpack(parts.read("qzeros"), bits, n), bits, layout)
        groups = _gptq_groups(parts, k, scales[0], group)
        values = _unpack(parts.read("qweight").T, bits, k)
        return (values - zeros.T.index_select(1, groups)).float() * parts.scale("scales").T.index_select(1, groups)

    return QuantizedWeight(parts, f"INT{bits} (GPTQ)", (n, k), dequantize)


def _gptq_zero_points(parts: Parts, stored: Tensor, bits: int, layout: str) -> Tensor:
    """Zero points of the `stored` ones, which the first version of the format holds one too small.

    Those of symmetric weights are all half of the range, so that the stored ones show the version: some tools write the
    second version under the name of the first. Raises CalibrationError where they contradict the configuration.
    """
    half, symmetric = 1 << bits - 1, parts.settings.is_symmetric
    first, last = (int(stored.min()), int(stored.max())) if stored.numel() else (half, half)
    looks_like = {half - 1: "gptq", half: "gptq_v2"}.get(first) if first == last else None
    if looks_like is None and symmetric:
        raise parts.error(
            f"{parts.keys['qzeros']} holds {first} to {last}, and symmetric weights of {bits} bits (sym true in "
            f"config.json) have {half - 1} (checkpoint_format gptq) or {half} (gptq_v2) everywhere"
        )
    if looks_like not in (None, layout) and symmetric is False:
        raise parts.error(
            f"{parts.keys['qzeros']} holds {first} everywhere, as symmetric weights do in {looks_like}, but "
            f"config.json states checkpoint_format {layout} and sym false"
        )
    if (looks_like or layout) == "gptq_v2":
        return stored
    return (stored + 1) & ((1 << bits) - 1)


def _gptq_groups(parts: Parts, k: int, count: int, group: int | None) -> Tensor:
    """The group of each of `k` rows: by `g_idx`, or `group` neighbours where that is missing or zeros, as some tools
    write it of groups in order. Raises CalibrationError for groups of more rows than stated."""
    in_order = torch.arange(k) // (group or 1)
    if "g_idx" not in parts.keys:
        return in_order
    groups = _groups(parts, "g_idx", k, count)
    if group is None:
        return groups
    if count > 1 and not groups.any():
        return in_order
    if k and (largest := int(groups.bincount().max())) > group:
        raise parts.error(f"{parts.keys['g_idx']} has {largest} rows in one group, and config.json states {group}")
    return groups


def awq(parts: Parts) -> QuantizedWeight | None:
    """AutoAWQ's "gemm": int32 words of eight 4-bit values along N [K, N/8], scales [G, N], zero points [G, N/8]."""
    if not parts.has({"qweight", "qzeros", "scales"}):
        return None
    words, scales = parts.shape("qweight"), parts.shape("scales")
    if len(words) != 2 or len(scales) != 2 or words[1] * 8 != scales[1]:
        return None
    (k, _), (count, n) = words, scales
    layout = parts.settings.layout
    if layout not in _AWQ_LAYOUTS:
        raise parts.error(
            f"{parts.weight} is packed as by AWQ's version {layout}, and {', '.join(filter(None, _AWQ_LAYOUTS))} are "
            "read"
        )
    if parts.settings.bits not in (None, 4) or parts.shape("qzeros") != (count, n // 8):
        raise parts.error(
            f"{parts.weight} must hold AWQ's 4-bit values [K, N/8], scales [G, N] and zero points [G, N/8], found "
            f"{list(words)}, {list(scales)}, {list(parts.shape('qzeros'))} and {parts.settings.bits} bits"
        )
    group = _group(parts, k, count)

    def dequantize() -> Tensor:
        values, zeros = (_awq_order(_unpack(parts.read(role), 4, n)) for role in ("qweight", "qzeros"))
        if parts.settings.is_symmetric and bool((zeros != 8).any()):
            raise parts.error(
                f"{parts.keys['qzeros']} holds {int(zeros.min())} to {int(zeros.max())}, and weights without zero "
                "points (zero_point false, or sym true, in config.json) have 8 everywhere"
            )
        of_rows = (t.repeat_interleave(group, 0)[:k] for t in (zeros, parts.scale("scales")))
        zero, scale = of_rows
        return ((values - zero).float() * scale).T.contiguous()

    return QuantizedWeight(parts, "INT4 (AWQ)", (n, k), dequantize)


def modelopt_int4(parts: Parts) -> QuantizedWeight | None:
    """uint8 [N/2, K], an even row in the low nibbles and the next in the high ones, and scales [N, G]. W4A8 has another
    scale, `scale_2`, by which kernels shift the scales into FP8: values do not depend on it."""
    if not parts.has({"weight", "scale"}, {"scale_2"}) or parts.dtype("weight") != "U8":
        return None
    packed, scales = parts.shape("weight"), parts.shape("scale")
    if parts.dtype("scale") not in ("F32", "F16", "BF16") or len(packed) != 2 or scales[:1] != (2 * packed[0],):
        return None
    shape = (2 * packed[0], packed[1])

    def dequantize() -> Tensor:
        pairs = parts.read("weight")
        _check_groups(parts, parts.scale("scale"), shape[1])
        values = torch.stack((pairs & 15, pairs >> 4), 1).reshape(shape).to(torch.int8)
        return ((values ^ 8) - 8).float() * spread(parts, "scale", parts.scale("scale"), shape)

    return QuantizedWeight(parts, "INT4 (ModelOpt)", shape, dequantize)


def _unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """`count` values of so many bits from each row of int32 words, from the lowest bits on, without gaps: int32."""
    if words.dtype != torch.int32:
        raise ValueError(f"expected words of int32, found {words.dtype}")
    if _BYTE % bits == 0:
        of_bytes = words.contiguous().view(torch.uint8)
        parts = [(of_bytes >> shift) & ((1 << bits) - 1) for shift in range(0, _BYTE, bits)]
        return torch.stack(parts, -1).flatten(-2)[:, :count].int()
    starts = torch.arange(count) * bits
    index, shift = starts // _WORD, starts % _WORD
    unsigned = words.long() & 0xFFFFFFFF
    values = unsigned.index_select(1, index) >> shift
    if _WORD % bits:  # some begin in one word and end in the next
        following = (index + 1).clamp_max(words.shape[1] - 1)
        values |= unsigned.index_select(1, following) << (_WORD - shift)
    return (values & ((1 << bits) - 1)).int()


def _awq_order(values: Tensor) -> Tensor:
    """Values in the order of their columns."""
    ordered = torch.empty_like(values)
    for place, column in enumerate(_AWQ_ORDER):
        ordered[:, column::8] = values[:, place::8]
    return ordered


def _bits_by_groups(parts: Parts) -> int | None:
    """Bits of a value, by the number of columns in `g_idx`: GPTQModel may give modules other bits than config.json
    says."""
    if "g_idx" not in parts.keys or not (columns := math.prod(parts.shape("g_idx"))):
        return None
    bits, rest = divmod(parts.shape("qweight")[0] * _WORD, columns)
    return bits if not rest and bits in (2, 3, 4, 8) else None


def _check_bits(parts: Parts, bits: int) -> None:
    """Raise CalibrationError for another number of bits than the configuration states."""
    if (stated := parts.settings.all_bits) and bits not in stated:
        raise parts.error(
            f"{parts.weight} holds {bits} bits a value, and config.json states {', '.join(map(str, sorted(stated)))}"
        )


def _check_groups(parts: Parts, scale: Tensor, columns: int) -> None:
    """Raise CalibrationError for scales [N, G] of other groups than the configuration states."""
    settings = parts.settings
    if settings.groups and not settings.strategies & {"tensor", "channel"}:
        _group(parts, columns, scale.shape[-1] if scale.dim() else 1)


def _group(parts: Parts, k: int, count: int) -> int:
    """How many of `k` columns each of so many groups has. Raises CalibrationError where that is not one size."""
    if (group := group_size(parts, k, count)) is None:
        stated = parts.settings.stated_groups or "none"
        raise parts.error(
            f"{parts.weight}: {count} groups of {k} columns fit none, or more than one, of the group sizes that "
            f"config.json states ({stated})"
        )
    return group


def _groups(parts: Parts, role: str, columns: int, count: int) -> Tensor:
    """The group of each column. Raises CalibrationError for a group that there is not."""
    groups = parts.read(role).long()
    if groups.shape != (columns,) or (columns and not 0 <= int(groups.min()) <= int(groups.max()) < count):
        raise parts.error(f"{parts.keys[role]} must name one of {count} groups for each of {columns} columns")
    return groups
