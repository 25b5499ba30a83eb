"""Tests of `torchtitan diff`: planted changes of an option, a logged value and one bit of a tensor are located."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import jobs
from tests.support.expert_jobs import JOB as JOB_WITH_EXPERTS
from torchtitan import cli
from torchtitan.checkpoint.stored_tensors import open_tensors
from torchtitan.commands import diff

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NOT_COMPARED = "tensors  no checkpoint of the same step, not compared"
NAME = "model.layers.2.feed_forward.w1.weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    home = tmp_path_factory.mktemp("diff")
    texts = jobs.write_texts(home)
    options = {"checkpoint__enable": True, "checkpoint__interval": 2, "training__steps": 4}
    jobs.train(jobs.arguments(home / "a", texts, **options))
    return home / "a"


@pytest.fixture
def copy(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "b"))


def compare(a, b, capsys, *arguments) -> tuple[int, list[str]]:
    code = cli.main(["diff", str(a), str(b), *arguments])
    output = capsys.readouterr()
    return code, (output.out + output.err).splitlines()


def flip_a_bit(step_folder: Path, name: str, shards: int = 1) -> float:
    """Flip the lowest bit of the fourth element of a float32 tensor, and return its former value.

    `shards`: parts that it was saved in, along its first dimension.
    """
    with open_tensors("native", step_folder) as tensors:
        tensor = tensors.read(name)
    content = jobs.tensor_bytes(tensor[: len(tensor) // shards])
    (file,) = [path for path in step_folder.glob("*.distcp") if content in path.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(content) + 4 * 3] ^= 1
    file.write_bytes(data)
    return float(tensor.flatten()[3])


def test_equal_runs(run, copy, capsys):
    assert compare(run, copy, capsys) == (
        0,
        [
            "options  equal",
            "steps    4 that both logged (A up to 4, B up to 4), equal",
            "tensors  up to step 4, 2 of 2 common checkpoints compared, equal",
            "A and B are equal in all of this",
        ],
    )


def test_samples_of_a_step_are_compared_where_ranks_decide_them(run, copy, capsys):
    (path,) = (copy / "starts").glob("*.json")
    recorded = json.loads(path.read_text())
    assert recorded == {
        "degrees": {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1},
        **{"samples": 8, "ranks": 1, "ranks_per_machine": 1, "device": "cpu"},
    }
    path.write_text(json.dumps(recorded | {"samples": 16}))
    code, lines = compare(run, copy, capsys)
    assert code == 1 and lines[:2] == ["options  1 differs", "  training.global_batch_size 8 -> 16"]
    assert compare(run, copy, capsys, "--json")[1][0].count('"plan": false') == 1


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"degrees": {}, "samples": "8"}'])
def test_samples_of_earlier_versions_are_those_of_the_checkpoint(damage, run, copy, capsys, monkeypatch):
    """Their starts recorded no plan; one that is damaged is taken for none."""
    (path,) = (copy / "starts").glob("*.json")
    path.write_text(damage) if damage else path.unlink()
    read = diff.layout.read_state

    def read_doubled(folder):
        state = read(folder)
        state["trainer"]["samples"] *= 2 if copy in folder.parents else 1
        return state

    monkeypatch.setattr(diff.layout, "read_state", read_doubled)
    code, lines = compare(run, copy, capsys)
    samples = read(run / "checkpoint/step-00000004")["trainer"]["samples"]
    assert code == 1 and lines[:2] == ["options  1 differs", f"  training.global_batch_size {samples} -> {2 * samples}"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["data_parallel_shard_degree 1 -> 2"]),
        (
            {"parallelism__data_parallel_shard_degree": 1, "parallelism__pipeline_parallel_degree": 2},
            ["pipeline_parallel_degree 1 -> 2"],
        ),
        (
            {"parallelism__data_parallel_shard_degree": 1, "parallelism__tensor_parallel_degree": 2},
            ["tensor_parallel_degree 1 -> 2"],
        ),
    ],
    ids=["fsdp", "pp", "tp"],
)
def test_runs_under_different_plans(options, expected, run, copy, tmp_path, capsys):
    """What the ranks decide is compared as it was, plans are no difference, and tensors are compared one by one."""
    texts = run.parent / "texts.jsonl"
    local = 8 if options else 4
    options |= {"training__local_batch_size": local, "training__global_batch_size": -1, "training__steps": 4}
    options |= {"checkpoint__enable": True, "checkpoint__interval": 2}
    code, _, err = jobs.run(jobs.arguments(tmp_path / "other", texts, **options), ranks=2)
    assert code == 0, err
    code, lines = compare(run, tmp_path / "other", capsys, "--tolerance", "1e-4")
    plan = ["  training.local_batch_size 8 -> 4"] * (local == 4) + [f"  parallelism.{change}" for change in expected]
    assert (code, lines) == (
        0,
        [
            "options  equal",
            f"plan     does not change the results, {len(plan)} differ{'s' * (len(plan) == 1)}",
            *plan,
            "steps    4 that both logged (A up to 4, B up to 4), equal",
            "tensors  up to step 4, 2 of 2 common checkpoints compared, equal",
            "A and B are equal in all of this",
        ],
    )
    flip_a_bit(copy / "checkpoint/step-00000002", NAME)
    code, lines = compare(copy, tmp_path / "other", capsys)
    assert lines[-1] == "results under different plans are equal up to rounding; --tolerance 1e-5 allows for that"


def test_one_bit_of_one_tensor(run, copy, capsys):
    value = flip_a_bit(copy / "checkpoint/step-00000002", NAME)
    code, lines = compare(run, copy, capsys)
    assert code == 1 and lines[2] == "tensors  up to step 2, 1 of 2 common checkpoints compared, 1 differs"
    assert lines[3].startswith(f"  {NAME}: 1 of 3,072 elements, first [0, 3] {value:.9g} -> ")
    assert lines[4] == "A and B differ"
    code, lines = compare(run, copy, capsys, "--json")
    result = json.loads(lines[0])
    (tensor,) = result["tensors"]
    assert code == 1 and not result["equal"] and tensor["name"] == NAME and tensor["index"] == [0, 3]
    assert 0 < tensor["largest"] < 1e-7 and result["values"] == {} and result["options"] == []
    assert compare(run, copy, capsys, "--tolerance", "1e-6")[0] == 0
    steps = [folder / "checkpoint/step-00000002" for folder in (run, copy)]
    assert compare(*steps, capsys)[1][1:3] == [
        "tensors  of step-00000002 and step-00000002, 1 differs",
        f"  {NAME}: {str(diff.compare_tensors(NAME, *read_both(*steps), 0)).partition(': ')[2]}",
    ]


@pytest.mark.parametrize(
    ("degree", "name"),
    [("tensor_parallel", NAME), ("expert_parallel", "model.layers.1.moe.experts.w1")],
    ids=["tp", "ep"],
)
def test_checkpoints_of_sharded_tensors(degree, name, tmp_path, capsys):
    """Whole tensors are compared, as one device has them, and a bit of one shard is found. So is a changed option."""
    texts = jobs.write_texts(tmp_path)
    options = {"checkpoint__enable": True, "training__steps": 1, "training__global_batch_size": 8}
    if degree == "expert_parallel":
        options |= JOB_WITH_EXPERTS | {"optimizer__lr": 1e-2}
    one, two = tmp_path / "one", tmp_path / "two"
    jobs.train(jobs.arguments(one, texts, **options))
    options |= {f"parallelism__{degree}_degree": 2, "training__local_batch_size": 4}
    code, _, err = jobs.run(jobs.arguments(two, texts, **options), ranks=2)
    assert code == 0, err
    steps = [folder / "checkpoint/step-00000001" for folder in (one, two)]
    code, lines = compare(*steps, capsys, "--tolerance=1e-4")
    assert (code, lines[-1]) == (0, "A and B are equal in all of this")
    copy = Path(shutil.copytree(two, tmp_path / "copy"))
    flip_a_bit(copy / "checkpoint/step-00000001", name, shards=2)
    code, lines = compare(two, copy, capsys)
    assert code == 1 and lines[-3].endswith(" compared, 1 differs") and lines[-2].startswith(f"  {name}: 1 of ")
    job = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(job.replace("lr = 0.01", "lr = 0.02"))
    assert compare(two, copy, capsys)[1][:2] == ["options  1 differs", "  optimizer.lr 0.01 -> 0.02"]


def read_both(a: Path, b: Path) -> list[torch.Tensor]:
    with open_tensors("native", a) as tensors_a, open_tensors("native", b) as tensors_b:
        return [tensors_a.read(NAME), tensors_b.read(NAME)]


def test_an_option_and_a_logged_value(run, copy, capsys):
    job = (copy / "config.toml").read_text()
    assert "lr = 0.01" in job and "log_freq = 1\n" in job
    (copy / "config.toml").write_text(job.replace("lr = 0.01", "lr = 0.02").replace("log_freq = 1\n", "log_freq = 3\n"))
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["step"] == 3 and "loss" in row]
    loss = row["loss"]
    row["loss"] *= 1 + 1e-7
    row |= {"perplexity": 2.0, "max_loss": row["loss"]}
    for other in rows:
        other |= {"lr": 1.0, "tokens": 5} if "lr" in other else {}
    lines = [json.dumps(row) for row in rows]
    (copy / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 5, "lo']))
    assert compare(run, copy, capsys)[1] == [
        "options  1 differs",
        "  optimizer.lr 0.01 -> 0.02",
        "steps    4 that both logged (A up to 4, B up to 4), step 3 is the first that differs",
        f"  step 3: loss {loss} -> {row['loss']}",
        "tensors  up to step 4, 2 of 2 common checkpoints compared, equal",
        "A and B differ",
    ]
    row |= {"loss": None, "max_loss": None}
    (copy / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    shutil.rmtree(copy / "checkpoint")
    lines = compare(run, copy, capsys)[1]
    assert lines[3:5] == [f"  step 3: loss {loss} -> not finite", NOT_COMPARED]


def test_a_tolerance_for_logged_values(run, copy, capsys):
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"loss": row["loss"] * (1 + 1e-7)} if "loss" in row else row) for row in rows]
    (copy / "metrics.jsonl").write_text("\n".join(lines))
    (copy / "config.toml").unlink()
    code, lines = compare(run, copy, capsys, "--tolerance=1e-6")
    assert code == 0 and lines[0] == "options  equal", "by the jobs that the checkpoints hold"


def test_a_run_and_a_folder_of_hugging_face(run, tmp_path, capsys):
    exported = tmp_path / "exported"
    assert cli.main(["convert", str(run), str(exported), "--dtype", "float32"]) == 0
    capsys.readouterr()
    code, lines = compare(run, exported, capsys)
    assert (code, lines[0]) == (0, "tensors  of step-00000004 and exported, equal")
    changed = Path(shutil.copytree(exported, tmp_path / "changed"))
    (file,) = [path for path in changed.glob("*.safetensors") if "model.norm.weight" in load_file(path)]
    tensors = load_file(file)
    tensors["model.norm.weight"][5] += 0.25
    save_file(tensors, file)
    code, lines = compare(run, changed, capsys)
    assert code == 1 and lines[1].startswith("  norm.weight: 1 of 32 elements, first [5] ")
    assert "largest difference 0.25" in lines[1]
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    code, lines = compare(exported, changed, capsys)
    assert code == 1 and lines[:2] == ["options  1 differs", f"  rope_theta {config['rope_theta']} -> 5.0"]
    assert lines[3].startswith("  model.norm.weight: 1 of 32 elements")
    file.write_bytes(file.read_bytes()[:-8])
    code, lines = compare(exported, changed, capsys)
    assert code == 2 and "cut off" in lines[0] and len(lines) == 1


def test_types_shapes_and_values_that_are_not_finite():
    ones = torch.ones(2, 3)
    assert str(diff.compare_tensors("w", ones, ones.bfloat16(), 0)) == "w: float32 [2, 3] -> bfloat16 [2, 3]"
    assert diff.compare_tensors("w", ones, ones.bfloat16(), 1e-3) is None
    assert str(diff.compare_tensors("w", ones, torch.ones(3, 2), 1)) == "w: float32 [2, 3] -> float32 [3, 2]"
    nan = torch.tensor([1.0, torch.nan, torch.inf])
    assert diff.compare_tensors("w", nan, nan.clone(), 0) is None
    assert diff.compare_tensors("w", nan, nan * torch.tensor([1 + 1e-6, 1, 1]), 1e-5) is None
    difference = diff.compare_tensors("w", nan, torch.tensor([1.0, 2.0, torch.inf]), 1e-5)
    assert (difference.count, difference.index, difference.largest) == (1, [1], torch.inf)
    minus_zero = diff.compare_tensors("w", torch.zeros(2), torch.tensor([0.0, -0.0]), 0)
    assert (minus_zero.count, minus_zero.index, minus_zero.largest) == (1, [1], 0)
    assert str(diff.compare_tensors("steps", torch.tensor(3), torch.tensor(4), 0)) == "steps: 3 -> 4"


def test_what_cannot_be_compared_is_a_line(run, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    code, lines = compare(run, empty, capsys)
    assert code == 2 and lines == [line for line in lines if line.startswith(f"{empty}: no weights in it; give")]
    (empty / "metrics.jsonl").write_text('{"step": 1, "loss": 3')
    code, lines = compare(run, empty, capsys)
    assert code == 2 and "no logged step and no checkpoint that both have" in " ".join(lines)
    code, lines = compare(run, tmp_path / "none", capsys)
    assert code == 2 and "no such file or folder" in lines[0]
    code, lines = compare(run, run, capsys, "--tolerance", "-1")
    assert code == 2 and lines[0].startswith("torchtitan diff: --tolerance: given '-1'; allowed: a number >= 0")
