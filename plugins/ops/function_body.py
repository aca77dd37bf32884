"""The text blocks that the ops' ONNX function bodies are made of (statements in ONNX's textual syntax).

Written for what ONNX Runtime, the reference evaluator and the TensorRT-RTX parser all take: float32 arithmetic,
bytes decoded through tables (no BitShift, no FP4 or FP8 type), variants by If on constants of the attributes, and only
operators that mean the same from opset 17 to 24 (block maxima by MaxPool: the reductions changed at 18).
TensorRT builds INT8 constants only behind DequantizeLinear: so bytes enter through one, of scale 1. NVFP4PersistentMLP
enters its whole stack, which as numbers is as large as the original in float16, in front of the loop over its layers.
The loops over layers of a decoder and over experts take each one by Gather first, which TensorRT parses but does not
build.
A block that assigns `y` introduces no other name than `y_...`. Weights are decoded through a table of byte -> two
values with int32 indices: ONNX Runtime holds a few copies of one layer in float32, no int64 index tensor.
"""

from trt_nvfp4.plugins.ops.number_formats import (
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    E4M3_VALUES,
    ERROR_STEPS,
    MOST_ERROR_STEPS,
    SEARCHED_LARGEST,
    SEARCHED_OFFSETS,
    SMALLEST_TENSOR_SCALE,
)

FLOAT, INT8, INT32, INT64, BOOL = 1, 3, 6, 7, 9  # onnx.TensorProto.DataType
FLOAT32_MAX = 2.0**128 - 2.0**104
E4M3_STEPS = tuple(2.0**e for e in range(-9, 6))  # between neighbours, for the binades from 2^-6 (and below) to 2^8


def constants() -> str:
    """Constants that the other blocks use: once at the head of a body."""
    values = ", ".join(repr(v) for v in E2M1_VALUES)
    return f"""
        zero_f = Constant<value = float {{0}}>()
        one_f = Constant<value = float {{1}}>()
        axis_last = Constant<value = int64[1] {{-1}}>()
        origin = Constant<value = int64[2] {{0, 0}}>()
        rows_of_blocks = Constant<value = int64[3] {{0, -1, 16}}>()
        tile_extent = Constant<value = int64[2] {{128, 4}}>()
        tile_inner = Constant<value = int64[3] {{32, 4, 4}}>()
        byte_count = Constant<value = int32 {{256}}>()
        code_low = Constant<value = float[1,16,1] {{{values}}}>()
        code_high = Constant<value = float[16,1,1] {{{values}}}>()
        code_square = Constant<value = int64[3] {{16, 16, 1}}>()
        byte_table = Constant<value = int64[2] {{256, 2}}>()
        code_low_square = Expand(code_low, code_square)
        code_high_square = Expand(code_high, code_square)
        code_pairs = Concat<axis = 2>(code_low_square, code_high_square)
        e2m1_pairs = Reshape(code_pairs, byte_table)
        e4m3_values = Constant<value = float[127] {{{", ".join(map(repr, E4M3_VALUES))}}}>()
        e4m3_steps = Constant<value = float[15] {{{", ".join(map(repr, E4M3_STEPS))}}}>()
    """


def e4m3_constants() -> str:
    """Constants that `through_e4m3` and `dequantize_e4m3` use: once at the head of a body."""
    return f"""
        zero_f = Constant<value = float {{0}}>()
        one_f = Constant<value = float {{1}}>()
        axis_last = Constant<value = int64[1] {{-1}}>()
        origin = Constant<value = int64[2] {{0, 0}}>()
        byte_count = Constant<value = int32 {{256}}>()
        {e4m3_table()}
        e4m3_steps = Constant<value = float[15] {{{", ".join(map(repr, E4M3_STEPS))}}}>()
    """


def e4m3_table() -> str:
    """e4m3_bytes: byte -> value. Part of e4m3_constants(), not of constants()."""
    values = ", ".join(map(repr, (*E4M3_VALUES, float("nan"), *(-v for v in E4M3_VALUES), float("nan"))))
    return f"e4m3_bytes = Constant<value = float[256] {{{values}}}>()"


