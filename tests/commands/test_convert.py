"""`torchtitan convert`, and jobs that start from weights in any format: our checkpoints, Hugging Face folders, single
files, and a checkpoint of PyTorch's torchtitan v0.2.2 with its recorded logits (tests/assets/torchtitan_v022).
"""

import json
import os
import pickle
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

from tests.support import jobs
from tests.support.hf_parity import build, same
from tests.support.judged import lines
from tests.support.pool import run_ranks
from tests.support.tiny_decoders import DEEPSEEK, LLAMA, QWEN3, QWEN3_MOE
from torchtitan import cli
from torchtitan.checkpoint import CheckpointError, NothingLoadable
from torchtitan.checkpoint.base_weights import find_weights
from torchtitan.checkpoint.weight_sources import TorchtitanCheckpoint, Weights, load_foreign, open_weights
from torchtitan.commands.convert import Conversion
from torchtitan.config.manager import load
from torchtitan.core.errors import JobError
from torchtitan.job import ResolvedJob
from torchtitan.models import CONFIG_CONVERTERS, resolve_sizes
from torchtitan.models.hf.torchtitan_names import TORCHTITAN_NAMES
from torchtitan.models.llama import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.models.sizes import RopeScaling
from torchtitan.models.spec import MODELS
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TORCHTITAN_RUN = jobs.ROOT / "tests/assets/torchtitan_v022"
SIZES = dict(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, multiple_of=16, vocab_size=2048)
# torchtitan v0.2.2 scales its rotary angles in every llama3
ARGS = LlamaArgs(**SIZES, rope_theta=500000.0, rope_scaling=RopeScaling(), max_seq_len=131072)
MODEL_OPTIONS = ["--model.name=llama3.1", f"--model.overrides={{{', '.join(f'{k} = {v}' for k, v in SIZES.items())}}}"]


def run_convert(capsys, *options: object) -> str:
    """Run `torchtitan convert`, which must succeed, and return its output."""
    code = cli.main(["convert", *map(str, options)])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out + output.err


def errors_of_convert(capsys, *options: object) -> str:
    """Run `torchtitan convert`, which must fail, and return its errors."""
    assert cli.main(["convert", *map(str, options)]) == 2
    return capsys.readouterr().err


# Checkpoints of PyTorch's torchtitan


def expected() -> dict:
    """Return the tokens and logits that torchtitan v0.2.2 recorded."""
    return json.loads((TORCHTITAN_RUN / "expected.json").read_text())


def assert_logits(logits: torch.Tensor) -> None:
    """Compare with the recorded logits: seven digits, and float32 sums in another order differ in the last."""
    reference = torch.tensor(expected()["logits"])
    assert (logits[..., : reference.shape[-1]] - reference).abs().max() < 2e-6
    assert abs(logits.double().sum().item() - expected()["logits_sum"]) < 1e-3


@torch.no_grad()
def test_a_torchtitan_checkpoint_gives_its_recorded_logits():
    assert find_weights(TORCHTITAN_RUN) == ("torchtitan", TORCHTITAN_RUN / "step-4")
    assert resolve_sizes("llama3.1", "debugmodel", None, SIZES) == ARGS
    model = build(Llama, ARGS, seed=1)
    load_foreign(TORCHTITAN_RUN / "step-4", [model], "llama3.1", ARGS)
    assert_logits(model(torch.tensor(expected()["tokens"])))


