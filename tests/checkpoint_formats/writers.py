"""Weights in the formats that checkpoints are published in, made of random codes and scales, by hand: each writer gives
the tensors of one module by their names behind it, and the weight that they stand for, worked out value by value."""

import json
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)
Written = tuple[dict[str, Tensor], np.ndarray]
Writer = Callable[[np.random.Generator, int, int], Written]


def nibbles(codes: np.ndarray) -> Tensor:
    return torch.from_numpy((codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8))


def e4m3(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(torch.float8_e4m3fn)


def words(values: np.ndarray, bits: int) -> Tensor:
    """Rows of non-negative integers as int32 words, the lowest bits first, without gaps."""
    packed = np.zeros((len(values), -(-values.shape[1] * bits // 32)), np.uint32)
    for row, line in enumerate(values):
        whole = sum(int(value) << bits * place for place, value in enumerate(line))
        for word in range(packed.shape[1]):
            packed[row, word] = whole >> 32 * word & 0xFFFFFFFF
    return torch.from_numpy(packed.view(np.int32))


def _nvfp4(random: np.random.Generator, n: int, k: int) -> tuple[Tensor, Tensor, float, np.ndarray]:
    codes = random.integers(0, 16, (n, k))
    scales = e4m3(random.uniform(1, 448, (n, k // 16)))
    by_tensor = 2.0**-14  # so that 1 over it is exact
    whole = E2M1[codes] * scales.double().numpy().repeat(16, 1) * by_tensor
    return nibbles(codes), scales, by_tensor, whole


def nvfp4_modelopt(random: np.random.Generator, n: int, k: int) -> Written:
    packed, scales, by_tensor, whole = _nvfp4(random, n, k)
    names = {"weight_scale_2": torch.tensor(by_tensor), "input_scale": torch.tensor(1e-3)}
    return {"weight": packed, "weight_scale": scales, **names}, whole


def nvfp4_compressed_tensors(random: np.random.Generator, n: int, k: int) -> Written:
    packed, scales, by_tensor, whole = _nvfp4(random, n, k)
    names = {"weight_global_scale": torch.tensor([1 / by_tensor]), "input_global_scale": torch.tensor([1e3])}
    return {"weight_packed": packed, "weight_scale": scales, **names}, whole


def nvfp4_awq(random: np.random.Generator, n: int, k: int) -> Written:
    tensors, whole = nvfp4_modelopt(random, n, k)
    factors = torch.from_numpy(random.uniform(0.5, 2, k).astype(np.float32))
    return {**tensors, "pre_quant_scale": factors}, whole * factors.double().numpy()


def mxfp4(random: np.random.Generator, n: int, k: int) -> Written:
    codes, exponents = random.integers(0, 16, (n, k)), random.integers(115, 125, (n, k // 32)).astype(np.uint8)
    whole = E2M1[codes] * (2.0 ** (exponents.astype(int) - 127)).repeat(32, 1)
    return {"weight_packed": nibbles(codes), "weight_scale": torch.from_numpy(exponents)}, whole


def _fp8(random: np.random.Generator, n: int, k: int) -> Tensor:
    return e4m3(random.uniform(-448, 448, (n, k)))


def fp8_per_tensor(random: np.random.Generator, n: int, k: int) -> Written:
    values, scale = _fp8(random, n, k), torch.tensor(0.0013)
    tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
    return tensors, values.double().numpy() * scale.double().numpy()


def fp8_per_channel(random: np.random.Generator, n: int, k: int) -> Written:
    values = _fp8(random, n, k)
    scale = torch.from_numpy(random.uniform(1e-4, 1e-3, (n, 1))).bfloat16()
    return {"weight": values, "weight_scale": scale}, values.double().numpy() * scale.double().numpy()


def fp8_blockwise(random: np.random.Generator, n: int, k: int) -> Written:
    """Blocks of 32 x 48, the last ones incomplete."""
    values = _fp8(random, n, k)
    scale = torch.from_numpy(random.uniform(1e-4, 1e-3, (-(-n // 32), -(-k // 48))).astype(np.float32))
    spread = scale.double().numpy().repeat(32, 0)[:n].repeat(48, 1)[:, :k]
    return {"weight": values, "weight_scale_inv": scale}, values.double().numpy() * spread


def mxfp8(random: np.random.Generator, n: int, k: int) -> Written:
    values, exponents = _fp8(random, n, k), random.integers(113, 118, (n, k // 32)).astype(np.uint8)
    whole = values.double().numpy() * (2.0 ** (exponents.astype(int) - 127)).repeat(32, 1)
    return {"weight": values, "weight_scale": torch.from_numpy(exponents)}, whole


def _int8(random: np.random.Generator, n: int, k: int) -> Tensor:
    return torch.from_numpy(random.integers(-128, 128, (n, k)).astype(np.int8))


def int8_per_channel(random: np.random.Generator, n: int, k: int) -> Written:
    values, scale = _int8(random, n, k), torch.from_numpy(random.uniform(1e-3, 1e-2, n).astype(np.float32))
    return {"weight": values, "weight_scale": scale}, values.double().numpy() * scale.double().numpy()[:, None]


def int8_groups_with_zero_points(random: np.random.Generator, n: int, k: int) -> Written:
    values, scale = _int8(random, n, k), torch.from_numpy(random.uniform(1e-3, 1e-2, (n, k // 16)).astype(np.float16))
    zero = torch.from_numpy(random.integers(-20, 20, (n, k // 16)).astype(np.int8))
    spread_scale, spread_zero = (t.double().numpy().repeat(16, 1) for t in (scale, zero))
    whole = (values.double().numpy() - spread_zero) * spread_scale
    return {"weight": values, "weight_scale": scale, "weight_zero_point": zero}, whole


def int8_torchao(random: np.random.Generator, n: int, k: int) -> Written:
    tensors, whole = int8_per_channel(random, n, k)
    return {"_weight_qdata": tensors["weight"], "_weight_scale": tensors["weight_scale"]}, whole


def int8_bitsandbytes(random: np.random.Generator, n: int, k: int) -> Written:
    values, largest = _int8(random, n, k), torch.from_numpy(random.uniform(0.5, 1, n).astype(np.float32))
    whole = values.double().numpy() * largest.double().numpy()[:, None] / 127
    return {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}, whole


def nf4_bitsandbytes(random: np.random.Generator, n: int, k: int) -> Written:
    """Scales of blocks of 64 values, themselves in 8 bits with a scale for 256 of them."""
    codes = random.integers(0, 16, n * k)
    table = torch.from_numpy(random.uniform(-1, 1, 16).astype(np.float32))
    nested = torch.from_numpy(random.uniform(0, 1, 256).astype(np.float32))
    absmax = random.integers(0, 256, -(-n * k // 64)).astype(np.uint8)
    of_absmax = torch.from_numpy(random.uniform(0.1, 1, -(-len(absmax) // 256)).astype(np.float32))
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [n, k], "dtype": "float16"}
    state |= {"nested_blocksize": 256, "nested_offset": 0.25}
    scales = nested.double().numpy()[absmax] * of_absmax.double().numpy().repeat(256)[: len(absmax)] + 0.25
    whole = table.double().numpy()[codes] * scales.repeat(64)[: n * k]
    tensors = {
        "weight": torch.from_numpy((codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]),
        "weight.absmax": torch.from_numpy(absmax),
        "weight.quant_map": table,
        "weight.nested_absmax": of_absmax,
        "weight.nested_quant_map": nested,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return tensors, whole.reshape(n, k)


def pack_quantized(bits: int, asymmetric: bool, act_order: bool) -> Writer:
    """compressed-tensors', groups of 32 columns."""

    def write(random: np.random.Generator, n: int, k: int) -> Written:
        half, groups = 1 << bits - 1, k // 32
        values = random.integers(0, 2 * half, (n, k))
        zero = random.integers(0, 2 * half, (n, groups)) if asymmetric else np.full((n, groups), half)
        scale = torch.from_numpy(random.uniform(1e-3, 1e-2, (n, groups))).bfloat16()
        group = random.permutation(np.arange(k) // 32) if act_order else np.arange(k) // 32
        whole = (values - zero[:, group]) * scale.double().numpy()[:, group]
        tensors = {"weight_packed": words(values, bits), "weight_scale": scale, "weight_shape": torch.tensor([n, k])}
        if asymmetric:
            tensors["weight_zero_point"] = words(zero.T, bits).T.contiguous()
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(group.astype(np.int32))
        return tensors, whole

    return write


def gptq(bits: int, act_order: bool, second_version: bool = False, symmetric: bool = False) -> Writer:
    """Groups of 32 rows of K; zero points less one in the first version, which wrap."""

    def write(random: np.random.Generator, n: int, k: int) -> Written:
        most, groups = 1 << bits, k // 32
        values = random.integers(0, most, (k, n))
        zero = np.full((groups, n), most // 2) if symmetric else random.integers(0, most, (groups, n))
        scale = torch.from_numpy(random.uniform(1e-3, 1e-2, (groups, n)).astype(np.float16))
        group = random.permutation(np.arange(k) // 32) if act_order else np.arange(k) // 32
        whole = (values - zero[group]) * scale.double().numpy()[group]
        tensors = {
            "qweight": words(values.T, bits).T.contiguous(),
            "qzeros": words(zero if second_version else (zero - 1) % most, bits),
            "scales": scale,
            "g_idx": torch.from_numpy(group.astype(np.int32)),
        }
        return tensors, whole.T

    return write


def awq(random: np.random.Generator, n: int, k: int) -> Written:
    groups, order = k // 32, [0, 2, 4, 6, 1, 3, 5, 7]
    values, zero = random.integers(0, 16, (k, n)), random.integers(0, 16, (groups, n))
    scale = torch.from_numpy(random.uniform(1e-3, 1e-2, (groups, n)).astype(np.float16))
    whole = (values - zero.repeat(32, 0)) * scale.double().numpy().repeat(32, 0)
    qweight, qzeros = (words(t.reshape(len(t), -1, 8)[:, :, order].reshape(t.shape), 4) for t in (values, zero))
    return {"qweight": qweight, "qzeros": qzeros, "scales": scale}, whole.T


def int4_modelopt(random: np.random.Generator, n: int, k: int) -> Written:
    values = random.integers(-8, 8, (n, k))
    scale = torch.from_numpy(random.uniform(1e-3, 1e-2, (n, k // 32)).astype(np.float32))
    packed = (values[::2] & 15 | (values[1::2] & 15) << 4).astype(np.uint8)
    whole = values * scale.double().numpy().repeat(32, 1)
    return {"weight": torch.from_numpy(packed), "weight_scale": scale}, whole


# By name: the writer, and what config.json must say.
FORMATS: dict[str, tuple[Writer, dict[str, object]]] = {
    "nvfp4 modelopt": (nvfp4_modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4 compressed-tensors": (nvfp4_compressed_tensors, {"quant_method": "compressed-tensors"}),
    "nvfp4 awq": (nvfp4_awq, {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}),
    "mxfp4": (mxfp4, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}),
    "fp8 per tensor": (fp8_per_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "fp8 per channel": (fp8_per_channel, {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "fp8 blockwise": (fp8_blockwise, {"quant_method": "fp8", "weight_block_size": [32, 48]}),
    "mxfp8": (mxfp8, {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
    "int8 per channel": (int8_per_channel, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "int8 groups": (int8_groups_with_zero_points, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "int8 torchao": (int8_torchao, {"quant_method": "torchao"}),
    "int8 bitsandbytes": (int8_bitsandbytes, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nf4 bitsandbytes": (nf4_bitsandbytes, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "int4 modelopt": (int4_modelopt, {"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    **{
        f"pack-quantized {bits}{' zero points' * asymmetric}{' act order' * act_order}": (
            pack_quantized(bits, asymmetric, act_order),
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        )
        for bits, asymmetric, act_order in ((4, False, False), (4, True, True), (8, True, False), (3, True, False))
    },
    **{
        f"gptq {bits}{' act order' * act_order}{' v2' * second}": (
            gptq(bits, act_order, second),
            {"quant_method": "gptq", "bits": bits, "checkpoint_format": "gptq_v2" if second else "gptq"},
        )
        for bits, act_order, second in (
            (4, False, False),
            (4, True, False),
            (4, True, True),
            (3, False, False),
            (8, True, False),
        )
    },
}