def attribute_int(name: str) -> str:
    return f"{name} = Constant<value_int: int = @{name}>()"


def attribute_float(name: str) -> str:
    return f"{name} = Constant<value_float: float = @{name}>()"


def attribute_flag(name: str) -> str:
    """A boolean scalar `name` from the 0/1 attribute of the same name."""
    return f"""{name}_int = Constant<value_int: int = @{name}>()
        {name} = Cast<to = {BOOL}>({name}_int)"""


def quantization_attributes() -> str:
    """The attributes scale_search and residual_channels as `quantize_blocks`, `gemm_input` and `lost` read them."""
    return f"""{attribute_flag("scale_search")}
        {attribute_int("residual_channels")}
        residual_is_on = Cast<to = {BOOL}>(residual_channels)
        residual_one = Constant<value = int64[1] {{1}}>()
        residual_less = Neg(residual_channels)
        residual_from = Reshape(residual_less, residual_one)
        residual_to = Constant<value = int64[1] {{{2**31 - 1}}}>()"""


def rows(y: str, x: str) -> str:
    """y [M, K] float32 from x T [..., K]; of no rows, one of zeros: a -1 in Reshape stands for nothing there."""
    return f"""{y}_float = Cast<to = {FLOAT}>({x})
        {y}_k = Shape<start = -1>({x})
        {y}_shape = Concat<axis = 0>(axis_last, {y}_k)
        {y}_given = Reshape({y}_float, {y}_shape)
        {y}_count = Shape<start = 0, end = 1>({y}_given)
        {y}_no_rows = Constant<value = int64[1] {{0}}>()
        {y}_is_empty = Equal({y}_count, {y}_no_rows)
        {y}_missing = Cast<to = {INT64}>({y}_is_empty)
        {y}_pads = Concat<axis = 0>(origin, {y}_missing, {y}_no_rows)
        {y} = Pad({y}_given, {y}_pads, zero_f)"""


def with_rows_of(y: str, matrix: str) -> str:
    """y [..., N] from matrix [M, N], with the leading dimensions of the op's x [..., K]; where those hold no row, nor
    does y."""
    return f"""{y}_lead = Shape<start = 0, end = -1>(x)
        {y}_n = Shape<start = -1>({matrix})
        {y}_shape = Concat<axis = 0>({y}_lead, {y}_n)
        {y}_first = Constant<value = int64[1] {{0}}>()
        {y}_count = ReduceProd<keepdims = 1>({y}_lead)
        {y}_rows = Slice({matrix}, {y}_first, {y}_count, {y}_first)
        {y} = Reshape<allowzero = 1>({y}_rows, {y}_shape)"""


def dequantize_weight(y: str, packed: str, scales: str, tensor_scale: str) -> str:
    """y [N, K] float32 from packed INT8 [N, K/2], tiled block scales (E4M3 bytes, INT8) and a float32 scalar."""
    return f"""{y}_bytes_float = DequantizeLinear({packed}, one_f)
        {y}_scale_bytes_float = DequantizeLinear({scales}, one_f)
        {decode_weight(y, f"{y}_bytes_float", f"{y}_scale_bytes_float", tensor_scale)}"""


