"""What launch choices promise whatever the shape and the GPU: workspaces that were sized without knowing the GPU
suffice, and shared memory fits. Speed is the benchmarks' to show."""

import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trt_nvfp4.plugins.compile.library import ROOT
from trt_nvfp4.plugins.compile.toolchain import ToolchainError, find_host_compiler

Ask = Callable[[str, list[list[int]]], list[list[int]]]
MAX_SPLITS, MAX_SPLIT_TILES, MAX_STAGES = 16, 2048, 5
MAX_SPLIT_ROWS = 65536
#: (SMs, bytes of shared memory that a block may have): A100, L40S, H200, Thor, B200, RTX PRO 6000, GB10.
GPUS = [(108, 166912), (142, 101376), (132, 232448), (20, 232448), (148, 232448), (188, 101376), (48, 101376)]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    try:
        compiler = find_host_compiler(platform.machine())
    except ToolchainError as error:
        pytest.skip(str(error))
    probe = tmp_path_factory.mktemp("heuristics") / "probe"
    source = Path(__file__).with_name("heuristics_probe.cpp")
    subprocess.run(
        [compiler, "-std=c++17", "-O1", f"-I{ROOT}", f"-I{ROOT / 'kernels'}", source, "-o", probe], check=True
    )

    def chosen(kind: str, cases: list[list[int]]) -> list[list[int]]:
        lines = "".join(f"{kind} {' '.join(map(str, case))}\n" for case in cases)
        printed = subprocess.run([probe], input=lines, capture_output=True, text=True, check=True).stdout
        return [[int(word) for word in line.split()] for line in printed.splitlines()]

    return chosen


