"""Decoders of several ranks: a process for each, or all in one graph, generate what the whole model does."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import onnx
import pytest
import torch
from generated_ids import generated
from parallel_models import DENSE, exported_ranks, saved

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.accuracy.decoding import compare_decoding
from trt_nvfp4.builder.bench.ranks import bench_ranks
from trt_nvfp4.builder.bench.subject import Request
from trt_nvfp4.builder.bench.timing import CudaDevice
from trt_nvfp4.builder.cli import console
from trt_nvfp4.builder.errors import BuilderError
from trt_nvfp4.builder.generate import Generator
from trt_nvfp4.builder.generate.ranks_runner import RanksRunner, open_ranks
from trt_nvfp4.builder.parallel.launched import Launched
from trt_nvfp4.builder.parallel.manifest import FILE, RANK, RankFolder, note
from trt_nvfp4.builder.terminal.progress import Silent

pytest.importorskip("transformers")
PROMPTS = [[5, 17, 60, 3], [9, 8]]
TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RankFolder:
    made = tmp_path_factory.mktemp("ranks")
    saved("Llama", {**DENSE, "num_hidden_layers": 1}, made / "model")
    return exported_ranks(made / "model", made / "out", 2, capacity=24, batch=2)


@pytest.fixture(scope="module")
def expected(folder: RankFolder) -> list[list[int]]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder.folder.parent / "model").eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        for _ in range(TOKENS):
            with torch.no_grad():
                ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


def test_in_one_process(folder: RankFolder, expected: list[list[int]]) -> None:
    """As commands open it, by ONNX Runtime: its tokens are the whole model's."""
    with Generator(folder.folder, runner="onnxruntime") as generator:
        result = generator.generate(PROMPTS, max_new_tokens=TOKENS, stop=[])
    assert [generation.token_ids for generation in result.generations] == expected
    assert "2 ranks in one process" in result.runs_on


@pytest.mark.slow
def test_a_process_for_each(folder: RankFolder, expected: list[list[int]]) -> None:
    """Sums by gloo, on the CPU; then one rank is killed between two steps."""
    runner = RanksRunner(folder, "torch", on_gpus=False)
    assert generated(runner, PROMPTS, TOKENS) == expected
    assert generated(runner, PROMPTS, TOKENS) == expected  # over caches that were used
    process = runner._ranks._ranks[1][0]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(BuilderError, match=r"rank 1 of 2 was killed by SIGKILL\nThe other ranks were ended") as error:
        generated(runner, PROMPTS, TOKENS)
    assert error.value.exit_code == errors.BUILD_FAILED
    assert not any(process.is_alive() for process, _ in runner._ranks._ranks)
    runner.close()


@pytest.mark.slow
def test_processes_that_torchrun_started(folder: RankFolder, expected: list[list[int]]) -> None:
    """Each runs its own rank, and all have the same tokens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    script = (
        "import sys\nfrom trt_nvfp4.builder.generate import Generator\n"
        f"with Generator({str(folder.folder)!r}, runner='torch') as generator:\n"
        f"    result = generator.generate({PROMPTS}, max_new_tokens={TOKENS}, stop=[])\n"
        "print([each.token_ids for each in result.generations])\n"
    )
    started = []
    for rank in range(2):
        named = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **{name: str(value) for name, value in named.items()}}
        command = [sys.executable, "-c", script]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    for process in started:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        assert printed.strip() == str(expected)


@pytest.mark.gpu
def test_on_two_gpus(folder: RankFolder, expected: list[list[int]]) -> None:
    """Sums by NCCL, inside the CUDA graph of a decode step."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with ExitStack() as made:
        runner = open_ranks(folder.folder, made)
        made.callback(runner.close)
        assert "2 ranks" in runner.name
        assert generated(runner, PROMPTS, TOKENS) == expected


def test_ranks_against_the_whole_model(folder: RankFolder) -> None:
    if torch.cuda.is_available():
        pytest.skip("runs ranks in one process where there is no GPU")
    found = compare_decoding(folder.folder.parent / "out" / "whole.onnx", folder.folder, 4)
    assert found.kl < 1e-9
    assert found.top1 == 1.0