def decode_weight(y: str, packed: str, scales: str, tensor_scale: str) -> str:
    """The same from bytes that have entered, as float32 numbers from -128 to 127."""
    return f"""{y}_signed = Cast<to = {INT32}>({packed})
        {y}_bytes = Mod({y}_signed, byte_count)
        {y}_pairs = Gather(e2m1_pairs, {y}_bytes)
        {y}_codes = Reshape({y}_pairs, rows_of_blocks)
        {y}_padded_shape = Shape({scales})
        {y}_tile_counts = Div({y}_padded_shape, tile_extent)
        {y}_tiles_shape = Concat<axis = 0>({y}_tile_counts, tile_inner)
        {y}_scale_bytes = Cast<to = {INT32}>({scales})
        {y}_scales_float = Gather(e4m3_values, {y}_scale_bytes)
        {y}_tiles = Reshape({y}_scales_float, {y}_tiles_shape)
        {y}_untiled = Transpose<perm = [0, 3, 2, 1, 4]>({y}_tiles)
        {y}_padded = Reshape({y}_untiled, {y}_padded_shape)
        {y}_codes_shape = Shape<start = 0, end = 2>({y}_codes)
        {y}_scales = Slice({y}_padded, origin, {y}_codes_shape)
        {y}_block_scales = Unsqueeze({y}_scales, axis_last)
        {y}_blocks = Mul({y}_codes, {y}_block_scales)
        {y}_scaled = Mul({y}_blocks, {tensor_scale})
        {y}_n = Shape<start = 0, end = 1>({packed})
        {y}_shape = Concat<axis = 0>({y}_n, axis_last)
        {y} = Reshape({y}_scaled, {y}_shape)"""


def dequantize_e4m3(y: str, weight: str, scale: str) -> str:
    """y [N, K] float32 from E4M3 bytes (INT8 [N, K]) and one multiplier per row, float32 [N]."""
    return f"""{y}_bytes_float = DequantizeLinear({weight}, one_f)
        {y}_signed = Cast<to = {INT32}>({y}_bytes_float)
        {y}_bytes = Mod({y}_signed, byte_count)
        {y}_values = Gather(e4m3_bytes, {y}_bytes)
        {y}_scale = Unsqueeze({scale}, axis_last)
        {y} = Mul({y}_values, {y}_scale)"""


def round_to_e4m3(y: str, x: str) -> str:
    """y float32: x, from 0 to 448, rounded to E4M3; its code is 8 {y}_binade + {y}_steps. NaN, where {y}_is_nan, stays.

    Round ties to even, in units of the step between neighbours. A logarithm that is off by its last bit picks the wrong
    binade only beside a power of two, where both give the same result.
    """
    return f"""{y}_least = Constant<value_float: float = {E4M3_STEPS[0]}>()
        {y}_log2_e = Constant<value_float: float = 1.44269504>()
        {y}_bias = Constant<value_float: float = 6.0>()
        {y}_positive = Max({x}, {y}_least)
        {y}_ln = Log({y}_positive)
        {y}_log2 = Mul({y}_ln, {y}_log2_e)
        {y}_exponent = Floor({y}_log2)
        {y}_raised = Add({y}_exponent, {y}_bias)
        {y}_binade = Max({y}_raised, zero_f)
        {y}_is_nan = IsNaN({x})
        {y}_place = Where({y}_is_nan, zero_f, {y}_binade)
        {y}_index = Cast<to = {INT32}>({y}_place)
        {y}_step = Gather(e4m3_steps, {y}_index)
        {y}_in_steps = Div({x}, {y}_step)
        {y}_steps = Round({y}_in_steps)
        {y} = Mul({y}_steps, {y}_step)"""


def _amax(y: str, magnitudes: str) -> str:
    """y []: the largest magnitude, or NaN where one is. A maximum may lose NaN; the sum, never smaller, keeps it."""
    return f"""{y}_largest_one = ReduceMax<keepdims = 0>({magnitudes})
        {y}_sum = ReduceSum<keepdims = 0>({magnitudes})
        {y} = Min({y}_largest_one, {y}_sum)"""


