"""`torchtitan export`: transformers and peft compute the same as the run, an export that fails verification keeps a
temporary name, and memory holds one layer at a time.
"""

import io
import json
import math
import shlex
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch

from tests.support.jobs import arguments, train, write_texts
from tests.support.memory import Peak
from tests.support.pool import run_ranks
from tests.support.preference_jobs import write_pairs
from tests.support.sft_jobs import write_rows
from torchtitan import cli
from torchtitan.adapters.low_rank import LowRankLinear
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.commands.export import Answer, choose_alike, compared, held_out
from torchtitan.commands.generate import find_checkpoint
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.core.fake_quantization import AffineInt4
from torchtitan.core.random_draws import initialize
from torchtitan.job import ResolvedJob
from torchtitan.models.spec import MODELS
from torchtitan.rules import check
from torchtitan.training import inference_model

SIZES = "dim=64, n_layers={}, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=64"
OF_EXPERTS = "dim=64, n_layers={}, n_heads=4, n_kv_heads=2, vocab_size=260, head_dim=16, expert_dim=32, n_experts=4"
TOKENS = torch.arange(40).view(2, 20)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


def write_base(folder, name, layers=2):
    """Write a Hugging Face folder with initial weights; return the options of a job that starts from it."""
    sizes = OF_EXPERTS if name == "qwen3_moe" else SIZES
    options = dict(model__name=name, model__overrides=f"{{{sizes.format(layers)}}}")
    config = manager.load(arguments(folder, folder, **options))
    model = ModelBuilder(ResolvedJob(config)).meta_model().to_empty(device="cpu")
    initialize(model, 0, model.init_rule)
    MODELS[name].hf.save_hf(folder, model.state_dict(), model.args)
    return options | dict(checkpoint__initial_load_path=folder, checkpoint__initial_load_in_hf=True)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return {name: write_base(tmp_path_factory.mktemp(name), name) for name in ("llama3", "llama3.2", "qwen3_moe")}


