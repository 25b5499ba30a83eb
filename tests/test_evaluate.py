"""Loss by the place of a token in its document: against losses taken one by one, and of caches of several sizes."""

import json
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from tests.support.hf_parity import build
from tests.support.jobs import arguments, train, write_texts
from tests.support.pool import run_ranks
from torchtitan import cli
from torchtitan.build import data as build_data
from torchtitan.build.parts import dims
from torchtitan.commands.evaluate import check_caches
from torchtitan.commands.job_of import job_of
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.datasets.tokenizer.byte_level import ByteTokenizer
from torchtitan.models.llama import LlamaArgs
from torchtitan.models.llama.model import HF, Llama

ARGS = LlamaArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=16, max_seq_len=128)
TEXTS = ["a document of some length, " * 12, "short", "another one " * 5, "x"]
SEQ_LEN = 8


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    HF.save_hf(folder / "model", build(Llama, ARGS).state_dict(), ARGS)
    return folder


def words(home, *more):
    data = [f"--validation.dataset_path={home / 'texts.jsonl'}", "--validation.dataset=text"]
    return [*data, "--model.tokenizer_path=bytes", f"--training.seq_len={SEQ_LEN}", *more]


def evaluated(capsys, tmp_path, *argv):
    assert cli.main(["evaluate", *map(str, argv), "--out", str(tmp_path / "found.json")]) == 0, capsys.readouterr().err
    return json.loads((tmp_path / "found.json").read_text()), capsys.readouterr().out


@pytest.mark.parametrize("rows", [1, 3])
def test_losses_are_those_of_each_segment_by_itself(home, tmp_path, capsys, rows):
    found, said = evaluated(
        capsys,
        tmp_path,
        home / "model",
        *words(home, f"--validation.local_batch_size={rows}"),
        "--plot",
        tmp_path / "p.svg",
    )
    (run,) = found["runs"]
    model, tokenizer, sums = build(Llama, ARGS), ByteTokenizer(), {}
    with torch.no_grad():
        for text in TEXTS:
            ids = torch.tensor(tokenizer.encode(text, bos=True, eos=True))
            for start in range(0, len(ids) - 1, SEQ_LEN):
                piece = ids[start : start + SEQ_LEN + 1]
                losses = F.cross_entropy(model(piece[None, :-1])[0], piece[1:], reduction="none").double()
                for n, loss in enumerate(losses.tolist(), start):
                    name = next((f"{low}-{high}" for low, high in ((0, 8), (8, 32), (32, 128)) if n < high), "128-")
                    tokens, nats = sums.get(name, (0, 0.0))
                    sums[name] = tokens + 1, nats + loss
    assert {name: row["tokens"] for name, row in run["by_position"].items()} == {n: t for n, (t, _) in sums.items()}
    for name, (tokens, nats) in sums.items():
        assert run["by_position"][name]["loss"] == pytest.approx(nats / tokens, rel=1e-6)
    tokens, nats = (sum(part) for part in zip(*sums.values(), strict=True))
    assert run["tokens"] == tokens and run["loss"] == pytest.approx(nats / tokens, rel=1e-6)
    assert run["perplexity"] == pytest.approx(math.exp(run["loss"]))
    assert found["bytes"] == sum(map(len, TEXTS))
    assert run["bits_per_byte"] == pytest.approx(nats / math.log(2) / found["bytes"], rel=1e-6)
    assert f"{tokens:,}" in said and "bits per byte" in said
    assert "<svg" in (tmp_path / "p.svg").read_text()


def test_no_more_documents_than_have_so_many_segments(home, tmp_path, capsys):
    found, _ = evaluated(capsys, tmp_path, home / "model", "--samples=3", *words(home))
    assert found["data"] == f"text ({home / 'texts.jsonl'})"
    assert found["documents"] == 1 and found["runs"][0]["tokens"] == len(TEXTS[0]) + 1


ANSWER = [{"text": "What is asked? ", "label": False}, {"text": "an answer", "label": True}]