def test_more_ranks_than_gpus(folder: RankFolder) -> None:
    if torch.cuda.device_count() >= 2:
        pytest.skip("this machine has enough")
    with ExitStack() as made, pytest.raises(BuilderError, match="2 ranks need 2 GPUs") as error:
        open_ranks(folder.folder, made, "torch")
    assert error.value.exit_code == errors.UNAVAILABLE


def copied(folder: RankFolder, to: Path) -> RankFolder:
    for file in folder.folder.glob("rank*.onnx"):
        (to / file.name).write_bytes(file.read_bytes())
    (to / FILE).write_bytes((folder.folder / FILE).read_bytes())
    return RankFolder.read(to)


def changed(path: Path, key: str, value: str) -> None:
    proto = onnx.load(path)
    next(entry for entry in proto.metadata_props if entry.key == key).value = value
    onnx.save(proto, path)


def test_ranks_that_do_not_fit(folder: RankFolder, tmp_path: Path) -> None:
    own = copied(folder, tmp_path)
    second = own.model(1)
    kept = second.read_bytes()
    second.write_bytes(own.model(0).read_bytes())
    with pytest.raises(BuilderError, match="is rank 0 of 2, expected rank 1 of 2"):
        own.models()
    second.write_bytes(kept)
    changed(second, RANK, note(1, 2, "another"))
    with pytest.raises(BuilderError, match=r"does not fit rank0\.rewritten\.onnx: the models differ"):
        own.models()
    changed(second, RANK, "[")
    with pytest.raises(BuilderError, match="not a rank of a split language model"):
        own.models()
    second.write_bytes(b"no model")
    with pytest.raises(BuilderError, match="not an ONNX file"):
        own.models()
    second.unlink()
    with pytest.raises(BuilderError, match="the rewritten model of rank 1 is missing") as error:
        own.models()
    assert error.value.exit_code == errors.MODEL_AT_FAULT


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"tp": 1}', '{"format": 1, "tp": "2", "ep": 1}', '{"format": 1, "tp": true, "ep": 1}']
)
def test_a_manifest_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with ExitStack() as made, pytest.raises(BuilderError, match="no manifest of ranks") as error:
        open_ranks(tmp_path, made)
    assert error.value.exit_code == errors.MODEL_AT_FAULT


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, Launched(1, 4, 1)),
        (
            {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            Launched(5, 8, 1),
        ),
        ({"PMI_RANK": "2", "PMI_SIZE": "3"}, Launched(2, 3, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "0"}, None),
    ],
)
def test_what_started_a_process(
    variables: dict[str, str], rank: Launched | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI_", "RANK", "WORLD_SIZE")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Launched.found() == rank


def test_a_group_of_the_users_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert not Launched(0, 2, 0).join(on_gpu=False)


def test_another_number_of_processes(folder: RankFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with ExitStack() as made, pytest.raises(BuilderError, match="holds 2 ranks, and 4 processes were started"):
        open_ranks(folder.folder, made, "torch")
    with ExitStack() as made, pytest.raises(BuilderError, match="start it without torchrun"):
        open_ranks(folder.folder, made, "onnxruntime")
    monkeypatch.setenv("WORLD_SIZE", "some")
    with ExitStack() as made, pytest.raises(BuilderError, match="RANK=0, WORLD_SIZE=some"):
        open_ranks(folder.folder, made, "torch")


def test_who_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank of a folder of ranks; a process with a model of its own is not, nor are later calls."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with console.failures(False, False, tmp_path):
        assert not console.output.quiet
    (tmp_path / FILE).write_text("{}")
    with console.failures(False, False, tmp_path):
        assert console.output.quiet
        assert console.status.quiet
    assert not console.output.quiet
    assert not console.status.quiet


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_engines_are_not_benched_without_gpus(tmp_path: Path) -> None:
    RankFolder(tmp_path, "h200", 2).save()
    with pytest.raises(BuilderError, match=r"^--mode engine: 2 ranks need 2 GPUs, and torch sees none here$") as error:
        bench_ranks(Request(tmp_path, mode="engine"), Silent(), CudaDevice)
    assert error.value.exit_code == errors.UNAVAILABLE