@torch.no_grad()
def test_every_format_converts_to_every_other_and_back(tmp_path, capsys):
    output = run_convert(capsys, TORCHTITAN_RUN, tmp_path / "hf", *MODEL_OPTIONS)
    assert f"{TORCHTITAN_RUN}/step-4 -> {tmp_path}/hf: llama3.1, 168,160 parameters, a Hugging Face folder" in output
    hf_model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert_logits(hf_model(torch.tensor(expected()["tokens"])).logits)
    run_convert(capsys, tmp_path / "hf", tmp_path / "ours")
    run_convert(capsys, tmp_path / "ours", tmp_path / "a.safetensors")
    output = run_convert(capsys, tmp_path / "a.safetensors", tmp_path / "again", "--to", "hf")
    assert "no tokenizer is written: give the model's tokenizer with --model.tokenizer_path" in output
    (before,), (after,) = ((tmp_path / name).glob("*.safetensors") for name in ("hf", "again"))
    assert before.read_bytes() == after.read_bytes()
    run_convert(capsys, tmp_path / "a.safetensors", tmp_path / "narrow", "--to", "native", "--dtype", "bfloat16")
    with (
        open_weights(tmp_path / "narrow", "llama3.1", ARGS) as narrow,
        open_weights(TORCHTITAN_RUN, "llama3.1", ARGS) as wide,
    ):
        assert torch.equal(narrow.full_tensor("norm.weight"), wide.full_tensor("norm.weight").bfloat16())
    text = {generate(capsys, tmp_path / name) for name in ("hf", "ours")}
    text |= {generate(capsys, tmp_path / "a.safetensors", f"--model.tokenizer_path={tmp_path / 'hf'}")}
    text |= {generate(capsys, TORCHTITAN_RUN, *MODEL_OPTIONS)}
    assert len(text) == 1


def generate(capsys, folder: Path, *options: str) -> str:
    """Return the text that `torchtitan generate` continues greedily from a fixed prompt."""
    options = [str(folder), "--prompt", "def", "--temperature", "0", "--max_new_tokens", "8", *options]
    assert cli.main(["generate", *options]) == 0
    return capsys.readouterr().out


def to_torchtitan_form(state: dict, family: str, args) -> dict:
    """Convert a state dict to the form of PyTorch's torchtitan by hand.

    Experts are transposed, their bias is a sibling of the router, the second query matrix is `wq_b`, and a Qwen head
    has the rows of all first features of rotary pairs, then all second ones.
    """
    converted = {}
    for name, value in state.items():
        if ".moe.experts." in name:
            value = torch.einsum("eio->eoi", value)
        elif family.startswith("qwen3") and name.split(".")[-2] in ("wq", "wk", "q_norm", "k_norm"):
            heads = value.reshape(-1, args.head_dim, *value.shape[1:])
            value = torch.cat((heads[:, 0::2], heads[:, 1::2]), dim=1).reshape(value.shape)
        name = name.replace("moe.router.expert_bias", "moe.expert_bias")
        if family == "deepseek" and args.q_lora_rank:
            name = name.replace("attention.wq.weight", "attention.wq_b.weight")
        converted[name] = value.contiguous()
    return converted


MAIN_NAMES = {
    "output.weight": "lm_head.weight",
    "moe.experts.w1": "moe.routed_experts.inner_experts.w1_EFD",
    "moe.experts.w2": "moe.routed_experts.inner_experts.w2_EDF",
    "moe.experts.w3": "moe.routed_experts.inner_experts.w3_EFD",
    "moe.expert_bias": "moe.expert_bias_E",
}


def to_main_names(state: dict, family: str) -> dict:
    """Rename tensors of v0.2.2 to the names of August 2026; multi-head latent attention kept its own."""
    renamed = {}
    for name, value in state.items():
        part = name.split(".", 2)[2] if name.startswith("layers.") else name
        now = MAIN_NAMES.get(part, part)
        if family != "deepseek":
            now = re.sub(r"^attention\.(w[qkv])\.", r"attention.qkv_linear.\1.", now)
        renamed[name.removesuffix(part) + now] = value
    return renamed


FAMILIES = [
    ("llama3.2", LLAMA["llama3.2"]),
    ("deepseek", DEEPSEEK["v3"]),
    ("deepseek", DEEPSEEK["v2 lite"]),
    ("qwen3", QWEN3["plain"]),
    ("qwen3_moe", QWEN3_MOE["published"]),
]


