"""The adapter interface, tested with the smallest adapter (tests/support/scale_adapter.py).

Covers training, saving, loading and merging. The table of combinations compares gradients under all plans.
"""

import json
import logging
import math
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.jobs import arguments, full, train, write_texts
from tests.support.judged import lines
from tests.support.pool import run_ranks
from tests.support.scale_adapter import INITIAL, SCALE, ScaleAdapter
from torchtitan import adapters
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.checkpoint import load_model_for_inference
from torchtitan.config import manager
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.job import ResolvedJob
from torchtitan.models import SIZES
from torchtitan.models.spec import MODELS
from torchtitan.process.ranks import read_ranks
from torchtitan.rules import check
from torchtitan.training.trainer import Trainer

SCALES = {f"layers.{layer}.ffn_norm.scale" for layer in range(4)}


def register_adapter() -> None:
    """Register the adapter in a rank's process, where the test's fixture has no effect."""
    adapters.ADAPTERS["scale"] = SCALE


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(adapters.ADAPTERS, "scale", SCALE)


def train_adapter(argv: list[str]) -> tuple[list[dict], str]:
    register_adapter()
    return train(argv)


def weights_after(argv: list[str]) -> tuple[dict, dict, dict, dict]:
    """Train; return initial weights, final weights, optimizer state keys by parameter, and trainer state."""
    register_adapter()
    trainer = Trainer(manager.load(argv), read_ranks())
    before = {name: full(p.detach()).clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    after = {name: full(p.detach()).clone() for name, p in trainer.model.named_parameters()}
    names = {p: name for name, p in trainer.model.named_parameters()}
    state = {names[p]: sorted(keys) for o in trainer.optimizers for p, keys in o.state.items()}
    trainer.metrics.close()
    return (
        {n: t.numpy() for n, t in before.items()},
        {n: t.numpy() for n, t in after.items()},
        state,
        trainer.restorer.trainer_state(),
    )


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def base(tmp_path_factory, texts):
    """The folder of a plain job with its weights in each format that a job can start from; and these weights."""
    folder = tmp_path_factory.mktemp("base")
    options = dict(checkpoint__enable=True, training__steps=4, checkpoint__last_save_model_only=True)
    _, weights, _, _ = run_ranks(1, weights_after, arguments(folder, texts, **options))[0]
    run_ranks(1, train, arguments(folder, texts, **options, checkpoint__last_save_in_hf=True))  # only exports
    return folder, weights


@pytest.mark.parametrize("form", ["checkpoint", "export", "hugging face"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_initial_load_fills_the_base_and_not_the_adapter(tmp_path, texts, base, form, ranks):
    folder, plain = base
    path = {"checkpoint": folder / "checkpoint", "export": folder / "model", "hugging face": folder / "model_hf"}
    options = dict(
        checkpoint__enable=True,
        checkpoint__initial_load_path=path[form],
        checkpoint__initial_load_in_hf=form == "hugging face",
        adapter__kind="scale",
        training__local_batch_size=8 // ranks,
        training__steps=2,
    )
    before, after, state, trainer = run_ranks(ranks, weights_after, arguments(tmp_path, texts, **options))[0]
    assert set(before) - set(plain) == SCALES
    for name, tensor in before.items():
        expected = torch.full((1,), INITIAL).numpy() if name in SCALES else plain[name]
        assert (tensor == expected).all(), name
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed == SCALES, "frozen parameters stay bit-equal"
    assert set(state) == SCALES, "frozen parameters have no optimizer state"
    assert trainer["adapter"] == {"steps": 2}


def test_a_dora_starts_from_weights_and_from_another_dora(tmp_path, texts, base):
    """Its magnitudes are the norms of the base's rows, or the other DoRA's trained magnitudes."""
    options = LORA | dict(adapter__kind="dora", training__steps=2, adapter__save="whole")
    first = arguments(tmp_path / "a", texts, **options, checkpoint__initial_load_path=base[0] / "model")
    initial, final, _, _ = run_ranks(1, weights_after, first)[0]
    rows = torch.from_numpy(initial["layers.0.attention.wq.weight"]).norm(dim=1)
    torch.testing.assert_close(torch.from_numpy(initial["layers.0.attention.wq.lora_magnitude"]), rows)
    second = arguments(tmp_path / "b", texts, **options, checkpoint__initial_load_path=tmp_path / "a" / "checkpoint")
    continued = run_ranks(1, weights_after, second)[0][0]
    assert {name for name in continued if (continued[name] != final[name]).any()} == set()


@pytest.mark.parametrize("ranks, plan", [(1, {}), (2, {}), (2, {"parallelism__pipeline_parallel_degree": 2})])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, texts, ranks, plan):
    common = plan | dict(adapter__kind="scale", checkpoint__enable=True, checkpoint__interval=3, debug__seed=3)
    if "parallelism__pipeline_parallel_degree" not in plan:
        common |= dict(training__local_batch_size=8 // ranks)
    common |= dict(training__steps=6)
    uninterrupted = run_ranks(ranks, train_adapter, arguments(tmp_path, texts, **common))[0][1]
    resumed = run_ranks(ranks, train_adapter, arguments(tmp_path, texts, **common, checkpoint__load_step=3))[0][1]
    assert resumed == uninterrupted
    saved = json.loads((tmp_path / "checkpoint" / "step-00000006" / "state.json").read_text())
    assert saved["trainer"]["adapter"] == {"steps": 6}


def test_an_export_has_the_adapter_merged(tmp_path, texts, base):
    """The export is a plain model with the same logits as the adapted one."""
    options = dict(adapter__kind="scale", checkpoint__enable=True, training__steps=3, training__local_batch_size=4)
    options |= dict(checkpoint__initial_load_path=base[0] / "model", checkpoint__last_save_model_only=True)
    argv = arguments(tmp_path, texts, **options)
    _, after, _, _ = run_ranks(2, weights_after, argv)[0]
    plain = ModelBuilder(ResolvedJob(manager.load(argv))).meta_model().to_empty(device="cpu")
    load_model_for_inference(tmp_path / "model", plain)
    adapted = ModelBuilder(ResolvedJob(manager.load(argv))).adapted_model()[0].to_empty(device="cpu")
    adapted.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in after.items()})
    tokens = torch.arange(24).view(2, 12)
    torch.testing.assert_close(plain(tokens), adapted(tokens), rtol=1e-5, atol=1e-5)


def test_a_plain_job_refuses_an_adapted_checkpoint(tmp_path, texts):
    options = dict(checkpoint__enable=True, training__steps=1)
    run_ranks(1, train_adapter, arguments(tmp_path / "a", texts, **options, adapter__kind="scale"))
    plain = arguments(tmp_path / "b", texts, **options, checkpoint__initial_load_path=tmp_path / "a" / "checkpoint")
    with pytest.raises(AssertionError, match=r"it also holds model.layers.0.ffn_norm.scale"):
        run_ranks(1, train_adapter, plain)


def test_train_fully_selects_base_parameters():
    with torch.device("meta"):
        model = MODELS["llama3"].build(SIZES["llama3"]["debugmodel"])
    adapter = ScaleAdapter(Options(kind="scale", train_fully=["norm.*", "*.0.attention_norm.*"]))
    adapter.install(model, MODELS["llama3"].plan)
    other_names = {name for name, p in model.named_parameters() if p.requires_grad} - adapter.added_parameters
    assert other_names == {"norm.weight", "layers.0.attention_norm.weight"}
    assert (
        adapter.frozen_parameters
        == {name for name, _ in model.named_parameters()} - other_names - adapter.added_parameters
    )
    num_parameters = SIZES["llama3"]["debugmodel"].num_parameters + 6  # blocks
    assert (
        adapter.describe()
        == f"scale: {6 + 2 * 256} of {num_parameters:,} parameters trained ({51800 / num_parameters:.2g} %)"
    )


def test_a_tied_head_is_trained_by_either_of_its_names():
    for name in ("output.weight", "tok_embeddings.weight"):
        with torch.device("meta"):
            model = MODELS["llama3.2"].build(SIZES["llama3.2"]["debugmodel"])
        ScaleAdapter(Options(kind="scale", train_fully=[name])).install(model, MODELS["llama3.2"].plan)
        assert model.output.weight is model.tok_embeddings.weight and model.output.weight.requires_grad


def test_a_pattern_that_fits_nothing_is_refused():
    with torch.device("meta"):
        model = MODELS["llama3"].build(SIZES["llama3"]["debugmodel"])
    with pytest.raises(
        ValueError, match=r"train_fully = 'nom.\*' fits nothing .* it has layers.\*.attention.wk.weight"
    ):
        ScaleAdapter(Options(train_fully=["nom.*"])).install(model, MODELS["llama3"].plan)


def test_faults():
    (kind,) = lines("--adapter.kind=scael")
    assert kind.startswith('adapter.kind: given "scael"; allowed: one of "none", ') and kind.endswith('mean "scale"?')
    (idle,) = lines('--adapter.train_fully=["norm.*"]')
    assert idle.startswith('adapter.train_fully: given ["norm.*"]; allowed: nothing with adapter.kind = "none"')


def test_options_of_other_kinds_are_refused():
    scale = ("--adapter.kind=scale", "--checkpoint.enable")
    assert lines(*scale, '--adapter.train_fully=["norm.*"]') == []
    idle = lines(*scale, "--adapter.alpha=3", '--adapter.target=["*none*"]', "--adapter.last_save_in_peft")
    allowed = 'allowed: nothing with adapter.kind = "scale"; leave it out'
    assert idle == [
        f"adapter.alpha: given 3.0; {allowed}",
        f'adapter.target: given ["*none*"]; {allowed}',
        f"adapter.last_save_in_peft: given true; {allowed}",
    ]


def test_an_adapter_without_a_folder_format_is_neither_read_nor_written(tmp_path):
    with torch.device("meta"):
        model = MODELS["llama3"].build(SIZES["llama3"]["debugmodel"])
    adapter = ScaleAdapter(Options(kind="scale"))
    adapter.install(model, MODELS["llama3"].plan)
    form = MODELS["llama3"].hf.tensor_map(model.args)
    with pytest.raises(JobError, match="'scale' has no folder format; write the whole model"):
        adapter.write_folder(tmp_path / "adapter", form, {}, "")
    with pytest.raises(JobError, match="'scale' has no folder format"):
        adapter.read_folder(tmp_path, form)


def test_the_registry_names_adapters():
    for name in adapters.ADAPTERS:
        assert Path(name).name == name != adapters.NONE


LORA = dict(adapter__kind="lora", adapter__rank=4, adapter__target='["*wq", "*w2"]', checkpoint__enable=True)


@pytest.mark.parametrize(
    "form, ranks, degrees", [("native", 2, "data"), ("hugging face", 1, "data"), ("native", 2, "pp")]
)
def test_a_checkpoint_of_the_adapter_alone(tmp_path, texts, base, form, ranks, degrees):
    """It contains only the adapter, refers to the base, and resumes bit-exactly; another base is refused."""
    folder, plain = base
    is_hf = form == "hugging face"
    options = LORA | dict(adapter__save="alone", checkpoint__interval=2, training__steps=4, debug__seed=5)
    options |= dict(checkpoint__initial_load_path=folder / ("model_hf" if is_hf else "model"))
    options |= dict(checkpoint__initial_load_in_hf=is_hf)
    options |= (
        dict(parallelism__pipeline_parallel_degree=2)
        if degrees == "pp"
        else dict(training__local_batch_size=8 // ranks)
    )
    uninterrupted = run_ranks(ranks, train_adapter, arguments(tmp_path, texts, **options))[0][1]
    resumed = run_ranks(ranks, train_adapter, arguments(tmp_path, texts, **options, checkpoint__load_step=2))[0][1]
    assert resumed == uninterrupted
    step = tmp_path / "checkpoint" / "step-00000004"
    saved_tensors = json.loads((step / "manifest.json").read_text())["tensors"]
    assert {n for n in saved_tensors if n.startswith("model.")} == {
        f"model.layers.{i}.{m}.lora_{x}" for i in range(4) for m in ("attention.wq", "feed_forward.w2") for x in "AB"
    }
    assert not [name for name in saved_tensors if name.startswith("optimizer.") and ".lora_" not in name]
    if degrees == "data":
        other = dict(options, checkpoint__initial_load_path=folder / "checkpoint", checkpoint__initial_load_in_hf=False)
        with pytest.raises(AssertionError, match=r"it holds an adapter to the model that was in .*model.* another"):
            run_ranks(ranks, train_adapter, arguments(tmp_path, texts, **other))
        assert check(manager.load(arguments(tmp_path, texts, **options)), ranks, "cpu") == []
        (fault,) = check(manager.load(arguments(tmp_path, texts, **other)), ranks, "cpu")  # before any rank starts
        assert fault.key == "checkpoint.initial_load_path" and "an adapter to the model that was in" in str(fault)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_an_adapter_only_checkpoint_is_hardly_larger_than_its_tensors(tmp_path, texts, kind):
    """All files of a checkpoint by two ranks are at most 5 % larger than its tensors (width 1024, LoRA rank 64)."""
    sizes = "{dim=1024, n_layers=2, n_heads=16, n_kv_heads=8, vocab_size=260}"
    options = dict(model__overrides=sizes, checkpoint__enable=True, training__steps=1, training__seq_len=8)
    options |= dict(training__local_batch_size=1, training__global_batch_size=2)
    plain = (
        ModelBuilder(ResolvedJob(manager.load(arguments(tmp_path, texts, **options))))
        .meta_model()
        .to_empty(device="cpu")
    )
    for parameter in plain.parameters():
        parameter.data.zero_()
    MODELS["llama3"].hf.save_hf(tmp_path / "base", plain.state_dict(), plain.args, dtype=torch.bfloat16)
    options |= dict(checkpoint__initial_load_path=tmp_path / "base", checkpoint__initial_load_in_hf=True)
    options |= dict(adapter__kind=kind, adapter__rank=64, adapter__save="alone")
    run_ranks(2, train_adapter, arguments(tmp_path / "run", texts, **options))
    step = tmp_path / "run" / "checkpoint" / "step-00000001"
    saved_tensors = json.loads((step / "manifest.json").read_text())["tensors"]
    adapter = sum(math.prod(saved_tensors[name]["shape"]) for name in saved_tensors if name.startswith("model."))
    assert adapter == 2 * 64 * sum((4 * 1024 + 2 * (1024 + 512), 3 * (1024 + 2816)))
    on_disk = sum(path.stat().st_size for path in step.iterdir())
    assert 3 * 4 * adapter < on_disk <= 1.05 * 3 * 4 * adapter, "each parameter and its two moments"


def test_full_and_adapter_only_checkpoints_are_distinguished(tmp_path, texts, base):
    options = LORA | dict(training__steps=1, checkpoint__initial_load_path=base[0] / "model", adapter__save="whole")
    run_ranks(1, train_adapter, arguments(tmp_path, texts, **options))
    options |= dict(checkpoint__allow_config_change='["adapter.save"]', adapter__save="alone")
    with pytest.raises(AssertionError, match=r"it holds a whole model, the job an adapter alone: write adapter.save"):
        run_ranks(1, train_adapter, arguments(tmp_path, texts, **options))


STARTS = {
    "": "whole",
    "checkpoint": "whole",  # retention may delete checkpoints in this folder
    "checkpoint/step-00000004": "alone",
    "model": "alone",
    "model_hf": "alone",
}


@pytest.mark.parametrize("start", STARTS)
def test_the_adapter_is_saved_alone_if_the_base_is_a_permanent_folder(start, tmp_path, texts, base):
    options = LORA | dict(training__steps=2, checkpoint__interval=1)
    if start:
        options |= dict(checkpoint__initial_load_path=base[0] / start)
        options |= dict(checkpoint__initial_load_in_hf=start == "model_hf")
    argv = arguments(tmp_path, texts, **options)
    ((_, state, lines),) = run_ranks(1, train_and_log, argv)
    saved_tensors = json.loads((tmp_path / "checkpoint/step-00000002/manifest.json").read_text())["tensors"]
    is_adapter_only = all(".lora_" in name for name in saved_tensors if name.startswith("model."))
    assert is_adapter_only == (STARTS[start] == "alone")
    (line,) = [line for line in lines if line.startswith("saves ")]
    assert f"adapter.save = {STARTS[start]}" in line
    assert manager.load([str(tmp_path / "config.toml")]).adapter.save == STARTS[start]
    shutil.rmtree(tmp_path / "checkpoint/step-00000002")
    assert check(manager.load(argv), 1, "cpu") == []
    ((rows, repeated_state, _),) = run_ranks(1, train_and_log, argv)
    assert [row["step"] for row in rows] == [1, 2] and repeated_state == state


def test_starting_from_an_adapter_only_checkpoint_is_refused_with_a_remedy(tmp_path, texts, base):
    options = LORA | dict(training__steps=1)
    run_ranks(
        1, train_adapter, arguments(tmp_path / "a", texts, **options, checkpoint__initial_load_path=base[0] / "model")
    )
    second = arguments(tmp_path / "b", texts, **options, checkpoint__initial_load_path=tmp_path / "a" / "checkpoint")
    with pytest.raises(AssertionError, match="holds an adapter alone, and its model is in .*model: merge the two by"):
        run_ranks(1, train_adapter, second)


def test_a_run_that_saved_full_models_continues_to(tmp_path, texts, base):
    """Runs saved whole models before the default changed."""
    options = LORA | dict(checkpoint__interval=2, checkpoint__initial_load_path=base[0] / "model")
    run_ranks(1, train_adapter, arguments(tmp_path, texts, **options, training__steps=2, adapter__save="whole"))
    rows, _ = run_ranks(1, train_adapter, arguments(tmp_path, texts, **options, training__steps=4))[0]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for step in (2, 4):
        manifest = tmp_path / f"checkpoint/step-{step:08d}/manifest.json"
        assert "model.output.weight" in json.loads(manifest.read_text())["tensors"]


def train_and_log(argv: list[str]) -> tuple[list[dict], str, list[str]]:
    """Train and return metrics, state, and the lines that the run logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("torchtitan")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        return *train_adapter(argv), lines
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("ranks, degree", [(1, {}), (2, {}), (2, {"parallelism__pipeline_parallel_degree": 2})])
def test_peft_export_and_import(tmp_path, texts, base, ranks, degree):
    """A job exports its adapter in peft's layout, and another one starts from exactly these weights."""
    options = LORA | degree | dict(checkpoint__initial_load_path=base[0] / "model", training__steps=3)
    options |= {} if degree else dict(training__local_batch_size=8 // ranks)
    out = arguments(tmp_path / "a", texts, **options, adapter__last_save_in_peft=True)
    _, after, _, _ = run_ranks(ranks, weights_after, out)[0]
    into = arguments(tmp_path / "b", texts, **options, adapter__initial_path=tmp_path / "a" / "adapter")
    before, _, _, _ = run_ranks(ranks, weights_after, into)[0]
    assert set(before) == set(after) and all((before[name] == after[name]).all() for name in before)


def validation_losses(argv):
    register_adapter()
    train(argv)
    rows = Path(manager.load(argv).job.dump_folder, "metrics.jsonl").read_text().splitlines()
    return [row["validation_loss"] for row in map(json.loads, rows) if "validation_loss" in row]


def test_an_adapter_learns_other_text(tmp_path, texts):
    """LoRA on text with other words lowers the loss there below the loss of its trained base."""
    other = tmp_path / "other.jsonl"
    swapped = texts.read_text().translate(str.maketrans("aeghlmpt", "oiuyrnbd"))
    other.write_text(swapped.replace('"dixd"', '"text"'))
    held_out = dict(validation__enable=True, validation__dataset="text", validation__dataset_path=other)
    held_out |= dict(validation__steps=2, validation__seq_len=32, checkpoint__enable=True)
    base_options = held_out | dict(training__steps=60, validation__freq=60, checkpoint__last_save_model_only=True)
    (before,) = run_ranks(1, validation_losses, arguments(tmp_path / "base", texts, **base_options))[0]
    lora_options = held_out | LORA | dict(training__steps=30, validation__freq=30, optimizer__lr=2e-2)
    lora_options |= dict(adapter__target='["all-linear"]', checkpoint__initial_load_path=tmp_path / "base" / "model")
    (after,) = run_ranks(1, validation_losses, arguments(tmp_path / "lora", other, **lora_options))[0]
    assert after < 0.8 * before


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--adapter.save=alone"], 'adapter.save: given "alone"; allowed: "whole" without checkpoint.ini'),
        (
            ["--adapter.initial_path=nowhere", "--checkpoint.enable"],
            'given "nowhere"; allowed: a folder with adapter_co',
        ),
        (
            ["--adapter.last_save_in_peft", "--checkpoint.enable", '--adapter.train_fully=["norm.weight"]'],
            "adapter.last_save_in_peft: given true; allowed: false with adapter.train_fully",
        ),
        (
            ["--adapter.last_save_in_peft", "--checkpoint.enable", "--adapter.train_dense_rest"],
            "adapter.last_save_in_peft: given true; allowed: false with adapter.train_dense_rest",
        ),
        (
            ["--model.name=llama3.2", '--adapter.target=["output"]', "--checkpoint.enable"]
            + ["--checkpoint.last_save_model_only"],
            "checkpoint.last_save_model_only: given true; allowed: false with an adapter on a tied head",
        ),
        (
            ["--model.name=llama3.2", '--adapter.target=["output"]', "--adapter.relora.every=10"]
            + ["--lr_scheduler.decay_type=relora_cosine", "--lr_scheduler.cycle_length=10", "--training.steps=40"]
            + ["--lr_scheduler.warmup_steps=2", "--lr_scheduler.restart_warmup_steps=2"],
            "adapter.relora.every: given 10; allowed: unset with an adapter on a tied head",
        ),
    ],
    ids=str,
)
def test_faults_of_saving_options(arguments, message):
    (fault,) = lines("--adapter.kind=lora", *arguments)
    assert message in fault