def train_run(folder, texts, base, ranks=1, **options):
    """Train a run long enough to change the adapter noticeably; return its folder."""
    shared = dict(adapter__rank=4, checkpoint__enable=True, training__steps=3, optimizer__lr=3e-2)
    shared |= dict(training__local_batch_size=8 // ranks)
    run_ranks(ranks, train, arguments(folder, texts, **base | shared | options))
    return folder


def export(run, to, *options):
    return cli.main(["export", str(run), "--to", str(to), *options])


def export_record(folder):
    return json.loads((folder / "export.json").read_text())


def logits_of(folder, adapter=None):
    """Return the logits of transformers, with peft's adapter if given."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return (model if adapter is None else PeftModel.from_pretrained(model, adapter))(TOKENS).logits.detach()


CASES = [
    ("llama3", 2, dict(adapter__kind="lora", adapter__save="alone"), "weights"),
    ("llama3.2", 1, dict(adapter__kind="lora", adapter__rslora=True, adapter__alpha=4.0), "weights"),
    ("llama3", 1, dict(adapter__kind="dora", adapter__save="alone"), "weights"),
    ("llama3", 2, dict(adapter__kind="qlora", adapter__save="alone"), "original"),
    ("llama3.2", 1, dict(adapter__kind="qlora"), "original"),
    ("llama3", 1, dict(adapter__kind="lora_int8", adapter__save="alone"), "original"),
    ("qwen3_moe", 2, dict(adapter__kind="qlora", adapter__target='["all-linear"]', adapter__save="alone"), "original"),
    (
        "qwen3_moe",
        2,
        dict(adapter__kind="lora_int8", adapter__target='["*.w[qk]", "*.moe.experts.w2"]', adapter__save="whole")
        | dict(adapter__quantized_experts="all", parallelism__expert_parallel_degree=2),
        "original",
    ),
]


@pytest.mark.parametrize("name, ranks, options, into", CASES, ids=str)
def test_the_command_merges_and_verifies(tmp_path, texts, bases, name, ranks, options, into, capsys):
    """The exported model has the logits of the published base with peft's adapter.

    So the original base is merged, not its quantized form.
    """
    run = train_run(tmp_path / "run", texts, bases[name], ranks, **options)
    assert export(run, tmp_path / "whole", "--merge", "--dtype=float32") == 0
    assert export(run, tmp_path / "adapter") == 0
    output = capsys.readouterr().out
    assert "step-00000003 in float32; loss" in output and "on 32 tokens" in output
    record = export_record(tmp_path / "whole")
    assert record["verified"] and record["step"] == 3 and record["merged_into"] == into
    assert record["same_tokens"] is (None if into == "original" else True)
    published = bases[name]["checkpoint__initial_load_path"]
    merged, with_adapter = logits_of(tmp_path / "whole"), logits_of(published, tmp_path / "adapter")
    torch.testing.assert_close(merged, with_adapter, rtol=1e-5, atol=1e-5)
    assert (merged - logits_of(published)).abs().max() > 1e-2, "training must have changed the adapter"
    job, step_folder = find_checkpoint(run, None)
    model, _ = inference_model.load_model(job, step_folder, torch.device("cpu"))
    off = (model(TOKENS) - merged).abs().max() / merged.abs().max()
    assert off < 1e-5 if into == "weights" else 1e-5 < off < 0.1, "the run used the packed weights"


@pytest.mark.parametrize("kind", ["dpo", "orpo"])
def test_a_run_of_pairs_is_verified_by_the_loss_of_its_answers(tmp_path, bases, kind):
    """The recorded loss equals the loss of transformers on the same samples."""
    rows = write_pairs(tmp_path / "rows.jsonl")
    run = train_run(
        tmp_path / "run", rows, bases["llama3"], adapter__kind="lora", task__kind=kind, training__seq_len=24
    )
    assert export(run, tmp_path / "whole", "--merge", "--dtype=float32") == 0
    record = export_record(tmp_path / "whole")
    assert record["verified"] and record["loss_of_the_run"] == pytest.approx(transformers_loss(run, tmp_path / "whole"))


def transformers_loss(run, folder):
    """Return the mean loss over all labels of the run's held-out sample."""
    from transformers import AutoModelForCausalLM

    tokens, labels = held_out(find_checkpoint(run, None)[0])
    logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits.detach()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).item()


@pytest.mark.parametrize("section", ["training", "validation"])
def test_the_sample_is_short_and_ends_with_a_label(tmp_path, bases, section, monkeypatch):
    """Of a record longer than the sample, the end with its answer is taken."""
    monkeypatch.setattr("torchtitan.commands.export.MAX_TOKENS", 24)
    rows = write_rows(tmp_path)
    options = dict(adapter__kind="lora", task__kind="sft", data__packing="off", data__pad_to="batch")
    options |= dict(training__seq_len=384, training__local_batch_size=2, training__global_batch_size=2)
    options |= dict(validation__enable=True, validation__split=0.5) if section == "validation" else {}
    run = train_run(tmp_path / "run", rows, bases["llama3"], **options, validation__local_batch_size=2)
    tokens, labels = held_out(find_checkpoint(run, None)[0])
    assert tokens.shape == labels.shape == (1, 24) and labels[0, -1] != -100
    assert export(run, tmp_path / "whole", "--merge", "--dtype=float32") == 0
    record = export_record(tmp_path / "whole")
    assert record["verified"] and record["tokens"] == 24
    assert record["loss_of_the_run"] == pytest.approx(transformers_loss(run, tmp_path / "whole"), rel=1e-5)


