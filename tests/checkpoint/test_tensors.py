"""Checkpoints that move between plans: saved under any of dp, tp, cp and pp, loaded under any other, bit for bit."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from tests.support import jobs
from tests.support.checkpoint_job import rank
from tests.support.checkpoint_plans import ARGS, MOMENTS, PLANS, TIED, Plan, PlannedModel, reference
from tests.support.jobs import full
from tests.support.pool import run_ranks
from torchtitan.checkpoint import CheckpointError, layout, load_model_for_inference, storage, tensors
from torchtitan.models import SIZES
from torchtitan.models.llama.model import HF

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected call of")

EVERY = [plan for plans in PLANS.values() for plan in plans]


def folder_of(root: Path, plan: Plan) -> Path:
    return root / str(plan).replace(" ", "_")


def is_whole(job: PlannedModel) -> bool:
    """True if the full tensors equal the reference, so the plan itself shards correctly."""
    expected = {name: parameter.detach() for name, parameter in reference(TIED).named_parameters()}
    expected["output.weight"] = expected["tok_embeddings.weight"]
    for place, value in job.tensors().items():
        name, key = place.split("/")[1].rsplit(".", 1)
        if key in ("weight", *MOMENTS) and not torch.equal(full(value), expected[name] * MOMENTS.get(key, 1.0)):
            return False
    return True


def save_all(root: Path, plans: list[Plan]) -> None:
    """Save a checkpoint under each plan, in turn with every mode of async saves."""
    for index, plan in enumerate(plans):
        job = PlannedModel(plan).train()
        assert is_whole(job), plan
        mode = ("async", "async_with_pinned_mem", "disabled")[index % 3]
        checkpointer = job.checkpointer(folder_of(root, plan), async_mode=mode)
        assert checkpointer.maybe_save(1, last=True)
        if mode != "disabled":
            job.spoil()  # an async save must have copied the tensors
        checkpointer.finish()


def load_all(root: Path, plans: list[Plan], every: int) -> list[tuple[str, str, list[str]]]:
    """Load every `every`-th saved plan into each of `plans`; return (saved, loaded, tensors that are not bit-equal)."""
    differences = []
    for start, plan in enumerate(plans):
        job = PlannedModel(plan).train()
        expected = job.snapshot()
        job.spoil()
        job.renew_optimizers()  # as in a new job: no state yet
        checkpointer = job.checkpointer(root)
        for saved in EVERY[start % every :: every]:
            checkpointer.folder = folder_of(root, saved)
            assert checkpointer.load() == 1
            if differing := job.differing(expected):
                differences.append((str(saved), str(plan), differing))
            job.spoil()
    return differences


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Save checkpoints of all plans; return their folder."""
    root = tmp_path_factory.mktemp("plans")
    for world, plans in PLANS.items():
        run_ranks(world, save_all, root, plans)
    return root


# to save time, a plan of two ranks loads a third of the saved ones in turn, of four ranks a fifth
@pytest.mark.parametrize(("world", "every"), [(1, 1), (2, 3), (4, 5)])
def test_a_plan_loads_what_another_saved_bit_equal(saved, world, every):
    assert run_ranks(world, load_all, saved, PLANS[world], every) == [[]] * world


def test_names_shapes_and_bytes_do_not_depend_on_the_plan(saved):
    """The manifest lists all tensors of the model, and each element is stored once."""
    plain = layout.check_complete(folder_of(saved, Plan()) / "step-00000001")
    counts = layout.read_state(folder_of(saved, Plan()) / "step-00000001")["optimizer"]
    assert len(counts) == len(list(reference(TIED).parameters()))
    names = {f"model.{name}" for name, _ in reference(TIED).named_parameters()}
    assert {name for name in plain.tensors if name.startswith("model.")} == names
    for plan in EVERY:
        folder = folder_of(saved, plan) / "step-00000001"
        manifest = layout.check_complete(folder)
        assert manifest.tensors == plain.tensors, plan
        assert layout.read_state(folder)["optimizer"] == counts
        for name, entry in storage.read_metadata(folder, manifest).state_dict_metadata.items():
            stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            assert stored == math.prod(entry.size), (plan, name)


# Mismatches


def load_errors(root: Path, plan: Plan) -> list[str]:
    """Return the messages of loads that must be refused and change nothing."""
    messages = []
    for args, adamw in [
        (dataclasses.replace(TIED, n_layers=3), None),
        (dataclasses.replace(TIED, n_layers=5), None),
        (ARGS, None),
        (dataclasses.replace(TIED, n_kv_heads=2), None),
        (TIED, torch.optim.AdamW),
    ]:
        job = PlannedModel(plan, args)
        if adamw:
            job.optimizers = [adamw(part.parameters(), foreach=False) for part in job.parts]
        checkpointer = job.checkpointer(folder_of(root, Plan()))
        tensors.allocate_state(job.optimizers)
        before = job.snapshot()
        with pytest.raises(CheckpointError) as caught:
            checkpointer.load()
        assert job.differing(before) == []
        messages.append(str(caught.value).split("does not fit this job: ")[1])
    checkpointer = PlannedModel(plan).checkpointer(folder_of(root, Plan()))
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:
            patch.setattr(tensors, "model_tensors", lambda parts: 1 / 0)
        for action in (checkpointer.load, lambda: checkpointer.export_model(root / "never", torch.float32, 1)):
            with pytest.raises(CheckpointError) as caught:
                action()
            messages.append(str(caught.value))
    return messages