def through_e4m3(y: str, x: str, scale: str) -> str:
    """y [M, K] float32: x [M, K] quantized to E4M3 and back; `scale` 0 means: amax / 448."""
    return f"""{y}_largest = Constant<value_float: float = {E4M3_MAX}>()
        {y}_smallest = Constant<value_float: float = {SMALLEST_TENSOR_SCALE!r}>()
        {y}_abs = Abs({x})
        {_amax(f"{y}_amax", f"{y}_abs")}
        {y}_ratio = Div({y}_amax, {y}_largest)
        {y}_computed = Max({y}_ratio, {y}_smallest)
        {y}_absent = Equal({scale}, zero_f)
        {y}_scale = Where({y}_absent, {y}_computed, {scale})
        {y}_unbounded = Div({y}_abs, {y}_scale)
        {y}_bounded = Min({y}_unbounded, {y}_largest)
        {round_to_e4m3(f"{y}_magnitude", f"{y}_bounded")}
        {y}_sign = Sign({x})
        {y}_rounded = Mul({y}_magnitude, {y}_sign)
        {y} = Mul({y}_rounded, {y}_scale)"""


def linear(y: str, x: str, weight: str, bias: str) -> str:
    """y = x W^T + b, float32 matrices; the bias of any float type."""
    return f"""{y}_bias = Cast<to = {FLOAT}>({bias})
        {y} = Gemm<transB = 1>({x}, {weight}, {y}_bias)"""


def _round_to_e2m1(y: str, a: str) -> str:
    """y float32: a, not negative, rounded to E2M1 by Round, which ties to even, in units of the step between
    neighbours."""
    return f"""{y}_half = Constant<value_float: float = 0.5>()
        {y}_two = Constant<value_float: float = 2.0>()
        {y}_four = Constant<value_float: float = 4.0>()
        {y}_six = Constant<value_float: float = {E2M1_MAX}>()
        {y}_doubled = Mul({a}, {y}_two)
        {y}_doubled_round = Round({y}_doubled)
        {y}_below_two = Mul({y}_doubled_round, {y}_half)
        {y}_below_four = Round({a})
        {y}_halved = Mul({a}, {y}_half)
        {y}_halved_round = Round({y}_halved)
        {y}_redoubled = Mul({y}_halved_round, {y}_two)
        {y}_above_four = Min({y}_redoubled, {y}_six)
        {y}_is_below_two = Less({a}, {y}_two)
        {y}_is_below_four = Less({a}, {y}_four)
        {y}_from_two = Where({y}_is_below_four, {y}_below_four, {y}_above_four)
        {y} = Where({y}_is_below_two, {y}_below_two, {y}_from_two)"""


def _scale_over(y: str, amax: str, target: float, tensor_scale: str) -> str:
    """{y} [M, Kb, 1]: amax / target / tensor_scale rounded to E4M3, and {y}_code, its code (float32; not of NaN)."""
    return f"""{y}_target = Constant<value_float: float = {target}>()
        {y}_scale_max = Constant<value_float: float = {E4M3_MAX}>()
        {y}_eight = Constant<value_float: float = 8.0>()
        {y}_ratio = Div({amax}, {y}_target)
        {y}_wanted = Div({y}_ratio, {tensor_scale})
        {y}_clipped = Min({y}_wanted, {y}_scale_max)
        {round_to_e4m3(y, f"{y}_clipped")}
        {y}_binade_code = Mul({y}_binade, {y}_eight)
        {y}_code = Add({y}_binade_code, {y}_steps)"""