def test_data_without_labels_cannot_verify_an_export(tmp_path, texts, bases, monkeypatch):
    run = train_run(tmp_path / "run", texts, bases["llama3"], adapter__kind="lora")
    batches = [{"tokens": torch.zeros(1, 4, dtype=torch.long), "labels": torch.full((1, 4), -100)}] * 3

    class Loader(list):
        def close(self):
            pass

    monkeypatch.setattr("torchtitan.commands.export.JobDatasets.training_loader", lambda *_: Loader(batches))
    with pytest.raises(JobError, match="no label to verify the export on; give a job with other data by --config"):
        held_out(find_checkpoint(run, None)[0])
    batches.append({"tokens": torch.arange(4)[None], "labels": torch.tensor([[-100, 2, 3, -100]])})
    monkeypatch.setattr("torchtitan.commands.export.JobDatasets.training_loader", lambda *_: Loader(batches))
    tokens, labels = held_out(find_checkpoint(run, None)[0])
    assert tokens.tolist() == [[0, 1, 2]] and labels.tolist() == [[-100, 2, 3]]


def test_fully_trained_weights_are_exported_and_bases_unpacked_on_request(tmp_path, texts, bases):
    """Train embedding and head fully next to a QLoRA adapter, and export into the original and the unpacked base."""
    ends = dict(adapter__kind="qlora", adapter__train_fully='["tok_embeddings.weight", "output.weight"]')
    base = write_base(tmp_path / "base", "llama3")
    run = train_run(tmp_path / "run", texts, base, **ends)
    assert export(run, tmp_path / "original", "--merge", "--dtype=float32") == 0
    assert export(run, tmp_path / "whole", "--merge", "--dtype=float32", "--merge-base=unpacked") == 0
    record = export_record(tmp_path / "whole")
    assert record["verified"] and record["same_tokens"] and record["merged_into"] == "unpacked"
    model, _ = inference_model.load_model(*find_checkpoint(run, None), torch.device("cpu"))
    torch.testing.assert_close(logits_of(tmp_path / "whole"), model(TOKENS), rtol=1e-5, atol=1e-5)
    assert export(run, tmp_path / "narrow", "--merge", "--merge-base=unpacked", "--dtype=bfloat16") == 0
    assert (
        export_record(tmp_path / "narrow")["dtype"] == "bfloat16" and export_record(tmp_path / "narrow")["same_tokens"]
    )


def test_lora_only_models_are_exported_as_plain_ones(tmp_path, texts):
    """The run trains from scratch and resumes exactly; exported matrices have the rank of A and B."""
    options = dict(adapter__kind="lora", adapter__lora_only=True, adapter__train_dense_rest=True, adapter__rank=4)
    options |= dict(model__overrides=f"{{{SIZES.format(2)}}}", checkpoint__enable=True, checkpoint__interval=2)
    options |= dict(training__steps=4, training__local_batch_size=4)
    argv = arguments(tmp_path / "run", texts, **options)
    uninterrupted = run_ranks(2, train, argv)[0][1]
    assert run_ranks(2, train, [*argv, "--checkpoint.load_step=2"])[0][1] == uninterrupted
    assert export(tmp_path / "run", tmp_path / "whole", "--merge", "--dtype=float32") == 0
    job, step_folder = find_checkpoint(tmp_path / "run", None)
    model, _ = inference_model.load_model(job, step_folder, torch.device("cpu"))
    torch.testing.assert_close(logits_of(tmp_path / "whole"), model(TOKENS), rtol=1e-5, atol=1e-5)
    loaded = ModelBuilder(job).meta_model().to_empty(device="cpu")
    MODELS["llama3"].hf.load_hf(tmp_path / "whole", loaded, job.model.args)
    assert torch.linalg.matrix_rank(loaded.layers["1"].feed_forward.w1.weight.detach().double(), rtol=1e-5) == 4