def test_w4a16(ask: Ask, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cases = []
    for _ in range(3000):
        gpu = GPUS[rng.integers(len(GPUS))]
        m = int(rng.integers(1, 65))
        tiles, chunks = (int(2 ** rng.uniform(0, bits)) for bits in (11, 8))
        chunk = 512 * int(np.ceil(m / 8)) * 8  # a chunk of 256 activations in 16 bits
        cases.append([tiles, chunks, m, 8 * 4608, chunk, 1024, *gpu, *(int(flag) for flag in rng.integers(2, size=2))])
    split_at_all = 0
    for case, (capacity, groups, splits, panel, stages, used) in zip(cases, ask("w4a16", cases), strict=True):
        tiles, chunks, _, stage, chunk, fixed, sms, shared, cooperative, whole = case
        if capacity == 0:
            assert fixed + stage + chunk > shared
            continue
        assert 1 <= groups <= tiles
        # A group has at most a tile per warp; where a warp may not have parts of two, as many as divide the warps.
        assert -(-tiles // groups) <= 8
        assert not whole or (tiles // groups in (1, 2, 4, 8) and tiles % groups == 0)
        assert 1 <= splits <= min(chunks, MAX_SPLITS)
        # Partial sums are sized for this many, and blocks that wait for each other must be resident at once.
        assert splits == 1 or (cooperative and tiles * splits <= min(MAX_SPLIT_TILES, 8 * sms))
        assert 1 <= stages <= MAX_STAGES
        assert 1 <= panel <= capacity
        assert used == panel * chunk + stages * stage <= shared - fixed
        split_at_all += splits > 1
    assert split_at_all > 100


def test_w4a16_fills_the_gpu_with_few_tiles(ask: Ask) -> None:
    """A tile per warp leaves most SMs idle: K is shared, over warps and over blocks."""
    for tiles in (8, 32, 128, 624, 896):
        case = [tiles, 64, 1, 8 * 4608, 4096, 1024, 132, 232448, 1, 0]
        ((_, groups, splits, *_),) = ask("w4a16", [case])
        assert groups * splits > (0.4 if tiles < 128 else 0.9) * 132


def test_sm90(ask: Ask, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cases = [
        [int(2 ** rng.uniform(0, 16)), int(2 ** rng.uniform(0, 8)), int(rng.integers(1, 3)), int(rng.integers(1, 67))]
        for _ in range(3000)
    ]
    for (rows, chunks, cluster, _), (splits, tasks, padded) in zip(cases, ask("sm90", cases), strict=True):
        assert 1 <= splits <= min(chunks, MAX_SPLITS)
        assert splits == 1 or padded * splits <= MAX_SPLIT_ROWS
        assert padded >= rows
        assert padded % (256 * cluster) == 0
        assert tasks == padded // (256 * cluster) * splits


def test_sm90_takes_an_mlp_where_it_was_found_ahead(ask: Ask) -> None:
    """H200, benchmarks/results/kernels/crossovers_mlp.json: rows of up, the width of x, the most tokens that the other
    kernel keeps, and the fewest that this one takes."""
    both = ((34816, 5120, 4, 5), (17408, 2048, 1, 2), (17408, 4096, 4, 5), (16384, 4096, 4, 5), (16384, 3072, 4, 5))
    both += ((11264, 2048, 3, 4), (9728, 4096, 7, 8))
    cases = [(*row, norm) for row in both for norm in (0, 1)]
    cases += [(57344, 8192, 1, 2, 1), (22016, 4096, 1, 2, 1), (8192, 4096, 15, 16, 0), (8192, 4096, 12, 13, 1)]
    cases += [(8192, 2048, 15, 16, 0), (8192, 2048, 5, 6, 1), (6144, 3072, 15, 16, 0), (6144, 3072, 12, 13, 1)]
    narrow = ((3072, 384), (3072, 768), (8192, 1024), (16384, 1024), (6144, 1536), (17920, 1536))
    cases += [
        (*sizes, *limits, norm)
        for sizes, limits in [*((n, (1, 2)) for n in narrow), ((4096, 4096), (19, 20))]
        for norm in (0, 1)
    ]
    for up_rows, hidden, other, this, norm in cases:
        sizes = [up_rows, hidden, norm, 132]
        assert ask("sm90_layers", [[other, *sizes], [this, *sizes]]) == [[0], [1]]
    always = ((32768, 2048, 0), (32768, 2048, 1), (57344, 8192, 0), (22016, 4096, 0))
    assert ask("sm90_layers", [[1, *sizes, 132] for sizes in always]) == [[1]] * 4


def test_sm90_takes_a_linear_where_it_was_measured_ahead(ask: Ask) -> None:
    """H200, benchmarks/notes: K, the most tokens that the other kernel keeps, and the fewest that this one takes."""
    fp16 = ((2048, 8, 9), (4096, 8, 9), (6144, 3, 4), (6656, 3, 4), (8192, 3, 4), (11008, 3, 4))
    bf16 = ((2048, 6, 7), (3072, 4, 5), (4096, 4, 5), (6144, 2, 3), (8192, 2, 3), (11008, 2, 3))
    for k, other, this, dtype in [(*row, 0) for row in fp16] + [(*row, 1) for row in bf16]:
        assert ask("sm90_linear", [[other, 4096, k, dtype], [this, 4096, k, dtype]]) == [[0], [1]]
    # Of few outputs and a long K (H100, benchmarks/notes): m, n, k.
    other_ahead = ((8, 512, 8192), (16, 512, 14336), (8, 1024, 11008), (4, 1024, 24576))
    this_ahead = ((32, 512, 8192), (16, 2048, 11008), (16, 512, 4096), (64, 1024, 14336))
    assert ask("sm90_linear", [[*case, 0] for case in (*other_ahead, *this_ahead)]) == [[0]] * 4 + [[1]] * 4


def test_small_linears_keep_few_copies_under_way(ask: Ask) -> None:
    """H200, benchmarks/notes: weights of linears, by what was faster at most counts of tokens up to 6."""
    few, many = (4096 * 4096, 7168 * 2048, 11008 * 4096), (19968 * 6656, 28672 * 8192)
    cases = [[weights * 9 // 16 // 132] for weights in (*few, *many)]
    assert ask("w4a16_in_flight", cases) == [[1]] * 3 + [[0]] * 2


def small_linear(m: int, n: int, k: int, sms: int, shared: int, cluster: int) -> list[int]:
    """What the probe is asked of a small linear with FP16 activations."""
    places = m if m <= 4 else 8 if m <= 8 else 16
    chunk = 528 if m == 1 else 512 * places
    sent = 0 if cluster == 1 else 128 * max(places, 8) + 8
    return [-(-n // 128) * 4, m * k, -(-k // 256), cluster, 8 * 4608, chunk, 640 + sent, sms, shared]


def test_small_linears_where_they_were_measured_ahead(ask: Ask) -> None:
    """H100, benchmarks/results/kernels/crossovers_small_h100.json; what fell behind did so when it was forced."""
    ahead = [(1, 8192, 4096), (4, 8192, 4096), (8, 8192, 4096), (1, 8448, 1024), (16, 8448, 1024), (16, 8192, 2048)]
    ahead += [(16, 4096, 5632), (9, 4096, 6144), (8, 4096, 8192), (1, 128, 8192), (8, 128, 8192), (16, 512, 5632)]
    ahead += [(1, 4096, 14336), (4, 4096, 14336), (6, 3072, 14336), (8, 4096, 11008)]
    in_turns = [(1, 9216, 3072), (1, 16384, 1024), (1, 11008, 4096), (1, 5120, 5120)]
    few_and_long = [(8, 512, 14336), (16, 128, 8192), (1, 1024, 24576), (8, 1024, 19456)]
    no_room = [(9, 8192, 4096), (9, 4096, 8192), (16, 4096, 6144), (8, 4096, 14336)]
    of = (*ahead, *in_turns, *few_and_long, *no_room)
    clusters = [cluster for (cluster,) in ask("w4a16_small_cluster", [[9, m, k] for m, _, k in of])]
    cases = [small_linear(*case, 132, 232448, cluster) for case, cluster in zip(of, clusters, strict=True)]
    taken = [fits for fits, *_ in ask("w4a16_small", cases)]
    assert taken == [1] * len(ahead) + [0] * (len(of) - len(ahead))


def test_clusters_of_small_linears_where_they_were_measured_ahead(ask: Ask) -> None:
    """H100, benchmarks/notes: m and k."""
    pairs = [(5, 4096), (8, 2592), (16, 1536), (16, 2560), (4, 14336)]
    alone = [(8, 2560), (16, 1024), (4, 4096), (3, 8192), (2, 14336)]
    assert ask("w4a16_small_cluster", [[9, *case] for case in (*pairs, *alone)]) == [[2]] * 5 + [[1]] * 5


def test_clusters_of_small_linears_are_for_gpus_that_have_them(ask: Ask) -> None:
    """Ampere and Ada cannot launch them, whatever else the library was compiled for; Thor and SM120 gain nothing."""
    majors = [8, 9, 10, 11, 12]
    assert ask("w4a16_small_cluster", [[major, 8, 8192] for major in majors]) == [[1], [2], [2], [1], [1]]


def test_small_linears_find_room_at_once(ask: Ask, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cases = []
    for _ in range(2000):
        sms, shared = GPUS[rng.integers(len(GPUS))]
        m, cluster = int(rng.integers(1, 17)), int(rng.integers(1, 3))
        # Any number of rows, or about as many as SMs have at once.
        n = int(32 * sms * rng.uniform(0.6, 1.1) if rng.integers(2) else 2 ** rng.uniform(3, 15))
        cases.append(small_linear(m, n, 32 * int(2 ** rng.uniform(0, 10)), sms, shared, cluster))
    taken = refilled = 0
    for case, (fits, steps, stages, used) in zip(cases, ask("w4a16_small", cases), strict=True):
        tiles, values, chunks, cluster, _, _, fixed, sms, shared = case
        # Of the warps that have one of the cluster's tiles in both blocks, each has its share of the chunks.
        assert 8 * (steps - 1) < -(-chunks // cluster) * cluster <= 8 * steps
        if not fits:
            continue
        taken += 1
        blocks = -(-tiles // sms)
        assert blocks <= 2
        assert values <= 90 << 10
        assert 1 <= stages <= min(steps, MAX_STAGES)
        assert used + fixed <= shared
        assert blocks * (used + fixed + 1024) <= shared + 1024
        if stages < steps:
            refilled += 1
            assert stages >= 3
            assert 3 * tiles >= 2 * sms
    assert 0 < refilled < taken < len(cases)


def test_under_way_is_what_memory_brings(ask: Ask) -> None:
    """Of an MLP the stages of each of four warps, and slots of SM90's kernel; of a small linear the stages. H200 and
    H100 as measured (benchmarks/notes), others by bandwidth an SM."""
    h200, h100, unknown = [132, 4917], [132, 3352], [132, 0]  # SMs, GB/s
    b200, a100, thor, rtx_5090, spark = [148, 8000], [108, 2039], [20, 273], [170, 1792], [48, 273]
    h100_pcie, h20 = [114, 2039], [78, 4023]
    assert ask("in_flight", [h200, h100, unknown]) == [[3, 3, 2], [2, 2, 2], [3, 3, 3]]
    assert [stages for stages, *_ in ask("in_flight", [b200, a100, thor, rtx_5090, spark])] == [4, 2, 1, 1, 1]
    assert [slots for _, slots, _ in ask("in_flight", [h100_pcie, h20])] == [2, 4]


def test_moe_jobs_as_wide_as_was_measured_fastest(ask: Ask) -> None:
    """H200, benchmarks/notes: columns of eight pairs by tokens, top-k, experts and chunks of K."""
    qwen3, mixtral, deepseek = (8, 128, 8), (2, 8, 56), (8, 256, 28)
    cases = [[tokens, *qwen3] for tokens in (8, 12, 64, 96)]
    cases += [[tokens, *model] for model in (mixtral, deepseek) for tokens in (8, 12, 64)]
    assert ask("moe_columns", cases) == [[n] for n in (1, 1, 1, 4, 1, 4, 4, 1, 4, 4)]


def test_sm90_takes_a_mixture_where_it_was_measured_ahead(ask: Ask) -> None:
    """H200, benchmarks/notes: jobs of random routing times tiles of gate and up, in most models with so many."""
    other, this = (16, 32), (48, 56, 64, 77, 84, 92, 96, 128, 144, 180, 224, 312, 392)
    assert ask("sm90_mixture", [[tiles, 132] for tiles in (*other, *this)]) == [[0]] * 2 + [[1]] * 13


def test_blocks_share_tiles_where_that_was_measured_ahead(ask: Ask) -> None:
    even = ((1, 48), (1, 77), (1, 128), (1, 144), (2, 120), (2, 188), (4, 174), (4, 185))
    whole = ((1, 224), (2, 268), (4, 212), (8, 312), (9, 100))
    assert ask("sm90_even_shares", [[*case, 132] for case in (*even, *whole)]) == [[1]] * 8 + [[0]] * 5


def test_jobs_are_wide_where_that_was_measured_ahead(ask: Ask) -> None:
    """H200, benchmarks/notes: by pairs of an expert."""
    by_pairs = {10: 24, 14: 24, 15: 32, 16: 32, 20: 32, 27: 32, 28: 64, 32: 64, 64: 64}
    assert ask("sm90_job_tokens", [[pairs] for pairs in by_pairs]) == [[width] for width in by_pairs.values()]


def test_parts_of_down(ask: Ask, seed: int) -> None:
    """No more where SMs are busy, never shorter than is worth a task, and no more on fewer SMs: what sizes the
    workspace holds for all GPUs."""
    rng = np.random.default_rng(seed)
    cases = [[int(rng.integers(1, 3000)), int(rng.integers(1, 200)), int(rng.integers(1, 145))] for _ in range(3000)]
    most = ask("sm90_mixture_splits", [[tiles, chunks, 144] for tiles, chunks, _ in cases])
    for (tiles, chunks, sms), (splits,), (bound,) in zip(cases, ask("sm90_mixture_splits", cases), most, strict=True):
        assert 1 <= splits <= min(16, bound)
        assert splits == 1 or (chunks // splits >= 4 and tiles * (splits - 1) < 6 * sms)


def test_parts_of_down_in_rounds(ask: Ask, seed: int) -> None:
    """None takes less time, by rounds of tasks that take their chunks and 0.85 of one; the fewest of equals."""
    assert ask("sm90_even_splits", [[252, 8, 132], [64, 3, 132], [40, 32, 132], [1, 90, 132]]) == [[1], [1], [3], [15]]
    rng = np.random.default_rng(seed)
    cases = [[int(rng.integers(1, 400)), int(rng.integers(1, 100)), int(rng.integers(1, 145))] for _ in range(300)]
    for (tiles, chunks, sms), (splits,) in zip(cases, ask("sm90_even_splits", cases), strict=True):
        parts = range(1, max(1, min(chunks // 4, 16)) + 1)
        assert splits == 1 + int(np.argmin([-(-tiles * n // sms) * (-(-chunks // n) + 0.85) for n in parts]))


def test_moe_memory(ask: Ask, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cases = []
    for _ in range(3000):
        least = int(rng.integers(1, 60)) << 10
        cases.append([int(rng.integers(1, 100)) << 10, least, 8 * 4608, 2048, GPUS[rng.integers(len(GPUS))][1]])
    for (wanted, least, stage, fixed, shared), (stages, panel) in zip(cases, ask("moe", cases), strict=True):
        if stages == 0:
            assert fixed + stage + least > shared
            continue
        assert 1 <= stages <= MAX_STAGES
        assert panel >= least
        assert stages * stage + panel + fixed <= shared
        if stages > 3:  # more stages only beside all activations that are wanted
            assert panel >= wanted


def test_divisor(ask: Ask, seed: int) -> None:
    """Rounds down wherever the product is below 2^30, around multiples too."""
    rng = np.random.default_rng(seed)
    divisors = [1, 2, 3, 7, 132, 448, 32768, *(int(2**x) for x in rng.uniform(0, 29, 500))]
    cases = []
    for divisor in divisors:
        most = (2**30 - 1) // divisor
        multiple = int(rng.integers(0, most // divisor + 1)) * divisor
        cases += [[n, divisor] for n in (0, multiple, max(multiple - 1, 0), int(rng.integers(0, most + 1)), most)]
    assert ask("divisor", cases) == [[n // divisor] for n, divisor in cases]


def test_tickets_that_a_divisor_divides(ask: Ask) -> None:
    """The last of a job's tickets, times the tasks of a job, is below 2^30."""
    cases = [[1024, 1024], [1025, 1024], [1, 32768], [2, 32768], [1707, 793], [1708, 793]]
    assert ask("sm90_tickets", cases) == [[(jobs * tasks - 1) * tasks < 2**30] for jobs, tasks in cases]