def _search_scales(y: str, q: str) -> str:
    """{y} and {y}_code [M, Kb, 1]: the best of the scales that `scale_search` allows, from what `quantize_blocks` named
    {q}_..., the errors being the integers that `number_formats` defines."""
    offsets = ", ".join(str(float(offset)) for offset in SEARCHED_OFFSETS)
    return f"""{y}_most = Constant<value_float: float = {MOST_ERROR_STEPS / ERROR_STEPS}>()
        {y}_error_steps = Constant<value_float: float = {ERROR_STEPS}>()
        {y}_last_code = Constant<value_float: float = 126.0>()
        {y}_offsets = Constant<value = float[{len(SEARCHED_OFFSETS)}] {{{offsets}}}>()
        {y}_one = Constant<value_int: int = 1>()
        {y}_values_axis = Constant<value = int64[1] {{2}}>()
        {_scale_over(f"{y}_quarter", f"{q}_block_amax", 4.0, f"{q}_tensor_scale")}
        {y}_first = Where({q}_first_is_nan, zero_f, {q}_first_code)
        {y}_quarter_or_none = Where({y}_quarter_is_nan, zero_f, {y}_quarter_code)
        {y}_both = Concat<axis = 2>({y}_first, {y}_quarter_or_none, {y}_first, {y}_first)
        {y}_moved = Add({y}_first, {y}_offsets)
        {y}_positive = Max({y}_moved, one_f)
        {y}_around = Min({y}_positive, {y}_last_code)
        {y}_is_both = Equal(scale_search_int, {y}_one)
        {y}_codes = Where({y}_is_both, {y}_both, {y}_around)
        {y}_indices = Cast<to = {INT32}>({y}_codes)
        {y}_scales = Gather(e4m3_values, {y}_indices)
        {y}_divisors = Max({y}_scales, {q}_scale_min)
        {y}_unbounded = Div({q}_inverse, {y}_divisors)
        {y}_bounded = Min({y}_unbounded, {q}_largest)
        {y}_multipliers = Unsqueeze({y}_bounded, {y}_values_axis)
        {y}_column = Unsqueeze({q}_magnitude_in, axis_last)
        {y}_a = Mul({y}_column, {y}_multipliers)
        {_round_to_e2m1(f"{y}_rounded", f"{y}_a")}
        {y}_difference = Sub({y}_a, {y}_rounded)
        {y}_distance = Abs({y}_difference)
        {y}_error = Min({y}_distance, {y}_most)
        {y}_fine = Mul({y}_error, {y}_error_steps)
        {y}_integer = Round({y}_fine)
        {y}_square = Mul({y}_integer, {y}_integer)
        {y}_sum = ReduceSum<keepdims = 0>({y}_square, {y}_values_axis)
        {y}_weight = Mul({y}_scales, {y}_scales)
        {y}_loss = Mul({y}_sum, {y}_weight)
        {y}_best = ArgMin<axis = 2, keepdims = 1>({y}_loss)
        {y}_best_code = GatherElements<axis = 2>({y}_codes, {y}_best)
        {y}_best_scale = GatherElements<axis = 2>({y}_scales, {y}_best)
        {y}_is_above = Greater({y}_first, zero_f)
        {y}_is_below = Less({y}_first, {y}_last_code)
        {y}_is_searched = And({y}_is_above, {y}_is_below)
        {y}_code = Where({y}_is_searched, {y}_best_code, {q}_first_code)
        {y} = Where({y}_is_searched, {y}_best_scale, {q}_first)"""


def _chosen_scales(y: str, branches: bool) -> str:
    """{y}_block_scales and {y}_number_bytes of `quantize_blocks`; without `branches` both ways are computed."""
    search = _search_scales(f"{y}_found", y)
    if not branches:
        return f"""{search}
        {y}_block_scales = Where(scale_search, {y}_found, {y}_first)
        {y}_number_bytes = Where(scale_search, {y}_found_code, {y}_first_code)"""
    return f"""{y}_block_scales, {y}_number_bytes = If(scale_search) <
            then_branch = {y}_searching () => ({y}_found, {y}_found_code) {{ {search} }},
            else_branch = {y}_by_amax () => ({y}_kept, {y}_kept_code) {{
                {y}_kept = Identity({y}_first)
                {y}_kept_code = Identity({y}_first_code) }}
        >"""