def test_another_base_is_refused(tmp_path, texts, capsys):
    base = write_base(tmp_path / "base", "llama3")
    run = train_run(tmp_path / "run", texts, base, adapter__kind="qlora", adapter__save="whole")
    config = manager.load(arguments(tmp_path, texts, **base))
    other = ModelBuilder(ResolvedJob(config)).meta_model().to_empty(device="cpu")
    initialize(other, 1, other.init_rule)
    MODELS["llama3"].hf.save_hf(tmp_path / "base", other.state_dict(), other.args)
    assert export(run, tmp_path / "out", "--merge") == 2
    errors = capsys.readouterr().err
    assert "is not the matrix that the run quantized; restore the run's base at this path, or merge into the" in errors
    (tmp_path / "base").rename(tmp_path / "moved")
    assert export(run, tmp_path / "out", "--merge") == 2
    errors = capsys.readouterr().err
    assert (
        "base: no such file or folder; give" in errors and "or merge into the dequantized weights: --merge-b" in errors
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved", "run"], "both failed exports leave nothing"
    assert export(run, tmp_path / "out", "--merge", "--merge-base=unpacked") == 0


def test_an_export_that_fails_verification_keeps_its_temporary_name(tmp_path, texts, bases, capsys, monkeypatch):
    run = train_run(tmp_path / "run", texts, bases["llama3"], adapter__kind="lora")
    assert export(run, tmp_path / "whole", "--merge") == 0
    monkeypatch.setattr(LowRankLinear, "merged_weight", lambda self, name, value: value)
    assert export(run, tmp_path / "wrong", "--merge") == 1
    assert "NOT equal to the run" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists() and (tmp_path / "wrong.unverified" / "config.json").exists()
    refused = [["--to", str(tmp_path / "whole")], ["--to", str(tmp_path / "wrong"), "--merge"]]
    for options, message in zip(
        refused, ("exists; give another directory", "exists, from an export that failed"), strict=True
    ):
        assert cli.main(["export", str(run), *options]) == 2
        assert message in capsys.readouterr().err


def test_a_run_without_adapter_exports_its_weights(tmp_path, texts, bases, capsys):
    """No --merge is needed, and the last lines, with what serves the folder, can be run as they are."""
    run = train_run(tmp_path / "plain", texts, bases["llama3"], adapter__kind="none", adapter__rank=128)
    target = tmp_path / "it's whole"
    assert export(run, target) == 0
    serve, in_python = capsys.readouterr().out.splitlines()[-2:]
    assert shlex.split(serve) == ["serve", "it:", "vllm", "serve", str(target)]
    import transformers

    reference = eval(in_python.removeprefix("in Python: "), {"transformers": transformers})
    job, step_folder = find_checkpoint(run, None)
    model, _ = inference_model.load_model(job, step_folder, torch.device("cpu"))
    torch.testing.assert_close(reference(TOKENS).logits, model(TOKENS), rtol=1e-5, atol=1e-5)
    assert export(run, tmp_path / "again", "--merge", "--dtype=bfloat16") == 0, "it has nothing to merge"


QAT = dict(adapter__kind="none", adapter__rank=128, qat__weight_dtype="int4", qat__group_size=8)


@pytest.mark.parametrize("name", ["llama3", "llama3.2"])
def test_weights_of_quantization_aware_training_are_rounded_on_request(tmp_path, texts, bases, name, capsys):
    run = train_run(tmp_path / "run", texts, bases[name], **QAT)
    assert export(run, tmp_path / "exact") == export(run, tmp_path / "rounded", "--rounded") == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "rounded to" in line]
    assert notes[0] == "the weights are not rounded to int4; --rounded does it"
    assert notes[1].startswith("the weights are rounded to int4, as the run computes with them")
    files = (next((tmp_path / folder).glob("*.safetensors")) for folder in ("exact", "rounded"))
    exact, rounded = map(safetensors.torch.load_file, files)
    name_of_one = "model.layers.0.mlp.down_proj.weight"
    torch.testing.assert_close(rounded[name_of_one], AffineInt4(8).round(exact[name_of_one], None).values)
    assert torch.equal(rounded["model.embed_tokens.weight"], exact["model.embed_tokens.weight"])
    if name == "llama3":  # of the tied one, the head of the run is rounded
        job, step_folder = find_checkpoint(run, None)
        model, _ = inference_model.load_model(job, step_folder, torch.device("cpu"))
        torch.testing.assert_close(logits_of(tmp_path / "rounded"), model(TOKENS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inputs", ["none", "int8"])
@pytest.mark.parametrize("name", ["llama3", "llama3.2"])
def test_rounded_weights_are_not_rounded_again(tmp_path, texts, bases, name, inputs):
    """Integers around 0 shrink or grow with each rounding (7.5 / 8 of the largest)."""
    run = train_run(tmp_path / "run", texts, bases[name], qat__activation_dtype=inputs, **QAT)
    assert export(run, tmp_path / "rounded", "--rounded") == 0
    job, step_folder = find_checkpoint(run, None)
    expected = inference_model.load_model(job, step_folder, torch.device("cpu"))[0](TOKENS)
    model, _ = inference_model.load_model(job, tmp_path / "rounded", torch.device("cpu"))
    torch.testing.assert_close(model(TOKENS), expected, rtol=1e-5, atol=1e-5)
    other = job.with_options({"qat.group_size": 16})
    with pytest.raises(JobError, match="its weights are rounded with .*'group_size': 8.*; give the job of its run"):
        inference_model.load_model(other, tmp_path / "rounded", torch.device("cpu"))
    start = dict(checkpoint__initial_load_path=tmp_path / "rounded", checkpoint__enable=True)
    again = arguments(tmp_path / "again", texts, **bases[name] | QAT | start)
    (fault,) = check(manager.load(again), 1, "cpu")
    assert "allowed: weights that are not rounded yet, with qat.weight_dtype; rounding once more" in str(fault)


def test_rounding_without_a_format_is_refused(tmp_path, texts, bases, capsys):
    for kind in ("none", "lora"):
        run = train_run(tmp_path / kind, texts, bases["llama3"], adapter__kind=kind)
        assert export(run, tmp_path / "rounded", "--rounded") == 2
        assert "--rounded: allowed for a run with qat.weight_dtype only" in capsys.readouterr().err


def test_verification_accepts_differences_of_rounding():
    def answer(*logits, loss=2.0):
        return Answer(loss, torch.tensor(logits))

    run = answer([1.0, 8.0, 7.99], [4.0, 1.0, 0.0])
    assert choose_alike(run.logits, run.logits, 0.0)
    tie = answer([1.0, 7.99, 8.0], [4.0, 1.0, 0.0])
    assert choose_alike(run.logits, tie.logits, 1e-2) and not choose_alike(run.logits, tie.logits, 1e-5)
    assert not choose_alike(run.logits, answer([1.0, 8.0, 7.99], [0.0, 4.0, 1.0]).logits, 1e-2)
    for loss, dtype, into, verified in (
        (2.0001, "float32", "weights", False),
        (2.0001, "bfloat16", "weights", True),
        (2.03, "bfloat16", "weights", False),
        (2.03, "float32", "original", True),
        (2.07, "float32", "original", False),
    ):
        verdict = compared("float32", run, Answer(loss, run.logits), dtype, into)
        assert verdict["verified"] == verified, (loss, dtype, into)
    other = compared("float32", run, answer([9.0, 8.0, 7.0], [4.0, 1.0, 0.0]), "float32", "weights")
    assert not other["verified"] and other["same_tokens"] is False


@pytest.mark.parametrize("kind, save", [("lora", "alone"), ("dora", "whole"), ("qlora", "alone"), ("qlora", "whole")])
def test_the_command_holds_one_layer_in_memory(tmp_path, texts, kind, save):
    """Peak memory grows with the number of layers only by A and B, which stay in memory."""
    peaks, adapter_bytes = [], []
    for layers in (2, 6):
        base = write_base(tmp_path / f"base {layers}", "llama3", layers)
        run = train_run(tmp_path / f"run {layers}", texts, base, adapter__kind=kind, adapter__save=save)
        with Peak() as peak:
            assert export(run, tmp_path / f"out {layers}", "--merge") == 0
        peaks.append(peak.bytes)
        adapter = ModelBuilder(find_checkpoint(run, None)[0]).adapted_model()[2]
        adapter_bytes.append(4 * sum(map(math.prod, adapter.added_shapes.values())))
    assert 0 <= peaks[1] - peaks[0] <= adapter_bytes[1] - adapter_bytes[0] < peaks[0] / 2


def test_the_first_line_names_the_dtype_and_its_loss_of_precision(tmp_path, texts, bases, capsys):
    """By default weights keep the dtype of the run; bfloat16 would drop updates smaller than its last bit."""
    run = train_run(tmp_path / "run", texts, bases["llama3"], adapter__kind="lora")
    job, _ = find_checkpoint(run, None)
    number = job.model.args.num_parameters
    assert export(run, tmp_path / "whole", "--merge") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        f"writing {number:,} parameters in float32, the type of the run: {4 * number / 2**20:.1f} MiB; "
        "--dtype bfloat16 takes half of it and rounds each weight to 8 significant bits, by up to 0.4 %"
    )
    assert export_record(tmp_path / "whole")["dtype"] == "float32"
    assert export(run, tmp_path / "narrow", "--merge", "--dtype=bfloat16") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        f"writing {number:,} parameters in bfloat16, though the run has float32: {2 * number / 2**20:.1f} MiB; "
        "each weight is rounded to 8 significant bits, by up to 0.4 %"
    )
    full_precision, narrow = (
        safetensors.torch.load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("whole", "narrow")
    )
    off = max(
        ((narrow[name].float() - full_precision[name]).abs() / full_precision[name].abs()).max().item()
        for name in full_precision
    )
    assert 2**-9 < off <= 2**-8, "half of the last of 8 significant bits"
    assert export(run, tmp_path / "adapter", "--dtype=bfloat16") == 2
    assert "--dtype: given bfloat16; allowed: a dtype only with --merge" in capsys.readouterr().err


