"""CachedAttention: rotary embedding, append to the key and value caches, attention over what they hold."""

import torch
from torch import Tensor
from torch.nn import functional

from trt_nvfp4.plugins.ops import function_body as text
from trt_nvfp4.plugins.ops.definition import Formal, OpDefinition, Shape, ShapeRule
from trt_nvfp4.plugins.ops.number_formats import e4m3_round

ROPE_NONE, ROPE_HALVES, ROPE_INTERLEAVED = range(3)
MAX_HEAD_DIM = 256


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, rope: int) -> Tensor:
    """x [batch, new, heads, head_dim] rotated by tables [batch, new, 1, rotary_dim / 2]."""
    if rope == ROPE_NONE:
        return x
    half = cos.shape[-1]
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if rope == ROPE_HALVES:
        first, second = rotated[..., :half], rotated[..., half:]
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    pairs = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(pairs, -1) if rope == ROPE_HALVES else torch.stack(pairs, -1).flatten(-2)
    return torch.cat((joined, rest), -1)


def _append(past: Tensor, new: Tensor, past_length: Tensor) -> Tensor:
    """The cache [batch, kv_heads, capacity, head_dim] with `new` [batch, new, kv_heads, head_dim] at its place."""
    present = past.clone()
    for b, length in enumerate(past_length.tolist()):
        count = min(new.shape[1], past.shape[2] - length)
        present[b, :, length : length + count] = new[b, :count].transpose(0, 1)
    return present


def _cached(new: Tensor, scale: Tensor, past: Tensor, fp8: int) -> Tensor:
    """Keys or values as the cache holds them: its type, or E4M3 bytes of value / scale."""
    if not fp8:
        return new.to(past.dtype)
    return e4m3_round(new / scale[:, None]).view(torch.int8)


def _values(cache: Tensor, scale: Tensor, fp8: int) -> Tensor:
    return cache.view(torch.float8_e4m3fn).float() * scale[:, None, None] if fp8 else cache.float()