def quantize_blocks(y: str, x: str, scale: str, branches: bool = True) -> str:
    """NVFP4 of the matrix x [M, K] float32: {y}_tensor_scale [], {y}_block_scales [M, Kb, 1] (E4M3 values) and
    {y}_scale_bytes [M, Kb, 1] (their codes), {y}_magnitudes [M, Kb, 16] (E2M1 values), {y}_blocks (x by blocks); all
    float32. `scale` 0 means: from the amax. `quantization_attributes` are in scope.
    Inside a branch without `branches`: ONNX Runtime loses the order of nodes when it inlines branches of branches.
    """
    return f"""{y}_amax_range = Constant<value_float: float = {E2M1_MAX * E4M3_MAX}>()
        {y}_searched_range = Constant<value_float: float = {E2M1_MAX * SEARCHED_LARGEST}>()
        {y}_range = Where(scale_search, {y}_searched_range, {y}_amax_range)
        {y}_smallest = Constant<value_float: float = {SMALLEST_TENSOR_SCALE!r}>()
        {y}_largest = Constant<value_float: float = {FLOAT32_MAX!r}>()
        {y}_scale_min = Constant<value_float: float = {E4M3_STEPS[0]}>()
        {y}_nan_byte = Constant<value_float: float = 127.0>()
        {y}_one_channel = Constant<value = int64[3] {{0, 1, -1}}>()
        {y}_one_scale = Constant<value = int64[3] {{0, -1, 1}}>()
        {y}_blocks = Reshape({x}, rows_of_blocks)
        {y}_abs = Abs({x})
        {_amax(f"{y}_amax", f"{y}_abs")}
        {y}_ratio = Div({y}_amax, {y}_range)
        {y}_computed = Max({y}_ratio, {y}_smallest)
        {y}_absent = Equal({scale}, zero_f)
        {y}_tensor_scale = Where({y}_absent, {y}_computed, {scale})
        {y}_channel = Reshape({y}_abs, {y}_one_channel)
        {y}_pooled = MaxPool<kernel_shape = [16], strides = [16]>({y}_channel)
        {y}_pooled_amax = Reshape({y}_pooled, {y}_one_scale)
        {y}_magnitude_in = Reshape({y}_abs, rows_of_blocks)
        {y}_block_sum = ReduceSum<keepdims = 1>({y}_magnitude_in, axis_last)
        {y}_block_amax = Min({y}_pooled_amax, {y}_block_sum)
        {y}_inverse = Reciprocal({y}_tensor_scale)
        {_scale_over(f"{y}_first", f"{y}_block_amax", E2M1_MAX, f"{y}_tensor_scale")}
        {_chosen_scales(y, branches)}
        {y}_scale_bytes = Where({y}_first_is_nan, {y}_nan_byte, {y}_number_bytes)
        {y}_divisor = Max({y}_block_scales, {y}_scale_min)
        {y}_unbounded = Div({y}_inverse, {y}_divisor)
        {y}_bounded = Min({y}_unbounded, {y}_largest)
        {y}_nonzero = Greater({y}_block_scales, zero_f)
        {y}_product = Mul({y}_magnitude_in, {y}_bounded)
        {y}_a = Where({y}_nonzero, {y}_product, zero_f)
        {_round_to_e2m1(f"{y}_magnitudes", f"{y}_a")}"""


def _dequantize(y: str, x: str, q: str) -> str:
    """y [M, K] float32 from what `quantize_blocks` named {q}_... of x."""
    return f"""{y}_sign = Sign({q}_blocks)
        {y}_e2m1 = Mul({q}_magnitudes, {y}_sign)
        {y}_unscaled = Mul({y}_e2m1, {q}_block_scales)
        {y}_values = Mul({y}_unscaled, {q}_tensor_scale)
        {y}_shape = Shape({x})
        {y} = Reshape({y}_values, {y}_shape)"""


def lost(y: str, x: str, q: str) -> str:
    """y [M, residual_channels] float32: what NVFP4 loses of the last channels of x [M, K], from what `quantize_blocks`
    named {q}_... of it."""
    return f"""{_dequantize(f"{y}_seen", x, q)}
        {y}_all = Sub({x}, {y}_seen)
        {y} = Slice({y}_all, residual_from, residual_to, residual_one)"""