def test_bits_per_byte_are_of_what_is_predicted(home, tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": ANSWER}) + "\n")
    found, _ = evaluated(capsys, tmp_path, home / "model", *words(tmp_path))
    (run,) = found["runs"]
    assert found["bytes"] == len("an answer") and run["tokens"] == len("an answer") + 1  # and the end
    assert run["bits_per_byte"] == pytest.approx(run["loss"] * run["tokens"] / math.log(2) / found["bytes"])


def split_words(home, kind="sft"):
    data = [f"--training.dataset_path={home / 'texts.jsonl'}", "--training.dataset=text", f"--task.kind={kind}"]
    how = ["--training.seq_len=64", "--data.too_long=truncate", "--model.tokenizer_path=bytes"]
    return [*data, *how, "--validation.enable", "--validation.split=2", "--validation.local_batch_size=1"]


def test_with_a_split_what_the_run_has_held_out(home, tmp_path, capsys):
    found, _ = evaluated(capsys, tmp_path, home / "model", *split_words(home))
    config, tokenizer = manager.load([*split_words(home), f"--data.cache_dir={tmp_path}"]), ByteTokenizer()
    validated = list(build_data.validation_loader(config, tokenizer, 0, dims(config, 1)))
    texts = [tokenizer.decode(row.tolist()) for batch in validated for row in batch["tokens"]]
    assert found["documents"] == 2 and found["bytes"] == sum(map(len, texts))
    # documents that are given are all measured
    found, _ = evaluated(capsys, tmp_path, home / "model", *split_words(home), *words(home)[:2])
    assert found["documents"] == len(TEXTS)


def trained(argv):
    return train(argv)[1]


def test_a_cache_of_any_size(tmp_path, capsys):
    """In the first segment of a document there is nothing to find."""
    texts = write_texts(tmp_path / "data", documents=20)
    how = dict(task__kind="documents", training__steps=4, training__seq_len=16, training__local_batch_size=2)
    how |= dict(training__global_batch_size=4, checkpoint__enable=True)
    cache = {f"adapter__neurocache__{name}": value for name, value in dict(cache_size=64, topk=4).items()}
    run_ranks(1, trained, arguments(tmp_path / "run", texts, adapter__kind="neurocache", **cache, **how))
    data = ["--validation.dataset=text", f"--validation.dataset_path={texts}"]
    found, said = evaluated(capsys, tmp_path, tmp_path / "run", *data, "--cache-sizes=0,32,64")
    assert [run["cache_size"] for run in found["runs"]] == [0, 32, 64]
    assert len({run["loss"] for run in found["runs"]}) == 3 and "cache of 32 entries" in said
    first = [run["by_position"]["0-16"]["loss"] for run in found["runs"]]
    assert first[0] == first[1] == first[2]


@pytest.mark.parametrize(
    "lookup, sizes, seq_len, message",
    [
        ("exact", None, 32, None),
        ("exact", [0], 2000, None),
        (
            "exact",
            None,
            2000,
            "segments of 2000 tokens: adapter.neurocache.cache_size: allowed: at least 2000",
        ),
        ("exact", [0, 1024, 64], 128, "--cache-sizes: given 64: adapter.neurocache.cache_size: allowed: at least 128"),
        ("bucketed", [512, 600], 32, "--cache-sizes: given 600: .* a multiple of 512 .* write 512 or 1024"),
    ],
)
def test_caches_that_segments_do_not_fit_are_refused(lookup, sizes, seq_len, message):
    cache = [f"--adapter.neurocache.lookup={lookup}", "--adapter.neurocache.cache_size=1024"]
    config = manager.load(["--adapter.kind=neurocache", *cache])
    with nullcontext() if message is None else pytest.raises(JobError, match=message):
        check_caches(config, sizes, seq_len)


def test_a_context_that_is_longer_than_the_cache_is_refused(tmp_path):
    """Of any command that reads with a run's model."""
    cache = 'kind = "neurocache"\nneurocache = {cache_size = 64}'
    (tmp_path / "config.toml").write_text(f'[model]\ntokenizer_path = "bytes"\n[adapter]\n{cache}\n')
    assert job_of(tmp_path, ["--training.seq_len=64"]).training.seq_len == 64
    with pytest.raises(JobError, match="cache_size: given 64; allowed: at least 65, a segment's tokens"):
        job_of(tmp_path, ["--training.seq_len=65"])


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--plot", "p.gif"], "--plot: given 'p.gif'; allowed: names with .svg or .png"),
        (["--cache-sizes=0,8"], "--cache-sizes: this model has no cache; leave it out"),
        (["--out", "/no/such/folder/f.json"], "the figures above were not written"),
    ],
)
def test_what_is_refused(home, capsys, argv, message):
    assert cli.main(["evaluate", str(home / "model"), "--samples=1", *words(home), *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--samples=-1"], ["--cache-sizes=a"], ["--cache-sizes=-1"], ["--sample", "3"]])
def test_what_is_no_option(home, capsys, argv):
    assert cli.main(["evaluate", str(home / "model"), *argv]) == 2


def test_a_split_that_holds_out_no_documents(home, capsys):
    assert cli.main(["evaluate", str(home / "model"), *split_words(home, "pretrain")]) == 2
    assert "validation.split: given 2; allowed: unset with task.kind = pretrain" in capsys.readouterr().err


def test_pairs_of_answers_are_no_documents(home, tmp_path, capsys):
    """Held out by a split, or in a file of their own: it is said where they have been measured."""
    (tmp_path / "texts.jsonl").write_text(json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}) + "\n")
    for more in (split_words(home, "dpo"), words(tmp_path, "--task.kind=dpo")):
        assert cli.main(["evaluate", str(home / "model"), *more]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "pairs of answers are no documents" in said and "reward_accuracy" in said


def test_a_model_of_classes_is_refused(home, capsys):
    argv = ["--model.name=gpt2", "--model.flavor=debugmodel", "--model.overrides={n_classes = 2}"]
    assert cli.main(["evaluate", str(home / "model"), *words(home), *argv]) == 2
    assert "does not tell the next token" in capsys.readouterr().err