def test_an_upload_is_asked_about_only_if_it_is_public(tmp_path, texts, bases, capsys, monkeypatch):
    """The question comes before the export, and without a terminal the answer is no."""
    run, uploads = train_run(tmp_path / "run", texts, bases["llama3"], adapter__kind="none", adapter__rank=128), []

    def upload(folder, repo, public):
        uploads.append((folder, repo, public))
        return f"https://hub/{repo}"

    monkeypatch.setattr("torchtitan.commands.export.upload", upload)
    monkeypatch.setattr("torchtitan.commands.export.is_public", lambda repo, public: public)
    assert export(run, tmp_path / "private", "--push=me/mine") == 0
    assert uploads == [(tmp_path / "private", "me/mine", False)]
    assert "uploaded: https://hub/me/mine" in capsys.readouterr().out
    refuse = Mock(side_effect=JobError("--push me/mine: the hub answers HTTP 500; try again later"))
    monkeypatch.setattr("torchtitan.commands.export.upload", refuse)
    assert export(run, tmp_path / "refused", "--push=me/mine") == 2 and (tmp_path / "refused/config.json").exists()
    later = f"hf upload me/mine {tmp_path / 'refused'} --exclude export.json"
    assert f"HTTP 500; try again later; the export itself is complete; upload it later: {later}" in " ".join(
        capsys.readouterr().err.split()
    )
    monkeypatch.setattr("torchtitan.commands.export.upload", upload)
    public = ("--push=me/mine", "--public")
    monkeypatch.setattr("sys.stdin", io.StringIO("y"))
    assert export(run, tmp_path / "public", *public) == 2
    assert "--push me/mine: everyone could read it, which is asked on a terminal" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda question: "")
    assert export(run, tmp_path / "public", *public) == 2 and not (tmp_path / "public").exists()
    assert "--push me/mine: not confirmed; nothing was written" in capsys.readouterr().err
    monkeypatch.setattr("builtins.input", lambda question: " Y ")
    assert export(run, tmp_path / "public", *public) == 0 and uploads[1:] == [(tmp_path / "public", "me/mine", True)]
    assert export(run, tmp_path / "none", "--public") == 2
    assert "--public: allowed with --push only" in capsys.readouterr().err
