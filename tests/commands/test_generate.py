"""Tests of `torchtitan generate`: sampling from scripted logits, streaming of text, and equality with transformers."""

import argparse
import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import checkpoint_plans, hf_parity, jobs, pool
from tests.support.pool import run_ranks
from tests.support.scripted_models import Scripted
from tests.support.tiny_decoders import LLAMA, QWEN3_MOE
from torchtitan import cli
from torchtitan.commands import generate
from torchtitan.config import manager
from torchtitan.core.random_draws import local_part
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.datasets.tokenizer.base import WINDOW_TOKENS, decode_stream
from torchtitan.datasets.tokenizer.byte_level import ByteTokenizer
from torchtitan.models import SIZES, kv_cache
from torchtitan.models.hf.config import GENERATION
from torchtitan.models.kv_cache import CachedDecoder
from torchtitan.models.llama import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.models.qwen3_moe.model import Qwen3MoE
from torchtitan.models.spec import MODELS
from torchtitan.process.ranks import likely_device, read_ranks
from torchtitan.training import inference_model

BYTES = ByteTokenizer()
TOKENIZERS = [
    "bytes",
    *(
        str(jobs.ROOT / "tests/assets/tokenizer" / name)
        for name in ("tiktoken.model", "sentencepiece.model", "tokenizer.json")
    ),
]


def random_model(seed: int = 0, vocab_size: int = 260) -> Scripted:
    return Scripted(torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed)))


def counting_model(vocab_size: int = 260) -> Scripted:
    """Return a model that strongly prefers the next token id."""
    return Scripted(100.0 * torch.eye(vocab_size).roll(1, dims=1))


def sample(model: Scripted, prompt: list[int], **options: object) -> list[int]:
    settings = dict(max_new_tokens=20, context=64, temperature=1.0, top_k=0, seed=0) | options
    return list(generate.sample(model, prompt, BYTES, **settings))


# Sampling


def test_temperature_0_takes_the_likeliest_of_the_tokenizers_tokens():
    model = random_model()
    with torch.no_grad():
        model.logits[:, 258:] = 50.0  # ids beyond the tokenizer's vocabulary
        model.logits[:, 257] = -50.0
    expected, last = [], 65
    for _ in range(20):
        last = int(model.logits[last, :258].argmax())
        expected.append(last)
    assert sample(model, [256, 65], temperature=0) == expected
    assert sample(model, [256, 65], temperature=0, seed=9, top_k=3) == expected


def test_sampling_depends_on_the_seed_alone():
    model = random_model()
    assert sample(model, [256], seed=1) == sample(model, [256], seed=1)
    assert sample(model, [256], seed=1) != sample(model, [256], seed=2)
    before = torch.random.get_rng_state()
    sample(model, [256])
    assert torch.equal(before, torch.random.get_rng_state())


def test_samples_follow_the_softmax():
    logits = torch.full((260, 260), -torch.inf)
    logits[:, 10], logits[:, 20] = 0.0, 1.0
    drawn = sample(Scripted(logits), [256], max_new_tokens=4000, context=1, temperature=2.0)
    expected = 1 / (1 + torch.exp(torch.tensor(-0.5)).item())  # 0.62, standard error 0.008
    assert drawn.count(10) + drawn.count(20) == 4000
    assert drawn.count(20) / 4000 == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize("top_k", [1, 3, 258, 10**9])
def test_top_k(top_k):
    model = random_model()
    for _ in range(3):
        ids = [256, *sample(model, [256], top_k=top_k, temperature=5.0)]
        for last, chosen in zip(ids, ids[1:], strict=False):
            better = (model.logits[last, :258] > model.logits[last, chosen]).sum()
            assert better < top_k


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.7])
def test_top_p_is_that_of_transformers(top_p):
    from transformers import TopPLogitsWarper

    model = random_model()
    for last in range(40):
        row = model.logits[last : last + 1, :258].detach()
        allowed = (TopPLogitsWarper(top_p)(None, row / 2.0)[0] > -torch.inf).nonzero().flatten().tolist()
        options = dict(top_p=top_p, temperature=2.0, max_new_tokens=1)
        drawn = {token for seed in range(20) for token in sample(model, [last], seed=seed, **options)}
        assert drawn <= {*allowed} and (len(allowed) > 1 or drawn == {*allowed} - {BYTES.eos_id})