@pytest.mark.parametrize("version", ["v0.2", "June 2026", "main"])
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("family, args", FAMILIES)
def test_torchtitans_layout_of_experts_and_rotary_rows_is_converted(family, args, prefix, version, tmp_path):
    model, other = (build(MODELS[family].build, args, seed) for seed in (0, 1))
    state = to_torchtitan_form(model.state_dict(), family, args)
    if version != "v0.2":
        state = to_main_names(state, family)
    if version == "June 2026":
        state = {name.replace("routed_experts.inner_experts", "experts"): value for name, value in state.items()}
    state = {prefix + name: value for name, value in state.items()}
    other_entries = {
        "train_state": {"step": 3},
        f"{prefix}freqs_cis": torch.ones(3),
        "optimizer.state.x.step": torch.ones(()),
    }
    dcp.save(state | other_entries, checkpoint_id=tmp_path / "step-3", no_dist=True)
    load_foreign(tmp_path / "step-3", [other], family, args)
    assert same(other.state_dict(), model.state_dict())
    with open_weights(tmp_path, family, args) as weights:
        assert weights.step == 3


@pytest.mark.parametrize("version", ["torchtitan-v0.2", "torchtitan-main"])
@pytest.mark.parametrize("family, args", FAMILIES)
def test_a_written_torchtitan_checkpoint_has_the_tensors_of_its_version(family, args, version, tmp_path):
    model, other = (build(MODELS[family].build, args, seed) for seed in (0, 1))
    state = to_torchtitan_form(model.state_dict(), family, args)
    expected = state if version == "torchtitan-v0.2" else to_main_names(state, family)
    if version == "torchtitan-main":  # each router has a bias there
        biases = [name.replace("router.gate.weight", "expert_bias_E") for name in expected if ".router.gate." in name]
        expected = {name: torch.zeros(args.n_experts) for name in biases} | expected
    dcp.save(state, checkpoint_id=tmp_path / "step-3", no_dist=True)
    job = ResolvedJob(load([f"--model.name={family}"]))
    with open_weights(tmp_path / "step-3", family, args) as weights:
        conversion = Conversion(job, tmp_path, weights, args, torch.float32, None)
        conversion.write_torchtitan(tmp_path / "written" / "step-3", version)
    checkpoint = TorchtitanCheckpoint(tmp_path / "written" / "step-3")
    assert same({name: checkpoint.read(name) for name in checkpoint.tensors}, expected)
    load_foreign(tmp_path / "written" / "step-3", [other], family, args)
    assert same(other.state_dict(), model.state_dict())


def test_a_checkpoint_converts_to_each_version_and_back(tmp_path, capsys):
    source = TORCHTITAN_RUN / "step-4"
    output = run_convert(capsys, source, tmp_path / "step-4", "--to", "torchtitan-main", *MODEL_OPTIONS)
    assert "168,160 parameters, a checkpoint for PyTorch's torchtitan of August 2026" in output
    run_convert(capsys, tmp_path / "step-4", tmp_path / "again", "--to", "torchtitan-v0.2", *MODEL_OPTIONS)
    original, converted = TorchtitanCheckpoint(source), TorchtitanCheckpoint(tmp_path / "again")
    tensors = {name: converted.read(name) for name in converted.tensors}
    assert same(tensors, {name: original.read(name) for name in original.tensors})
    resized = [tmp_path / "b", "--to", "torchtitan-main", "--vocab-multiple", "64", *MODEL_OPTIONS]
    assert "August 2026 cannot hold the tokenizer that resized weights need" in errors_of_convert(
        capsys, source, *resized
    )


def test_a_bias_of_experts_is_dropped_only_if_it_changes_nothing(tmp_path):
    args = QWEN3_MOE["published"]
    model, other = (build(MODELS["qwen3_moe"].build, args, seed) for seed in (0, 1))
    state = to_main_names(to_torchtitan_form(model.state_dict(), "qwen3_moe", args), "qwen3_moe")
    for bias in (torch.zeros(args.n_experts), torch.ones(args.n_experts)):
        biases = {f"layers.{layer}.moe.expert_bias_E": bias for layer in range(args.n_layers)}
        dcp.save(state | biases, checkpoint_id=tmp_path / "step-3", no_dist=True)
        if bias.any():
            with pytest.raises(CheckpointError, match="layers.0.moe.expert_bias_E is not part of the model"):
                load_foreign(tmp_path / "step-3", [other], "qwen3_moe", args)
        else:
            load_foreign(tmp_path / "step-3", [other], "qwen3_moe", args)
            assert same(other.state_dict(), model.state_dict())