def _with_residual(y: str, x: str, scale: str) -> str:
    """y [M, K + residual_channels] float32: x [M, K] quantized to NVFP4 and back, then so is what that loses."""
    return f"""{quantize_blocks(f"{y}_q", x, scale)}
        {_dequantize(f"{y}_first", x, f"{y}_q")}
        {y} = If(residual_is_on) <
            then_branch = {y}_twice () => ({y}_both) {{
                {lost(f"{y}_lost", x, f"{y}_q")}
                {quantize_blocks(f"{y}_e", f"{y}_lost", f"{y}_q_tensor_scale", branches=False)}
                {_dequantize(f"{y}_second", f"{y}_lost", f"{y}_e")}
                {y}_both = Concat<axis = 1>({y}_first, {y}_second) }},
            else_branch = {y}_once () => ({y}_alone) {{ {y}_alone = Identity({y}_first) }}
        >"""


def pack(y: str, q: str) -> str:
    """y [M, K/2] INT8 from what `quantize_blocks` named q_.... A value of -0 takes code 0, where the kernels and the
    Torch reference keep its sign (code 8): the same number."""
    return f"""{y}_half = Constant<value_float: float = 0.5>()
        {y}_two = Constant<value_float: float = 2.0>()
        {y}_four = Constant<value_float: float = 4.0>()
        {y}_eight = Constant<value_float: float = 8.0>()
        {y}_signed_16 = Constant<value_float: float = 16.0>()
        {y}_byte_half = Constant<value_float: float = 128.0>()
        {y}_byte_whole = Constant<value_float: float = 256.0>()
        {y}_low_place = Constant<value = int64 {{0}}>()
        {y}_high_place = Constant<value = int64 {{1}}>()
        {y}_pairs_shape = Constant<value = int64[3] {{0, -1, 2}}>()
        {y}_twice = Mul({q}_magnitudes, {y}_two)
        {y}_plus_two = Add({q}_magnitudes, {y}_two)
        {y}_halved = Mul({q}_magnitudes, {y}_half)
        {y}_plus_four = Add({y}_halved, {y}_four)
        {y}_is_below_two = Less({q}_magnitudes, {y}_two)
        {y}_is_below_four = Less({q}_magnitudes, {y}_four)
        {y}_from_two = Where({y}_is_below_four, {y}_plus_two, {y}_plus_four)
        {y}_magnitude_codes = Where({y}_is_below_two, {y}_twice, {y}_from_two)
        {y}_is_negative = Less({q}_blocks, zero_f)
        {y}_is_nonzero_scale = Greater({q}_block_scales, zero_f)
        {y}_is_signed = And({y}_is_negative, {y}_is_nonzero_scale)
        {y}_sign_codes = Where({y}_is_signed, {y}_eight, zero_f)
        {y}_codes = Add({y}_magnitude_codes, {y}_sign_codes)
        {y}_flat = Flatten<axis = 1>({y}_codes)
        {y}_pairs = Reshape({y}_flat, {y}_pairs_shape)
        {y}_low = Gather<axis = 2>({y}_pairs, {y}_low_place)
        {y}_high = Gather<axis = 2>({y}_pairs, {y}_high_place)
        {y}_high_shifted = Mul({y}_high, {y}_signed_16)
        {y}_unsigned = Add({y}_low, {y}_high_shifted)
        {y}_wraps = GreaterOrEqual({y}_unsigned, {y}_byte_half)
        {y}_wrapped = Sub({y}_unsigned, {y}_byte_whole)
        {y}_in_range = Where({y}_wraps, {y}_wrapped, {y}_unsigned)
        {y} = Cast<to = {INT8}>({y}_in_range)"""