@pytest.mark.parametrize("temperature", [1e-6, 1e-300])
def test_very_low_temperatures_are_greedy(temperature):
    model = random_model()
    assert sample(model, [256], temperature=temperature) == sample(model, [256], temperature=0)


def test_generation_ends_at_the_end_of_the_document():
    assert sample(counting_model(), [256, 250]) == [251, 252, 253, 254, 255, 256]  # without the end token, 257
    assert sample(counting_model(), [256, 256]) == []


def test_max_new_tokens_is_a_limit():
    assert sample(counting_model(), [0], max_new_tokens=3) == [1, 2, 3]


@pytest.mark.parametrize("prompt", [[256], [256, 1], list(range(10))])
def test_the_model_never_sees_more_than_the_context(prompt):
    model = counting_model()
    new = sample(model, prompt, context=4, max_new_tokens=6, temperature=0)
    everything = prompt + new
    ends = range(len(prompt), len(prompt) + len(model.inputs))
    assert model.inputs == [everything[max(0, end - 4) : end] for end in ends]


# Text


def stream_text(tokenizer, prompt: str, new: list[int]) -> list[str]:
    return list(decode_stream(iter(new), tokenizer.encode(prompt), tokenizer))


@pytest.mark.parametrize("path", TOKENIZERS)
@pytest.mark.parametrize("text", ["Grüße aus Köln: 你好 🙂🙂 end", "🙂", "x\n\n  indented"])
@pytest.mark.parametrize("prompt", ["", "The ", "äö"])
def test_streamed_pieces_are_complete_characters(path, text, prompt):
    tokenizer = build_tokenizer(path)
    new = tokenizer.encode(text)
    pieces = stream_text(tokenizer, prompt, new)
    ids = tokenizer.encode(prompt)
    assert "".join(pieces) == tokenizer.decode(ids + new)[len(tokenizer.decode(ids)) :]
    assert "\ufffd" not in "".join(pieces) and "" not in pieces


def test_incomplete_characters_are_held_back_and_invalid_bytes_shown():
    smile = list("🙂".encode())
    assert stream_text(BYTES, "a", smile[:3]) == []
    assert stream_text(BYTES, "a", smile) == ["🙂"]
    assert stream_text(BYTES, "a", [0xFF, ord("b")]) == ["\ufffdb"]
    assert stream_text(BYTES, "a", [*smile[:2], ord("b"), *smile]) == ["\ufffdb", "🙂"]
    noise = [0xFF] * 40 + smile[:3]  # at most as many bytes wait as a character has
    assert "".join(stream_text(BYTES, "a", [*noise, smile[3]])) == "\ufffd" * 40 + "🙂"
    assert "".join(stream_text(BYTES, "a", noise)) == "\ufffd" * 38


class CountingTokenizer(ByteTokenizer):
    def __init__(self):
        self.decoded = 0

    def decode(self, ids):
        self.decoded += len(ids)
        return super().decode(ids)


def test_streaming_takes_linear_time():
    tokenizer, new = CountingTokenizer(), list(("Grüße 你好 🙂 " * 200).encode())
    assert "".join(decode_stream(new, [], tokenizer)) == "Grüße 你好 🙂 " * 200
    assert tokenizer.decoded <= (2 * WINDOW_TOKENS + 1) * len(new)


@pytest.mark.parametrize("path", TOKENIZERS)
def test_pieces_of_a_text_longer_than_the_window_join_to_it(path):
    tokenizer, text = build_tokenizer(path), "  Über  9,000\n\tkm: 你好, 🙂🙂!\n" * 30
    new = tokenizer.encode(text)
    assert "".join(stream_text(tokenizer, "", new)) == tokenizer.decode(new)