def test_layers_of_multi_token_prediction_are_not_written(tmp_path):
    args = replace(DEEPSEEK["v3"], n_mtp_layers=1)
    conversion = Conversion(ResolvedJob(load(["--model.name=deepseek"])), tmp_path, None, args, torch.float32, None)
    with pytest.raises(JobError, match="n_mtp_layers = 1.*--to hf"):
        conversion.write_torchtitan(tmp_path / "written", "torchtitan-main")


@pytest.mark.parametrize("name", ["mtp_layers.0.enorm.weight", "layers.0.attention.wq.weight", "foo"])
def test_a_tensor_without_a_counterpart_is_refused_by_name(name, tmp_path):
    args = LLAMA["llama3.2"]
    state = to_main_names(build(Llama, args, 0).state_dict(), "llama3.2") | {name: torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with (
        pytest.raises(CheckpointError, match=f"does not fit the model: {name} is not part of the model"),
        open_weights(tmp_path, "llama3.2", args),
    ):
        pass


def test_every_torchtitan_form_belongs_to_a_known_family():
    assert TORCHTITAN_NAMES.keys() <= MODELS.keys()


def initial_state_hash(folder: str, path: str, options: list[str]) -> str:
    """Return the sha256 of the weights with which a job on these ranks starts."""
    texts = jobs.write_texts(Path(folder) / "data")
    job = dict(model__tokenizer_path="bytes", checkpoint__enable=True, checkpoint__initial_load_path=path)
    argv = jobs.arguments(Path(folder) / "run", texts, **job, training__local_batch_size=4)
    argv = [argument for argument in argv if not argument.startswith(("--model.name", "--model.overrides"))]
    return jobs.state_hash(Trainer(load([*argv, *options]), read_ranks()))


def test_a_job_starts_with_the_same_weights_from_every_format_and_number_of_ranks(tmp_path, capsys):
    run_convert(capsys, TORCHTITAN_RUN, tmp_path / "hf", *MODEL_OPTIONS)
    run_convert(capsys, tmp_path / "hf", tmp_path / "ours")
    run_convert(capsys, tmp_path / "hf", tmp_path / "a.safetensors")
    paths = [TORCHTITAN_RUN, tmp_path / "hf", tmp_path / "ours", tmp_path / "a.safetensors"]
    options = [*MODEL_OPTIONS, "--model.flavor=debugmodel"]
    digests = {
        digest for path in paths for digest in run_ranks(2, initial_state_hash, str(tmp_path), str(path), options)
    }
    assert (
        digests == set(run_ranks(1, initial_state_hash, str(tmp_path), str(TORCHTITAN_RUN), options))
        and len(digests) == 1
    )


# Unsafe and damaged checkpoints: no code in them is executed, no other file is opened


class Payload:
    """An object whose unpickling creates a folder."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def copy(tmp_path) -> Path:
    shutil.copytree(TORCHTITAN_RUN / "step-4", tmp_path / "step-4")
    return tmp_path / "step-4"


def change_metadata(folder: Path, change) -> None:
    """Write a changed copy of the original metadata into a checkpoint."""
    metadata = FileSystemReader(TORCHTITAN_RUN / "step-4").read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def set_path(path: str):
    def change(metadata):
        for place in metadata.storage_data.values():
            place.relative_path = path

    return change


def test_a_payload_is_refused_and_not_run(copy, tmp_path):
    planted = tmp_path / "planted"
    for change in (
        lambda m: setattr(m, "planner_data", Payload(planted)),
        lambda m: m.state_dict_metadata.update(x=Payload(planted)),
    ):
        change_metadata(copy, change)
        with pytest.raises(CheckpointError, match="asks for posix.mkdir, which no checkpoint needs: not opened"):
            TorchtitanCheckpoint(copy)
    assert not planted.exists()
    FileSystemReader(copy).read_metadata()  # the control: torch's own reader runs it
    assert planted.exists()


@pytest.mark.parametrize("path", ["../secret.distcp", "/etc/passwd", "a/b.distcp", "x.txt"])
def test_metadata_that_point_outside_the_folder_are_refused(copy, path):
    change_metadata(copy, set_path(path))
    with pytest.raises(CheckpointError, match="metadata points to .* not opened"):
        TorchtitanCheckpoint(copy)


def test_missing_files_and_links_are_refused(copy, tmp_path):
    (copy / "__1_0.distcp").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="__1_0.distcp cannot be read .No such file"):
        TorchtitanCheckpoint(copy)
    (copy / "__1_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="__1_0.distcp is not a regular file"):
        TorchtitanCheckpoint(copy)


def transform(metadata):
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["zstd"]


def drop_norm_entry(metadata):
    norm_entries = [index for index in metadata.storage_data if index.fqn == "norm.weight"]
    del metadata.storage_data[norm_entries[0]]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda m: m.state_dict_metadata.clear(), "holds no weights"),
        (lambda m: m.state_dict_metadata.update(x=7), "is damaged .TypeError: a int in the place of"),
        (lambda m: setattr(m, "state_dict_metadata", []), "is damaged .TypeError: a list"),
        (lambda m: setattr(m, "storage_data", {1: 2}), "is damaged .TypeError: a int"),
        (set_path(7), "is damaged .TypeError: a int"),
        (transform, "is stored in a transformed way: not opened"),
        (drop_norm_entry, "norm.weight has no place in the files for its piece at"),
    ],
)
def test_malformed_metadata_are_refused(copy, change, message):
    change_metadata(copy, change)
    with pytest.raises(CheckpointError, match=message):
        TorchtitanCheckpoint(copy)


def test_truncated_files_are_refused(copy):
    for file in copy.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="distcp is cut off: .* is not all there"):
        TorchtitanCheckpoint(copy)
    (copy / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=".metadata is damaged"):
        TorchtitanCheckpoint(copy)


# Formats, and errors


def test_find_weights_recognizes_every_format(tmp_path, capsys):
    run_convert(capsys, TORCHTITAN_RUN, tmp_path / "hf", *MODEL_OPTIONS)
    run_convert(capsys, tmp_path / "hf", tmp_path / "ours")
    assert find_weights(tmp_path / "hf") == ("hf", tmp_path / "hf")
    assert find_weights(tmp_path / "ours") == ("native", tmp_path / "ours")
    shutil.copytree(TORCHTITAN_RUN / "step-4", tmp_path / "run/checkpoint/step-20")
    shutil.copytree(TORCHTITAN_RUN / "step-4", tmp_path / "run/checkpoint/step-3")
    assert find_weights(tmp_path / "run") == ("torchtitan", tmp_path / "run/checkpoint/step-20")
    (tmp_path / "run/checkpoint/step-20/.metadata").unlink()  # written last: without it the checkpoint is incomplete
    assert find_weights(tmp_path / "run/checkpoint") == ("torchtitan", tmp_path / "run/checkpoint/step-3")
    (tmp_path / "a.txt").write_bytes(b"x")
    for path, message in (
        ("nowhere", "no such file or folder"),
        (".", "no weights in it"),
        ("a.txt", "of another kind"),
    ):
        with pytest.raises(NothingLoadable, match=f"{message}.*; give a checkpoint, a folder of them"):
            find_weights(tmp_path / path)


JOB = ["--checkpoint.enable"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--checkpoint.initial_load_in_hf"], "true with a folder or file of Hugging Face only"),
        (
            ["--checkpoint.no-initial_load_model_only"],
            "only the weights of checkpoints of PyTorch's torchtitan are read",
        ),
    ],
)
def test_faults_of_jobs_from_a_torchtitan_checkpoint(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (fault,) = lines(*JOB, f"--checkpoint.initial_load_path={TORCHTITAN_RUN}", *MODEL_OPTIONS, *options)
    assert message in fault


def test_faults_of_jobs_from_a_folder_of_other_sizes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_convert(capsys, TORCHTITAN_RUN, tmp_path / "hf", *MODEL_OPTIONS)
    options = [*JOB, f"--checkpoint.initial_load_path={tmp_path / 'hf'}"]
    assert lines(*options, *MODEL_OPTIONS) == []
    (fault,) = lines(*options)
    assert "allowed: weights of llama3 debugmodel; dim is 32, the job's is 256; " in fault
    assert 'set model.flavor = "from_hf" and model.hf_folder = ' in fault
    (fault,) = lines(*options, *MODEL_OPTIONS, "--checkpoint.no-initial_load_model_only")
    assert "safetensors of Hugging Face hold no optimizer state" in fault
    (fault,) = lines(*options, "--model.name=qwen3_moe")
    assert "model_type = 'llama', but this model is a qwen3_moe" in fault


def test_refused_conversions(tmp_path, capsys):
    (tmp_path / "there").mkdir()
    assert f"{tmp_path}/there: exists; give another target" in errors_of_convert(
        capsys, TORCHTITAN_RUN, tmp_path / "there"
    )
    assert "no job found" in errors_of_convert(capsys, TORCHTITAN_RUN, tmp_path / "out")
    assert 'did you mean "8B"?' in errors_of_convert(
        capsys, TORCHTITAN_RUN, tmp_path / "out", *MODEL_OPTIONS, "--model.flavor=8b"
    )
    options = ["--model.name=llama3", "--model.flavor=debugmodel", "--model.overrides={n_layers = 3}"]
    errors = errors_of_convert(capsys, TORCHTITAN_RUN, tmp_path / "out", *options)
    assert "tok_embeddings.weight has shape (2048, 32), the model's is (2048, 256)" in errors
    assert "Give the sizes that it was trained with" in errors and "; and " in errors
    errors = errors_of_convert(capsys, TORCHTITAN_RUN, tmp_path / "out", "--model.name=qwen3_moe")
    assert "layers.0.attention.q_norm.weight is missing" in errors and not (tmp_path / "out").exists()
    assert "no such file or folder" in errors_of_convert(capsys, tmp_path / "no", tmp_path / "out")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/config.json").write_text('{"model_type": "flux"}')
    (tmp_path / "bad/model.safetensors").write_bytes(b"x" * 20)
    model_types = ", ".join(sorted({name for config in CONFIG_CONVERTERS.values() for name in config.model_types}))
    assert f"model_type = 'flux'; allowed: {model_types}\n" in errors_of_convert(
        capsys, tmp_path / "bad", tmp_path / "out"
    )
    assert "bad/model.safetensors is no safetensors file" in errors_of_convert(
        capsys, tmp_path / "bad/model.safetensors", tmp_path / "out"
    )
    assert cli.main(["convert", "a", "b", "--dtpye", "x"]) == 2
    assert "no option --dtpye; did you mean --dtype?" in capsys.readouterr().err


def test_an_unwritable_target_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for target in ("file/x", "file/x.safetensors"):
        errors = errors_of_convert(capsys, TORCHTITAN_RUN, tmp_path / target, *MODEL_OPTIONS)
        assert f"{tmp_path}/{target}: not written: " in errors


@pytest.mark.parametrize("to", ["hf", "native", "file"])
def test_a_conversion_that_fails_leaves_nothing(to, tmp_path, capsys, monkeypatch):
    """The disk is full while the weights are written, or after them, for the small files."""

    def full_disk(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_bytes" if to == "native" else "os.fsync", full_disk)
        errors = errors_of_convert(capsys, TORCHTITAN_RUN, tmp_path / "out", "--to", to, *MODEL_OPTIONS)
    assert "out: not written: " in errors and "No space left on device" in errors
    assert list(tmp_path.iterdir()) == []
    run_convert(capsys, TORCHTITAN_RUN, tmp_path / "out", "--to", to, *MODEL_OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("to", ["native", "file", "hf"])
def test_one_tensor_at_a_time_is_in_memory(to, tmp_path, capsys, monkeypatch):
    live: set[int] = set()
    peaks = []
    plain = Weights.__subclasses__()[1].full_tensor

    def tracked_whole(self, name):
        value = plain(self, name)
        live.add(id(value))
        weakref.finalize(value, live.discard, id(value))
        peaks.append(len(live))
        return value

    monkeypatch.setattr(Weights.__subclasses__()[1], "full_tensor", tracked_whole)
    run_convert(capsys, TORCHTITAN_RUN, tmp_path / "out", "--to", to, *MODEL_OPTIONS)
    assert len(peaks) == 30 and max(peaks) <= 1 + (to == "native")