def tile_scales(y: str, scale_bytes: str) -> str:
    """y [ceil(M/128)*128, ceil(Kb/4)*4] INT8, 128x4 tiled and zero padded, from [M, Kb, 1] float32 codes."""
    return f"""{y}_shape = Shape<start = 0, end = 2>({scale_bytes})
        {y}_matrix = Reshape({scale_bytes}, {y}_shape)
        {y}_one = Constant<value = int64[1] {{1}}>()
        {y}_less = Sub({y}_shape, {y}_one)
        {y}_whole_tiles = Div({y}_less, tile_extent)
        {y}_tile_counts = Add({y}_whole_tiles, {y}_one)
        {y}_padded_shape = Mul({y}_tile_counts, tile_extent)
        {y}_missing = Sub({y}_padded_shape, {y}_shape)
        {y}_pads = Concat<axis = 0>(origin, {y}_missing)
        {y}_padded = Pad({y}_matrix, {y}_pads, zero_f)
        {y}_first = Constant<value = int64[1] {{0}}>()
        {y}_second = Constant<value = int64[1] {{1}}>()
        {y}_row_tiles = Gather({y}_tile_counts, {y}_first)
        {y}_block_tiles = Gather({y}_tile_counts, {y}_second)
        {y}_four = Constant<value = int64[1] {{4}}>()
        {y}_four_32 = Constant<value = int64[2] {{4, 32}}>()
        {y}_tiles_shape = Concat<axis = 0>({y}_row_tiles, {y}_four_32, {y}_block_tiles, {y}_four)
        {y}_tiles = Reshape({y}_padded, {y}_tiles_shape)
        {y}_transposed = Transpose<perm = [0, 3, 2, 1, 4]>({y}_tiles)
        {y}_tiled = Reshape({y}_transposed, {y}_padded_shape)
        {y} = Cast<to = {INT8}>({y}_tiled)"""


def gemm_input(y: str, x: str, scale: str) -> str:
    """y [M, K] float32: what the GEMM sees of x [M, K] float32, by the flag `quantize_activations` in scope. 0: x
    rounded to the type of the op's x; 1: x quantized to NVFP4 and back, and [M, K + residual_channels]."""
    return f"""{y} = If(quantize_activations) <
            then_branch = {y}_w4a4 () => ({y}_nvfp4) {{
                {_with_residual(f"{y}_nvfp4", x, scale)} }},
            else_branch = {y}_w4a16 () => ({y}_16) {{
                {y}_16_typed = CastLike({x}, x)
                {y}_16 = Cast<to = {FLOAT}>({y}_16_typed) }}
        >"""


def split_gate_up(gate: str, up: str, x: str) -> str:
    """gate and up [M, I] from x [M, 2I], whose columns alternate: gate 0, up 0, gate 1, ..."""
    return f"""{gate}_pairs_shape = Constant<value = int64[3] {{0, -1, 2}}>()
        {gate}_first = Constant<value = int64 {{0}}>()
        {gate}_second = Constant<value = int64 {{1}}>()
        {gate}_pairs = Reshape({x}, {gate}_pairs_shape)
        {gate} = Gather<axis = 2>({gate}_pairs, {gate}_first)
        {up} = Gather<axis = 2>({gate}_pairs, {gate}_second)"""


def rms_norm(y: str, x: str, weight: str) -> str:
    """y [M, K] float32, rounded to the type of the op's x: x / sqrt(mean(x^2) + epsilon) * weight, float32 inside."""
    return f"""{y}_square = Mul({x}, {x})
        {y}_total = ReduceSum<keepdims = 1>({y}_square, axis_last)
        {y}_k_int = Shape<start = -1>({x})
        {y}_k = Cast<to = {FLOAT}>({y}_k_int)
        {y}_mean = Div({y}_total, {y}_k)
        {y}_shifted = Add({y}_mean, epsilon)
        {y}_root = Sqrt({y}_shifted)
        {y}_rsqrt = Reciprocal({y}_root)
        {y}_unit = Mul({x}, {y}_rsqrt)
        {y}_weight = Cast<to = {FLOAT}>({weight})
        {y}_weighted = Mul({y}_unit, {y}_weight)
        {y}_typed = CastLike({y}_weighted, x)
        {y} = Cast<to = {FLOAT}>({y}_typed)"""