# A checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Create the folder of a short run that saved a checkpoint and exported its weights in both formats."""
    folder = tmp_path_factory.mktemp("generate")
    texts = jobs.write_texts(folder / "data")
    for in_hf in (True, False):  # the second run resumes at its last step and only exports
        options = {"last_save_model_only": True, "last_save_in_hf": in_hf, "enable": True, "interval": 10}
        argv = jobs.arguments(folder / "run", texts, **{f"checkpoint__{k}": v for k, v in options.items()})
        run_ranks(1, jobs.train, argv)
    return folder / "run"


def run_generate(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert cli.main(["generate", *map(str, argv)]) == 0
    return capsys.readouterr().out


def test_text_equals_transformers_on_the_exported_weights(run, capsys):
    from transformers import LlamaForCausalLM

    ids = [BYTES.bos_id, *b"alpha be"]
    reference = LlamaForCausalLM.from_pretrained(run / "model_hf", dtype=torch.float32)
    with torch.no_grad():
        for _ in range(16):
            ids.append(int(reference(torch.tensor([ids])).logits[0, -1, : BYTES.vocab_size].argmax()))
    expected = BYTES.decode(ids[1:])
    argv = (run, "--prompt", "alpha be", "--temperature", 0, "--max_new_tokens", 16)
    assert run_generate(capsys, *argv) == expected + "\n"
    assert len(set(ids[9:])) > 1  # so that equality says something


def test_sampling_defaults_are_those_of_the_folder(run, tmp_path, capsys):
    """They are shown in one line. The command line wins, and what has no option here is named."""
    shutil.copytree(run / "model_hf", tmp_path / "hf")
    file = tmp_path / "hf" / GENERATION
    stored = json.loads(file.read_text()) if file.exists() else {}

    def generated(settings: dict[str, object], *argv: str) -> tuple[str, str]:
        file.write_text(json.dumps(stored | settings))
        assert cli.main(["generate", str(tmp_path / "hf"), "--prompt=alpha", "--max-new-tokens=12", *argv]) == 0
        text, log = capsys.readouterr()
        return text, "".join(line for line in log.splitlines() if line.startswith(GENERATION))

    warm = {"do_sample": True, "temperature": 5.0, "top_k": 3, "top_p": 0.9}
    options = ["--temperature=5", "--top-k=3", "--top-p=0.9"]
    text, line = generated(warm | {"repetition_penalty": 1.1, "min_p": None})
    shown = "temperature 5.0, top_k 3, top_p 0.9; not applied: repetition_penalty 1.1"
    assert line == f"{GENERATION}: {shown}" and (text, "") == generated({}, *options)
    assert generated({}, "--temperature=0")[0] != text  # so that equality says something
    assert generated(warm, "--temperature=0") == (
        generated({}, "--temperature=0")[0],
        f"{GENERATION}: top_k 3, top_p 0.9",
    )
    assert generated({"do_sample": False}) == (generated({}, "--temperature=0")[0], f"{GENERATION}: temperature 0")
    assert generated({"temperature": 5.0}) == generated({})  # as in transformers, which does not sample
    for settings, message in (
        ({"top_p": 2}, "top_p = 2; allowed: a number above 0, at most 1"),
        ({"top_k": 1.5}, "top_k = 1.5"),
    ):
        file.write_text(json.dumps(stored | {"do_sample": True} | settings))
        assert cli.main(["generate", str(tmp_path / "hf")]) == 2
        assert message in capsys.readouterr().err


def test_every_folder_with_the_weights_is_accepted(run, capsys, monkeypatch):
    arguments = ["--prompt", "alpha", "--temperature", "0", "--max_new_tokens", "8"]
    expected = run_generate(capsys, run, *arguments)
    folders = [run / "checkpoint", run / "checkpoint/step-00000020", run / "model"]
    assert {run_generate(capsys, folder, *arguments) for folder in folders} == {expected}
    monkeypatch.chdir(run / "checkpoint/step-00000020")
    assert run_generate(capsys, ".", *arguments) == expected


def test_the_newest_complete_step_is_loaded(run, tmp_path, capsys):
    home, _ = copy_run(run, tmp_path)
    cli.main(["generate", str(home), "--max_new_tokens", "1"])
    assert capsys.readouterr().err == "llama3 debugmodel, step-00000020\n"
    (home / "checkpoint/step-00000020/manifest.json").unlink()
    cli.main(["generate", str(home), "--max_new_tokens", "1"])
    assert capsys.readouterr().err == "llama3 debugmodel, step-00000010\n"


def test_the_speed_of_the_tokens_after_the_first_is_printed(monkeypatch, run, capsys):
    monkeypatch.setattr(generate.time, "perf_counter", iter((8.0, 9.0, 9.5, 10.0, 10.5)).__next__)
    cli.main(["generate", str(run), "--max_new_tokens", "5"])
    assert capsys.readouterr().err.endswith("\n5 tokens, after the first at 1.6 tokens/s\n")


def test_odd_prompts(run, capsys):
    assert run_generate(capsys, run, "--max_new_tokens", 5).count("\n") >= 1  # no prompt: a document's beginning
    long = "beta " * 40  # 200 tokens, the context has 32
    assert run_generate(capsys, run, "--prompt", long, "--max_new_tokens", 3).startswith(long)
    assert run_generate(capsys, run, "--prompt", "\udce4ä 🙂", "--max_new_tokens", 1).startswith("?ä 🙂")


def test_control_characters_of_the_model_are_replaced(run, capsys, monkeypatch):
    monkeypatch.setattr(generate, "sample", lambda *a, **k: iter(b"a\x1b[31m\x07\r\t\nb\x7f\xc2\x9b"))
    assert run_generate(capsys, run, "--prompt", ">") == ">a\ufffd[31m\ufffd\ufffd\t\nb\ufffd\ufffd\n"


def test_an_ascii_terminal_shows_question_marks(run):
    """Run the command in a process with ASCII output, as a user starts it."""
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan", "generate", str(run), "--prompt", "ä🙂", "--max_new_tokens", "2"],
        cwd=jobs.ROOT,
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(jobs.ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout[:2]) == (0, "??"), done.stderr


def save_under(folder: Path, plan: checkpoint_plans.Plan, args: LlamaArgs) -> None:
    job = checkpoint_plans.PlannedModel(plan, args).train()
    assert job.checkpointer(folder / "checkpoint").maybe_save(1, last=True)


PLANS = [{"dp_shard": 2}, {"tp": 2}, {"pp": 2, "stages": 2, "style": "v"}, {"dp_shard": 2, "tp": 2}, {"tp": 2, "pp": 2}]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_any_plan_is_loaded(run, tmp_path, capsys, tied):
    """One device loads checkpoints that several ranks wrote, with the job of several ranks."""
    overrides = dict(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=16, tied_embeddings=tied)
    args = dataclasses.replace(SIZES["llama3"]["debugmodel"], **overrides)
    texts = []
    for degrees in [{}, *PLANS]:
        plan, folder = checkpoint_plans.Plan(**degrees), tmp_path / str(degrees)
        folder.mkdir()
        config = manager.load(["--job.config_file", str(run / "config.toml")])
        parallelism = dataclasses.replace(
            config.parallelism, tensor_parallel_degree=plan.tp, pipeline_parallel_degree=plan.pp
        )
        model = dataclasses.replace(config.model, overrides=overrides)
        job = dataclasses.replace(config, parallelism=parallelism, model=model)
        (folder / "config.toml").write_text(manager.to_toml(job))
        if plan.world == 1:
            save_under(folder, plan, args)
        else:
            run_ranks(plan.world, save_under, folder, plan, args)
        loaded, _ = inference_model.load_model(*generate.find_checkpoint(folder, None), torch.device("cpu"))
        for name, parameter in checkpoint_plans.reference(args).named_parameters():
            assert torch.equal(loaded.get_parameter(name), parameter), (plan, name)
        texts.append(run_generate(capsys, folder, "--prompt", "al", "--max_new_tokens", 6))
    assert len(set(texts)) == 1, texts


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_folder_is_computed_with_in_its_stored_type(tmp_path, stored):
    args = dataclasses.replace(SIZES["llama3"]["debugmodel"], vocab_size=260)
    model = checkpoint_plans.reference(args)
    MODELS["llama3"].hf.save_hf(tmp_path, model.state_dict(), args, dtype=stored)
    options = argparse.Namespace(folder=str(tmp_path), config=None, best=False)
    for job_args, dtype in (([], stored), (["--training.dtype=float32"], torch.float32)):
        job, place = generate.find_decoder(options, ["--model.tokenizer_path=bytes", *job_args])
        loaded, _ = inference_model.load_model(job, place, torch.device("cpu"))
        for name, parameter in model.named_parameters():
            assert torch.equal(loaded.get_parameter(name), parameter.to(stored).to(dtype)), name


@torch.no_grad()
def test_single_tokens_in_bfloat16_do_without_onednn():
    """The prompt is computed with oneDNN, which is on again afterwards; logits equal a full forward's to rounding."""
    model = checkpoint_plans.reference(SIZES["llama3"]["debugmodel"]).bfloat16().eval()
    enabled = []
    model.register_forward_hook(lambda *_: enabled.append(torch.backends.mkldnn.set_flags()[0]))
    ids = torch.arange(3, 15)[None]
    expected = model(ids)[0, -1]
    reader = CachedDecoder(model)
    reader(ids[:, :-1])
    logits = reader(ids)[0, -1]
    assert enabled == [True, True, False] and torch.backends.mkldnn.set_flags()[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.02 * expected.abs().max().item())


def test_a_model_for_inference_activates_the_jobs_flash_attention(run, monkeypatch):
    calls, device = [], torch.device("cpu")
    monkeypatch.setattr(inference_model, "activate_flash_attention", lambda *arguments: calls.append(arguments))
    inference_model.load_model(*generate.find_checkpoint(run, None, ["--model.attention_backend=fa3"]), device)
    assert calls == [("fa3", device)]


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_wide_matrices_in_float32_are_stored_by_columns(monkeypatch, tied):
    monkeypatch.setattr(kv_cache, "TRANSPOSED_ROWS", 100)
    args = dataclasses.replace(SIZES["llama3"]["debugmodel"], tied_embeddings=tied)
    model = checkpoint_plans.reference(args).eval()
    before, ids = {name: p.clone() for name, p in model.named_parameters()}, torch.arange(3, 15)[None]
    expected = model(ids)[0, -1]
    kv_cache.store_for_single_rows(model)
    assert {name for name, p in model.named_parameters() if not p.is_contiguous()} == {
        name
        for name, p in before.items()
        if p.ndim == 2 and p.shape[0] >= p.shape[1] and (tied or not name.startswith("tok_"))
    }
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    reader = CachedDecoder(model)
    reader(ids[:, :-1])
    torch.testing.assert_close(reader(ids)[0, -1], expected, rtol=0, atol=1e-6 * expected.abs().max().item())
    in_bfloat16 = checkpoint_plans.reference(args).bfloat16()
    kv_cache.store_for_single_rows(in_bfloat16)
    assert all(p.is_contiguous() for p in in_bfloat16.parameters())


# Several devices


def test_two_ranks_generate_the_same_text(run, capsys):
    """Start the command with the prompt on stdin, as a user does, and compare with one device in this process.

    Python lists the imports of each process: on a CPU the command and one process for all ranks import torch.
    """
    arguments = ["--temperature=0", "--max_new_tokens=8"]
    command = [sys.executable, "-m", "torchtitan", "generate", str(run), "--prompt-file=-", *arguments, "--ranks=2"]
    environment = os.environ | {"PYTHONPATH": str(jobs.ROOT), "OMP_NUM_THREADS": "1", "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, input="alpha be", cwd=jobs.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == run_generate(capsys, run, "--prompt", "alpha be", *arguments) and done.stdout.startswith(
        "alpha be"
    )
    forks = sys.platform == "linux" and likely_device() == "cpu"
    imports = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert imports.count("torch") == (2 if forks else 3)


GREEDY = dict(max_new_tokens=8, context=64, temperature=0, top_k=0, seed=0)


def generate_over_ranks(folder: str, prompt: list[int]) -> tuple[list[int], int]:
    """Return the tokens, and the number of parameter elements that this rank holds."""
    job, path = generate.find_checkpoint(Path(folder), None, ["--model.tokenizer_path=bytes"])
    model = inference_model.load_model_over_ranks(job, path, read_ranks())
    tokens = list(
        generate.sample(CachedDecoder(model), prompt, BYTES, **GREEDY, agree=inference_model.broadcast_from_first)
    )
    return tokens, sum(local_part(parameter)[0].numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "name, family, args", [("llama3.1", Llama, LLAMA["llama3.1"]), ("qwen3_moe", Qwen3MoE, QWEN3_MOE["published"])]
)
def test_each_rank_holds_a_part_and_returns_all_tokens(name, family, args, tmp_path):
    """A dense model uses tensor parallel; a model with experts uses expert parallel and FSDP for the rest."""
    args = dataclasses.replace(args, vocab_size=260)
    model, prompt = hf_parity.build(family, args), [256, 1, 2, 3, 4]
    MODELS[name].hf.save_hf(tmp_path, model.state_dict(), args, dtype=torch.float32)
    expected = list(generate.sample(CachedDecoder(model), prompt, BYTES, **GREEDY))
    full_size = sum(parameter.numel() for parameter in model.parameters())
    for tokens, size in run_ranks(2, generate_over_ranks, str(tmp_path), prompt):
        assert tokens == expected and size < 0.7 * full_size


def test_ranks_that_do_not_divide_the_model_are_refused(run):
    with pytest.raises(pool.RankFailed, match="--ranks: given 3, which does not divide .*allowed: "):
        run_ranks(3, generate_over_ranks, str(run), [65])


# Mistakes of the user


def copy_run(run: Path, folder: Path) -> tuple[Path, Path]:
    """Copy the run, so that a test may damage it; return its folder and config.toml."""
    home = folder / "run"
    for file in run.rglob("*"):
        target = home / file.relative_to(run)
        if file.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    return home, home / "config.toml"


def refusal(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert cli.main(["generate", *map(str, argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


def test_a_folder_without_a_job_is_refused(tmp_path, capsys):
    error = refusal(capsys, tmp_path / "nothing")
    assert f"{tmp_path}/nothing: no such file or folder; give the dump_folder of a run, a checkpoint" in error
    (tmp_path / "empty").mkdir()
    error = refusal(capsys, tmp_path / "empty")
    assert "no job found" in error and str(tmp_path / "empty/config.toml") in error and "--config JOB.toml" in error
    assert f'{tmp_path}/job.toml" (no such file)' in refusal(capsys, tmp_path, "--config", tmp_path / "job.toml")


def test_config_names_the_job_of_a_folder_without_one(run, tmp_path, capsys):
    home, config = copy_run(run, tmp_path)
    job = config.rename(tmp_path / "job.toml")
    arguments = ["--max_new_tokens", "4"]
    assert "no job found" in refusal(capsys, home, *arguments)
    assert run_generate(capsys, home, "--config", job, *arguments) == run_generate(capsys, run, *arguments)


def test_a_folder_without_a_checkpoint_is_refused(run, tmp_path, capsys):
    (tmp_path / "config.toml").write_bytes((run / "config.toml").read_bytes())
    assert "no weights in it; give a checkpoint, a folder of them, an export" in refusal(capsys, tmp_path)
    (tmp_path / "checkpoint/step-00000003").mkdir(parents=True)
    error = refusal(capsys, tmp_path)
    assert "no complete checkpoint" in error and "step-00000003: it has no manifest.json" in error


def test_a_damaged_checkpoint_is_refused(run, tmp_path, capsys):
    home, _ = copy_run(run, tmp_path)
    (shard,) = (home / "checkpoint/step-00000020").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert "damaged" in refusal(capsys, home)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('flavor = "debugmodel"', 'flavor = "debug"', 'did you mean "debugmodel"?'),
        ("dim = 32", "dim = 33", "sizes that fit together"),
        ("vocab_size = 260", "vocab_size = 100", "at most the 100 tokens"),
        ('tokenizer_path = "bytes"', 'tokenizer_path = "gone.model"', "No such file"),
        ("steps = 20", "step = 20", "did you mean training.steps?"),
        ("n_layers = 4", "n_layers = 3", "layers.3"),
    ],
)
def test_a_job_that_does_not_fit_the_weights_is_refused(run, tmp_path, capsys, old, new, error):
    home, config = copy_run(run, tmp_path)
    assert config.read_text().count(old) == 1
    config.write_text(config.read_text().replace(old, new))
    assert error in refusal(capsys, home)


def test_an_hf_export_is_recognized_by_its_content(run, tmp_path, capsys):
    arguments = ["--prompt", "alpha", "--temperature", "0", "--max_new_tokens", "8"]
    export = shutil.copytree(run / "model_hf", tmp_path / "alone")
    assert run_generate(capsys, export, *arguments) == run_generate(capsys, run, *arguments)
    (export / "tokenizer.json").unlink()
    assert "the folder has no tokenizer" in refusal(capsys, export)
    assert run_generate(capsys, export, *arguments, "--model.tokenizer_path=bytes") == run_generate(
        capsys, run, *arguments
    )


def test_the_prompt_may_come_from_a_file_or_stdin(run, tmp_path, capsys, monkeypatch):
    arguments = ["--temperature", "0", "--max_new_tokens", "8"]
    text = "alpha\nbeta äö\n"
    (tmp_path / "prompt.txt").write_text(text, encoding="utf-8")
    expected = run_generate(capsys, run, *arguments, "--prompt", text)
    assert run_generate(capsys, run, *arguments, "--prompt-file", tmp_path / "prompt.txt") == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert run_generate(capsys, run, *arguments, "--prompt-file", "-") == expected
    missing = tmp_path / "no"
    assert f"--prompt-file {missing} cannot be read (No such" in refusal(capsys, run, "--prompt-file", missing)
    (tmp_path / "prompt.txt").write_bytes(b"\xff")
    assert "can't decode byte 0xff" in refusal(capsys, run, "--prompt-file", tmp_path / "prompt.txt")


def bad_arguments() -> Iterator[tuple[list[str], str]]:
    yield [], "the following arguments are required: folder"
    yield ["x", "--max_new_tokens", "0"], "--max-new-tokens: given '0'; allowed: a whole number >= 1"
    yield ["x", "--temperature", "-0.1"], "--temperature: given '-0.1'; allowed: a number >= 0"
    yield ["x", "--temperature", "nan"], "--temperature: given 'nan'"
    yield ["x", "--temperature", "inf"], "--temperature: given 'inf'"
    yield ["x", "--top_p", "-1"], "--top-p: given '-1'; allowed: a number >= 0"
    yield ["x", "--top_k", "-1"], "--top-k: given '-1'; allowed: a whole number >= 0"
    yield ["x", "--top_k", "many"], "--top-k: given 'many'"
    yield ["x", "--seed", "-1"], "--seed: given '-1'"
    yield ["x", "--seed", str(2**64)], "--seed: given"
    yield ["x", "--promt", "y"], "no option --promt; did you mean --prompt?"
    yield ["x", "y"], "one argument too many: y"
    yield ["x", "--prompt", "a", "--prompt-file", "b"], "--prompt and --prompt-file: give one of them"


@pytest.mark.parametrize(("argv", "error"), bad_arguments(), ids=lambda value: " ".join(value) or "none")
def test_bad_arguments_are_refused(argv, error, capsys):
    assert cli.main(["generate", *argv]) == 2
    assert error in capsys.readouterr().err


def test_help(capsys):
    assert cli.main(["generate", "--help"]) == 0
    assert "--prompt" in capsys.readouterr().out