def test_all_pipeline_ranks_report_the_same_mismatch(saved):
    """Names are compared over all ranks, since each rank has only part of the model."""
    one, other = run_ranks(2, load_errors, saved, Plan(pp=2))
    assert one == other
    fewer, more, untied, wider, uncounted, one_rank, one_rank_export = one
    assert fewer.startswith("it also holds model.layers.3.attention.wk.weight, model.layers.3.attention.wo.weight")
    assert "lacks" not in fewer
    assert more.startswith("it lacks model.layers.4.attention.wk.weight") and "also holds" not in more
    assert untied.startswith("it lacks model.output.weight, optimizer.state.output.weight.count")
    assert "differ in model.layers.0.attention.wk.weight (saved float32 [10, 20], job float32 [20, 20])" in wider
    assert uncounted.startswith("it also holds optimizer.state.layers.0.attention.wk.weight.count, ")
    assert one_rank == "collecting what to load failed on rank 1: ZeroDivisionError: division by zero"
    assert one_rank_export == "collecting what to save failed on rank 1: ZeroDivisionError: division by zero"


# Weights only


def export(root: Path, plan: Plan) -> None:
    job = PlannedModel(plan)
    assert job.checkpointer(root / "unused").export_model(root / "export", torch.bfloat16, 1)


def start_from(root: Path, plan: Plan) -> bool:
    """Load only the weights of another plan's checkpoint and of its bfloat16 export; optimizers stay untouched."""
    job = PlannedModel(plan)
    expected = job.snapshot()
    job.spoil()
    assert job.checkpointer(root / "new").initial_load(folder_of(root, Plan(tp=4))) == 0
    assert job.differing(expected) == [] and not any(optimizer.state for optimizer in job.optimizers)
    job.spoil()
    assert job.checkpointer(root / "new").initial_load(root / "export") == 0
    assert job.differing({place: value.bfloat16().float() for place, value in expected.items()}) == []
    job.spoil()
    assert load_model_for_inference(folder_of(root, Plan(tp=2)), *job.parts) == 1
    return job.differing(expected) == []


@pytest.fixture(scope="module")
def exported(saved) -> Path:
    """Export the weights of a pipeline in bfloat16 next to the checkpoints."""
    run_ranks(4, export, saved, Plan(tp=2, pp=2, stages=2, style="v"))
    return saved


def test_a_pipeline_starts_from_weights_of_other_plans(exported):
    assert run_ranks(2, start_from, exported, Plan(pp=2)) == [True] * 2
    assert run_ranks(4, start_from, exported, Plan(dp_shard=2, pp=2)) == [True] * 4


def test_an_export_of_a_pipeline_is_read_on_one_device(exported):
    model = reference(TIED, seed=1)
    assert load_model_for_inference(exported / "export", model) == 1
    for name, parameter in reference(TIED).named_parameters():
        assert torch.equal(model.get_parameter(name), parameter.bfloat16().float()), name


def test_any_checkpoint_is_read_on_one_device(saved):
    for plan in EVERY:
        model = reference(TIED, seed=1)
        assert load_model_for_inference(folder_of(saved, plan), model) == 1
        differing = [n for n, p in reference(TIED).named_parameters() if not torch.equal(model.get_parameter(n), p)]
        assert differing == [], plan


# A run that changes its plan every two steps


def parallel(**options: object) -> dict[str, object]:
    return {f"parallelism__{name}": value for name, value in options.items()}


CHAIN = [
    (1, {}),
    (2, parallel(data_parallel_shard_degree=2)),
    (2, parallel(tensor_parallel_degree=2)),
    (2, parallel(context_parallel_degree=2)),
    (2, parallel(pipeline_parallel_degree=2, pipeline_parallel_schedule="ZBVZeroBubble")),
    (4, parallel(pipeline_parallel_degree=2, tensor_parallel_degree=2)),
    (1, {}),
]


def test_a_run_that_changes_plans_has_the_losses_of_one_device(tmp_path):
    """Weights, moments, schedule and data order are restored, so the losses equal an uninterrupted run on one device.

    In float32 the plans sum in another order: 1e-5 relative. Finally both exports contain the weights unchanged.
    """
    texts, steps = jobs.write_texts(tmp_path / "data"), 2 * len(CHAIN)
    sizes = dict(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=16, tied_embeddings=True)
    overrides = ", ".join(f"{name}={str(value).lower()}" for name, value in sizes.items())
    common = {
        "model__overrides": f"{{{overrides}}}",
        "training__local_batch_size": 4,
        "lr_scheduler__total_steps": steps,
    }
    straight = jobs.arguments(tmp_path / "straight", texts, **common, training__steps=steps)
    ((expected, _),) = run_ranks(1, jobs.train, straight)
    folder, losses = tmp_path / "run", []
    common |= {"checkpoint__enable": True, "checkpoint__interval": 100}
    for index, (world, plan) in enumerate(CHAIN):
        argv = jobs.arguments(folder, texts, **common, **plan, training__steps=2 * (index + 1))
        for in_hf in (True, False) if world == 4 else ():  # the second run trains no step and only exports
            options = {"checkpoint.last_save_model_only": True, "checkpoint.last_save_in_hf": in_hf}
            run_ranks(world, jobs.train, [*argv, *(f"--{name}={value}".lower() for name, value in options.items())])
        if world != 4:
            run_ranks(world, jobs.train, argv)
        losses = [row["loss"] for row in jobs.logged_steps(folder)]
    assert losses == pytest.approx([row["loss"] for row in expected], rel=1e-5)
    args = dataclasses.replace(SIZES["llama3"]["debugmodel"], **sizes)
    saved, by_hf, by_export = (reference(args, seed) for seed in (1, 2, 3))
    load_model_for_inference(folder / "checkpoint" / layout.step_name(steps - 2), saved)
    load_model_for_inference(folder / "model", by_export)
    HF.load_hf(folder / "model_hf", by_hf, args)
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter, by_hf.get_parameter(name)), name
        assert torch.equal(parameter, by_export.get_parameter(name)), name