def cached_attention(
    qkv: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    past_length: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    sinks: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    *,
    heads: int,
    rope: int,
    qk_norm: int,
    has_sinks: int,
    fp8_cache: int,
    window: int,
    epsilon: float,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op in Torch: y, present_key, present_value."""
    batch, new, _ = qkv.shape
    _, kv_heads, capacity, head_dim = past_key.shape
    past_length = past_length.long().clamp(0, capacity)
    positions = past_length[:, None] + torch.arange(new, device=qkv.device)
    rows = positions.clamp_max(cos.shape[0] - 1)
    tables = cos[rows].unsqueeze(2), sin[rows].unsqueeze(2)
    by_head = qkv.float().view(batch, new, heads + 2 * kv_heads, head_dim)
    q, k, v = torch.split(by_head, [heads, kv_heads, kv_heads], 2)
    if qk_norm:
        q = functional.rms_norm(q, (head_dim,), q_norm_weight.float(), epsilon)
        k = functional.rms_norm(k, (head_dim,), k_norm_weight.float(), epsilon)
    q = _rotate(q, *tables, rope).to(qkv.dtype).float()
    k = _rotate(k, *tables, rope)
    present_key = _append(past_key, _cached(k, key_scale, past_key, fp8_cache), past_length)
    present_value = _append(past_value, _cached(v, value_scale, past_value, fp8_cache), past_length)

    slots = torch.arange(capacity, device=qkv.device)
    unused = (slots >= (past_length + new)[:, None])[:, None, :, None]  # whatever lies there
    keys = _values(present_key, key_scale, fp8_cache).masked_fill(unused, 0)
    values = _values(present_value, value_scale, fp8_cache).masked_fill(unused, 0)
    group = heads // kv_heads
    scores = q.transpose(1, 2) @ keys.repeat_interleave(group, 1).transpose(2, 3) * (scale or head_dim**-0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = slots <= positions[..., None]
    if window:
        visible &= slots > positions[..., None] - window
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if has_sinks:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(batch, heads, new, 1)), -1)
    # A token beyond the capacity may see no key: it gets zeros. NaN stays NaN.
    unseeing = ~visible.any(-1)[:, None, :, None]
    probabilities = scores.softmax(-1).masked_fill(unseeing, 0)[..., :capacity]
    y = probabilities @ values.repeat_interleave(group, 1)
    return y.transpose(1, 2).reshape(batch, new, heads * head_dim).to(qkv.dtype), present_key, present_value


def _shapes(rule: ShapeRule) -> list[Shape]:
    heads = rule.attributes["heads"]
    qkv, cache, cos = (rule.shapes[name] for name in ("qkv", "past_key", "cos"))
    if len(cache) != 4 or not isinstance(cache[1], int) or not isinstance(cache[3], int):
        raise rule.error(f"past_key must be [batch, kv_heads, capacity, head_dim], heads known, found {list(cache)}")
    batch, kv_heads, capacity, head_dim = cache[0], cache[1], cache[2], cache[3]
    if kv_heads < 1 or heads % kv_heads:
        raise rule.error(f"the caches' KV heads must divide heads, {heads}, found {kv_heads}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise rule.error(f"the head size must be 1 to {MAX_HEAD_DIM}, found {head_dim}")
    if len(qkv) != 3 or len(cos) != 2:
        raise rule.error(f"qkv must have 3 dimensions and cos 2, found {len(qkv)} and {len(cos)}")
    rule.expect("qkv", (batch, None, (heads + 2 * kv_heads) * head_dim))
    if isinstance(batch, int):
        rule.expect("past_length", (batch,))
    rule.expect("past_value", cache)
    rule.expect("sin", cos)
    half = cos[1]
    if rule.attributes["rope"] != ROPE_NONE and isinstance(half, int) and not 1 <= half <= head_dim // 2:
        raise rule.error(f"cos must have 1 to {head_dim // 2} columns, half the head size, found {half}")
    for name, size in (("q_norm_weight", head_dim), ("k_norm_weight", head_dim), ("sinks", heads)):
        rule.expect(name, (size,))
    for name in ("key_scale", "value_scale"):
        rule.expect(name, (kv_heads,))
    if isinstance(capacity, int) and capacity < 1:
        raise rule.error(f"the caches' capacity must be positive, found {capacity}")
    return [(qkv[0], qkv[1], heads * head_dim), cache, cache]


def _head_norm(y: str, x: str, weight: str) -> str:
    return f"""{y} = If(qk_norm) <
            then_branch = {y}_normed () => ({y}_unit) {{
                {y}_squares = Mul({x}, {x})
                {y}_sum = ReduceSum({y}_squares, axis_last)
                {y}_size = Cast<to = {text.FLOAT}>(head_dim)
                {y}_mean = Div({y}_sum, {y}_size)
                {y}_raised = Add({y}_mean, epsilon)
                {y}_root = Sqrt({y}_raised)
                {y}_divided = Div({x}, {y}_root)
                {y}_weight = Cast<to = {text.FLOAT}>({weight})
                {y}_unit = Mul({y}_divided, {y}_weight) }},
            else_branch = {y}_not_normed () => ({y}_same) {{ {y}_same = Identity({x}) }}
        >"""


def _rope(y: str, x: str) -> str:
    def pairs(first: str, second: str, name: str) -> str:
        return f"""{name}_first_cos = Mul({first}, cos_rows)
                {name}_second_sin = Mul({second}, sin_rows)
                {name}_a = Sub({name}_first_cos, {name}_second_sin)
                {name}_second_cos = Mul({second}, cos_rows)
                {name}_first_sin = Mul({first}, sin_rows)
                {name}_b = Add({name}_second_cos, {name}_first_sin)"""

    return f"""{y} = If(no_rope) <
            then_branch = {y}_none () => ({y}_same) {{ {y}_same = Identity({x}) }},
            else_branch = {y}_some () => ({y}_whole) {{
                {y}_rotary = Slice({x}, index_0, rotary_dim, axis_last)
                {y}_rest = Slice({x}, rotary_dim, head_dim, axis_last)
                {y}_turned = If(interleaved) <
                    then_branch = {y}_by_pairs () => ({y}_joined) {{
                        {y}_lead = Shape<start = 0, end = 3>({y}_rotary)
                        {y}_pair_shape = Concat<axis = 0>({y}_lead, half_rotary, index_2)
                        {y}_pairs = Reshape<allowzero = 1>({y}_rotary, {y}_pair_shape)
                        {y}_even = Gather<axis = -1>({y}_pairs, scalar_0)
                        {y}_odd = Gather<axis = -1>({y}_pairs, scalar_1)
                        {pairs(f"{y}_even", f"{y}_odd", f"{y}_i")}
                        {y}_i_a_column = Unsqueeze({y}_i_a, axis_last)
                        {y}_i_b_column = Unsqueeze({y}_i_b, axis_last)
                        {y}_columns = Concat<axis = -1>({y}_i_a_column, {y}_i_b_column)
                        {y}_rotary_shape = Shape({y}_rotary)
                        {y}_joined = Reshape<allowzero = 1>({y}_columns, {y}_rotary_shape) }},
                    else_branch = {y}_by_halves () => ({y}_halves) {{
                        {y}_low = Slice({y}_rotary, index_0, half_rotary, axis_last)
                        {y}_high = Slice({y}_rotary, half_rotary, rotary_dim, axis_last)
                        {pairs(f"{y}_low", f"{y}_high", f"{y}_h")}
                        {y}_halves = Concat<axis = -1>({y}_h_a, {y}_h_b) }}
                >
                {y}_whole = Concat<axis = -1>({y}_turned, {y}_rest) }}
        >"""


def _append_onnx(present: str, values: str, new: str, past: str, scale: str) -> str:
    """`present`, the cache, and `values`, float32 of what is cached in it; zeros where nothing is."""
    y = present
    return f"""{y}_past_numbers = Cast<to = {text.FLOAT}>({past})
        {y}_new_numbers = If(fp8_cache) <
            then_branch = {y}_new_e4m3 () => ({y}_codes) {{
                {y}_scale_row = Unsqueeze({scale}, axis_last)
                {y}_ratio = Div({new}, {y}_scale_row)
                {y}_magnitude = Abs({y}_ratio)
                {y}_bounded = Min({y}_magnitude, e4m3_largest)
                {text.round_to_e4m3(f"{y}_r", f"{y}_bounded")}
                {y}_eight = Constant<value = float {{8}}>()
                {y}_binades = Mul({y}_r_place, {y}_eight)
                {y}_number = Add({y}_binades, {y}_r_steps)
                {y}_nan_code = Constant<value = float {{127}}>()
                {y}_code = Where({y}_r_is_nan, {y}_nan_code, {y}_number)
                {y}_below = Less({y}_ratio, zero_f)
                {y}_top_bit = Constant<value = float {{128}}>()
                {y}_negative = Sub({y}_code, {y}_top_bit)
                {y}_codes = Where({y}_below, {y}_negative, {y}_code) }},
            else_branch = {y}_new_typed () => ({y}_rounded) {{
                {y}_typed = CastLike({new}, {past})
                {y}_rounded = Cast<to = {text.FLOAT}>({y}_typed) }}
        >
        {y}_none = Expand(zero_f, no_token_shape)
        {y}_padded = Concat<axis = 1>({y}_new_numbers, {y}_none)
        {y}_by_slot = GatherND<batch_dims = 1>({y}_padded, sources)
        {y}_placed = Transpose<perm = [0, 2, 1, 3]>({y}_by_slot)
        {y}_numbers = Where(is_new, {y}_placed, {y}_past_numbers)
        {present} = CastLike({y}_numbers, {past})
        {y}_used = Where(is_unused, zero_f, {y}_numbers)
        {values} = If(fp8_cache) <
            then_branch = {y}_bytes () => ({y}_decoded) {{
                {y}_signed = Cast<to = {text.INT32}>({y}_used)
                {y}_unsigned = Mod({y}_signed, byte_count)
                {y}_e4m3 = Gather(e4m3_bytes, {y}_unsigned)
                {y}_by_head = Unsqueeze({scale}, axes_of_cache)
                {y}_decoded = Mul({y}_e4m3, {y}_by_head) }},
            else_branch = {y}_plain () => ({y}_same) {{ {y}_same = Identity({y}_used) }}
        >"""


#: What ATTENTION_STATEMENTS use besides text.e4m3_constants() and the op's attributes.
ATTENTION_CONSTANTS = """
        e4m3_largest = Constant<value = float {448}>()
        scalar_0 = Constant<value = int64 {0}>()
        scalar_1 = Constant<value = int64 {1}>()
        scalar_2 = Constant<value = int64 {2}>()
        index_0 = Constant<value = int64[1] {0}>()
        index_1 = Constant<value = int64[1] {1}>()
        index_2 = Constant<value = int64[1] {2}>()
        axes_of_cache = Constant<value = int64[2] {1, 2}>()
        axis_token = Constant<value = int64[1] {2}>()
        axes_of_slots = Constant<value = int64[2] {1, 3}>()
"""

#: From the op's inputs to present_key, present_value and attended, its y.
ATTENTION_STATEMENTS = f"""
        no_rope = Equal(rope, scalar_0)
        interleaved = Equal(rope, scalar_2)
        batch = Shape<start = 0, end = 1>(qkv)
        new = Shape<start = 1, end = 2>(qkv)
        kv_heads = Shape<start = 1, end = 2>(past_key)
        capacity = Shape<start = 2, end = 3>(past_key)
        head_dim = Shape<start = 3, end = 4>(past_key)
        head_count = Unsqueeze(heads, index_0)
        group = Div(head_count, kv_heads)
        half_rotary = Shape<start = 1, end = 2>(cos)
        rotary_dim = Mul(half_rotary, index_2)
        new_scalar = Squeeze(new, index_0)
        capacity_scalar = Squeeze(capacity, index_0)

        long_length = Cast<to = {text.INT64}>(past_length)
        bounded_length = Min(long_length, capacity)
        length = Max(bounded_length, scalar_0)
        length_column = Unsqueeze(length, axis_last)
        token_numbers = Range(scalar_0, new_scalar, scalar_1)
        positions = Add(length_column, token_numbers)
        table_rows = Shape<start = 0, end = 1>(cos)
        last_row = Sub(table_rows, index_1)
        rows = Min(positions, last_row)
        cos_of_rows = Gather(cos, rows)
        sin_of_rows = Gather(sin, rows)
        cos_rows = Unsqueeze(cos_of_rows, axis_token)
        sin_rows = Unsqueeze(sin_of_rows, axis_token)

        qkv_float = Cast<to = {text.FLOAT}>(qkv)
        k_start = Mul(head_count, head_dim)
        kv_width = Mul(kv_heads, head_dim)
        v_start = Add(k_start, kv_width)
        v_end = Add(v_start, kv_width)
        q_flat = Slice(qkv_float, index_0, k_start, axis_last)
        k_flat = Slice(qkv_float, k_start, v_start, axis_last)
        v_flat = Slice(qkv_float, v_start, v_end, axis_last)
        q_shape = Concat<axis = 0>(batch, new, head_count, head_dim)
        kv_shape = Concat<axis = 0>(batch, new, kv_heads, head_dim)
        q_raw = Reshape<allowzero = 1>(q_flat, q_shape)
        k_raw = Reshape<allowzero = 1>(k_flat, kv_shape)
        v = Reshape<allowzero = 1>(v_flat, kv_shape)
        {_head_norm("q_normed", "q_raw", "q_norm_weight")}
        {_head_norm("k_normed", "k_raw", "k_norm_weight")}
        {_rope("q_rotated", "q_normed")}
        {_rope("k", "k_normed")}
        q_typed = CastLike(q_rotated, qkv)
        q = Cast<to = {text.FLOAT}>(q_typed)

        slots = Range(scalar_0, capacity_scalar, scalar_1)
        places = Sub(slots, length_column)
        from_first = GreaterOrEqual(places, scalar_0)
        to_last = Less(places, new_scalar)
        new_places = And(from_first, to_last)
        sources_or_none = Where(new_places, places, new_scalar)
        sources = Unsqueeze(sources_or_none, axis_last)
        is_new = Unsqueeze(new_places, axes_of_slots)
        beyond = GreaterOrEqual(places, new_scalar)
        is_unused = Unsqueeze(beyond, axes_of_slots)
        no_token_shape = Concat<axis = 0>(batch, index_1, kv_heads, head_dim)
        {_append_onnx("present_key", "keys", "k", "past_key", "key_scale")}
        {_append_onnx("present_value", "values", "v", "past_value", "value_scale")}

        group_rows = Mul(group, new)
        grouped_shape = Concat<axis = 0>(batch, kv_heads, group_rows, head_dim)
        scores_shape = Concat<axis = 0>(batch, head_count, new, capacity)
        grouped_scores_shape = Concat<axis = 0>(batch, kv_heads, group_rows, capacity)
        q_by_head = Transpose<perm = [0, 2, 1, 3]>(q)
        q_grouped = Reshape<allowzero = 1>(q_by_head, grouped_shape)
        keys_transposed = Transpose<perm = [0, 1, 3, 2]>(keys)
        grouped_products = MatMul(q_grouped, keys_transposed)
        products = Reshape<allowzero = 1>(grouped_products, scores_shape)
        head_size_float = Cast<to = {text.FLOAT}>(head_dim)
        head_size_root = Sqrt(head_size_float)
        head_scale = Reciprocal(head_size_root)
        no_scale = Equal(scale, zero_f)
        used_scale = Where(no_scale, head_scale, scale)
        scaled = Mul(products, used_scale)
        no_cap = Equal(softcap, zero_f)
        scores = If(no_cap) <
            then_branch = uncapped () => (scores_same) {{ scores_same = Identity(scaled) }},
            else_branch = capped () => (scores_capped) {{
                scores_over_cap = Div(scaled, softcap)
                scores_tanh = Tanh(scores_over_cap)
                scores_capped = Mul(scores_tanh, softcap) }}
        >
        position_column = Unsqueeze(positions, axis_last)
        up_to_own = LessOrEqual(slots, position_column)
        no_window = Equal(window, scalar_0)
        window_starts = Sub(position_column, window)
        in_window = Greater(slots, window_starts)
        near = Or(in_window, no_window)
        visible_3d = And(up_to_own, near)
        visible = Unsqueeze(visible_3d, index_1)
        lowest = Constant<value_float: float = {-text.FLOAT32_MAX!r}>()
        minus_infinity = Constant<value_float: float = -inf>()
        masked = Where(visible, scores, lowest)
        sink_values = Where(has_sinks, sinks, minus_infinity)
        sink_shape = Concat<axis = 0>(index_1, head_count, index_1, index_1)
        sink_heads = Reshape(sink_values, sink_shape)
        sink_column_shape = Concat<axis = 0>(batch, head_count, new, index_1)
        sink_column = Expand(sink_heads, sink_column_shape)
        with_sink = Concat<axis = -1>(masked, sink_column)
        with_sink_probabilities = Softmax<axis = -1>(with_sink)
        all_probabilities = Slice(with_sink_probabilities, index_0, capacity, axis_last)
        probabilities = Where(visible, all_probabilities, zero_f)
        grouped_probabilities = Reshape<allowzero = 1>(probabilities, grouped_scores_shape)
        grouped_sums = MatMul(grouped_probabilities, values)
        sums_shape = Concat<axis = 0>(batch, head_count, new, head_dim)
        sums = Reshape<allowzero = 1>(grouped_sums, sums_shape)
        by_token = Transpose<perm = [0, 2, 1, 3]>(sums)
        attended_shape = Concat<axis = 0>(batch, new, k_start)
        attended_float = Reshape<allowzero = 1>(by_token, attended_shape)
        attended = CastLike(attended_float, qkv)
"""

_BODY = f"""
        {text.e4m3_constants()}
        {text.attribute_int("heads")}
        {text.attribute_int("rope")}
        {text.attribute_int("window")}
        {text.attribute_flag("qk_norm")}
        {text.attribute_flag("has_sinks")}
        {text.attribute_flag("fp8_cache")}
        {text.attribute_float("epsilon")}
        {text.attribute_float("scale")}
        {text.attribute_float("softcap")}
        {ATTENTION_CONSTANTS}
        {ATTENTION_STATEMENTS}
        y = Identity(attended)
"""

CACHED_ATTENTION = OpDefinition(
    name="CachedAttention",
    doc="""New token t of a sequence is at position past_length + t. Queries and keys pass an RMSNorm per head (qk_norm
1) and a rotary embedding (rope 1: pairs (i, i + rotary_dim / 2); 2: pairs (2i, 2i + 1); 0: none); keys and
values are written to the caches at their positions, in place where past and present are bound to one
address. A token attends to the positions up to its own, of these to the last `window` (0: all): softmax of
softcap * tanh(scale * q k / softcap), or of scale * q k (softcap 0), with a sink's logit per head
(has_sinks 1) that has no value. Computed in float32 from queries in T and keys and values as cached. Tokens
at positions from the capacity on are not cached, and their y is not specified.""",
    inputs=(
        Formal("qkv", "T", "[batch, new, (heads + 2 kv_heads) head_dim]: all queries, then all keys, then all values"),
        Formal("past_key", "C", "[batch, kv_heads, capacity, head_dim] T, or with fp8_cache E4M3 bytes"),
        Formal("past_value", "C", "[batch, kv_heads, capacity, head_dim]"),
        Formal("past_length", "L", "[batch] tokens cached, 0 to capacity"),
        Formal(
            "cos", "tensor(float)", "[positions, rotary_dim / 2], scaled as the model has it; not read if rope is 0"
        ),
        Formal("sin", "tensor(float)", "[positions, rotary_dim / 2]"),
        Formal("q_norm_weight", "T", "[head_dim]; not read unless qk_norm is 1"),
        Formal("k_norm_weight", "T", "[head_dim]; not read unless qk_norm is 1"),
        Formal("sinks", "tensor(float)", "[heads]; not read unless has_sinks is 1"),
        Formal("key_scale", "tensor(float)", "[kv_heads] multipliers of E4M3 keys; not read unless fp8_cache is 1"),
        Formal("value_scale", "tensor(float)", "[kv_heads] multipliers of E4M3 values"),
    ),
    outputs=(
        Formal("y", "T", "[batch, new, heads head_dim]"),
        Formal("present_key", "C", "[batch, kv_heads, capacity, head_dim]"),
        Formal("present_value", "C", "[batch, kv_heads, capacity, head_dim]"),
    ),
    attributes={
        "heads": 1,
        "rope": ROPE_NONE,
        "qk_norm": 0,
        "has_sinks": 0,
        "fp8_cache": 0,
        "window": 0,
        "epsilon": 1e-6,
        "scale": 0.0,
        "softcap": 0.0,
    },
    body=_BODY,
    torch_reference=cached_attention,
    shape_rule=_shapes,
    ranges={"heads": (1, 65535), "rope": (ROPE_NONE, ROPE_INTERLEAVED), "window": (0, 2**31 - 1)},
    takes_no_tokens=True,
)
