"""`torchtitan estimate`: its output on predicted memory, suggestions to reduce it, and traffic."""

from collections import Counter

import pytest
import tomli_w

from tests.support.memory_plans import message_plan
from tests.support.pool import run_alone
from torchtitan import cli
from torchtitan.commands import estimate
from torchtitan.commands.check import STEP_FAILED
from torchtitan.config import manager
from torchtitan.config.options import ConfigError
from torchtitan.core.errors import JobError
from torchtitan.core.hardware import FOLDER, load_hardware
from torchtitan.job import ResolvedJob
from torchtitan.planner import answer
from torchtitan.planner import estimate as prediction
from torchtitan.planner.memory.closed_form import predict_memory
from torchtitan.planner.plan import Plan, Workload
from torchtitan.planner.time.measured_runs import usual_calibration
from torchtitan.planner.time.messages import Links
from torchtitan.planner.time.step_time import StepTimer
from torchtitan.planner.time.traffic import SECOND_SHARDS
from torchtitan.process.workers import WorkerEnded

GIB = 2**30


def run(capsys, *arguments):
    code = estimate.main(list(arguments))
    return code, capsys.readouterr().out


@pytest.fixture
def needs(monkeypatch):
    """Mock the prediction: 20 GiB a sample (5 with full recompute) and 10 GiB of model state."""

    def predict(job, traffic=False):
        config = job.config
        gib_per_sample = 5 if config.activation_checkpoint.mode == "full" else 20
        kinds = {"activations": gib_per_sample * config.training.local_batch_size * GIB, "parameters": 10 * GIB}
        return [prediction.Prediction(0, 0, "forward and backward", kinds)]

    for module in (prediction, estimate):
        monkeypatch.setattr(module, "predict", predict)
    return ["--model.tokenizer_path=bytes", "--training.local_batch_size=4", "--world_size=1", "--device=cpu"]


def test_a_job_that_fits(needs, capsys):
    code, out = run(capsys, *needs, "--memory=100GiB")
    assert code == 0
    assert out.splitlines() == [
        "the default job on 1 rank (cpu): 90.00 GiB of tensors at most, in forward and backward",
        "  activations            80.00 GiB",
        "  parameters             10.00 GiB",
        "  together               90.00 GiB",
        "fits in 100.00 GiB: needs 90.00 GiB",
    ]


def test_a_table_has_one_unit():
    kinds = {"activations": GIB // 4, "parameters": 20 * 2**20}
    assert estimate.table([prediction.Prediction(0, 0, "the optimizer", kinds)]) == [
        "  activations             0.25 GiB",
        "  parameters              0.02 GiB",
        "  together                0.27 GiB",
    ]


@pytest.mark.parametrize(
    ("memory", "ways"),
    [
        (
            60,
            [
                'fits with activation_checkpoint.mode = "full": 30.00 GiB',
                "fits with training.local_batch_size = 2: 50.00 GiB",
            ],
        ),
        (
            25,
            ['fits with activation_checkpoint.mode = "full" and training.local_batch_size = 2: 20.00 GiB'],
        ),
        (
            12,
            [
                'least of what was tried, with activation_checkpoint.mode = "full" and training.local_batch_size = 1: '
                "15.00 GiB; give it more ranks to share the state"
            ],
        ),
    ],
)
def test_suggested_changes_make_the_job_fit(needs, capsys, memory, ways):
    code, out = run(capsys, *needs, f"--memory={memory}GiB")
    assert code == 1
    assert out.splitlines()[-1 - len(ways) :] == [f"does not fit in {memory}.00 GiB: needs 90.00 GiB", *ways]


def test_suggestions_can_be_switched_off(needs, capsys):
    code, out = run(capsys, *needs, "--memory=60GiB", "--no-remedies")
    assert code == 1 and out.splitlines()[-1] == "does not fit in 60.00 GiB: needs 90.00 GiB"


@pytest.mark.parametrize(("memory", "fits"), [("100GiB", "does not fit"), ("110GiB", "may fit"), ("113GiB", "fits")])
def test_on_a_gpu_the_interval_of_published_runs_is_compared(needs, capsys, memory, fits):
    code, out = run(capsys, *needs[:-1], "--device=cuda", f"--memory={memory}", "--no-remedies")
    assert code == (fits != "fits")
    assert out.splitlines()[-1] == (
        f"{fits} in {memory.removesuffix('GiB')}.00 GiB: reserves 101.70 GiB to 127.80 GiB, with allocator, libraries "
        "and communicators, like published runs where there is room"
    )


def test_a_plan_and_an_estimate_judge_alike(needs, capsys):
    """The planner's interval of the same tensors is the same, and so is what counts as fitting."""
    (predicted,) = prediction.predict(ResolvedJob(manager.load(["--training.local_batch_size=4"]), 1, "cuda"))
    low, high = predicted.reserved("cuda")
    memory = predict_memory(ResolvedJob(manager.load([])), load_hardware("h100-80"))
    assert (low / predicted.peak, high / predicted.peak) == pytest.approx(
        (memory.low / memory.total, memory.high / memory.total)
    )
    assert predicted.needed("cuda") / predicted.peak == pytest.approx(memory.needed / memory.total)
    assert predicted.reserved("cpu") == (predicted.peak, predicted.peak)


def test_the_jobs_memory_limit_is_compared(needs, capsys):
    code, out = run(capsys, *needs[:-1], "--device=cuda", "--memory.limit=60GiB")
    assert code == 1 and "does not fit in 60.00 GiB: reserves 101.70 GiB to 127.80 GiB" in out


def test_a_job_without_further_suggestions():
    assert estimate.ways_out([], 1.0) == [
        "no recompute and no smaller batch is left to try; give it more ranks to share the state"
    ]


def test_faults_are_reported_before_estimates(capsys):
    with pytest.raises(ConfigError, match="tensor_parallel_degree"):
        estimate.main(["--parallelism.tensor_parallel_degree=3", "--model.tokenizer_path=none"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "80"], "given '80'; allowed: a number with one of MB, GB, TB, MiB, GiB, TiB, as 80GiB"),
        (["--memory=0GiB"], "given '0GiB'; allowed"),
        (["--world_size=0"], "given '0'; allowed: a whole number >= 1"),
        (["--outside=0"], "given '0'; allowed: a number above 0"),
        (["--traffic", "--machine=2.5"], "given '2.5'; allowed: a whole number >= 1"),
        (["--inside=3"], "--inside: allowed with --traffic only"),
        (["--gpu=h100"], "--gpu: given 'h100'; allowed: a10, a100-40,"),
        (["--gpu=h100"], "--hardware` writes; did you mean h100-80?"),
        (["--gpu=h200", "--device=cpu"], "--gpu: given h200; allowed with --device cuda only"),
        (["--memry=80GiB"], "no option --memry; did you mean"),
    ],
)
def test_wrong_options_are_refused(arguments, message, capsys):
    assert cli.main(["estimate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_traffic_is_compared_with_compute_time(tmp_path):
    """Half of the other ranks are on another machine; the numbers follow from a formula."""
    sent = {("dp_shard", "all_gather", "calls"): 66, ("dp_shard", "all_gather", "bytes"): 90e9}
    sent |= {("tp", "all_reduce", "calls"): 4, ("tp", "all_reduce", "bytes"): 35e9}
    groups = {"dp_shard": tuple(range(16)), "tp": (0, 1)}
    predicted = prediction.Prediction(0, 0, "clipping", {}, Counter(sent), groups)
    speeds, _ = estimate.parse_options(["--traffic"])
    lines = estimate.traffic(predicted, 200e12, speeds)
    assert [line.split()[-3:] for line in lines[1:3]] == [["0.241", "s", "between"], ["0.100", "s", "inside"]]
    assert (
        lines[-2]
        == "the most time takes dp_shard, 48% of what computing takes: there is time for it while the rank computes"
    )
    assert lines[-1].startswith("tp takes 20% of it, which comes on top")
    slower, _ = estimate.parse_options(["--traffic", "--outside=4.5", "--machine=4", "--tflops", "200"])
    assert "400% of what computing takes: more than the rank" in estimate.traffic(predicted, 200e12, slower)[-2]
    shared_cores = tmp_path / "cpu.toml"
    shared_cores.write_text(f"cores = 2\n{(FOLDER / 'h100-80.toml').read_text()}")
    speeds.gpu = str(shared_cores)
    assert "48% of what computing takes: which comes on top" in estimate.traffic(predicted, 200e12, speeds)[-2]
    slower.inside = 70.0  # GB/s
    assert "tp takes 50% of it, which comes on top" in estimate.traffic(predicted, 200e12, slower)[-1]


def test_speeds_of_the_options_scale_measured_collectives(tmp_path):
    """Half of the file's bandwidth takes twice as long: 7 of 8 GB at 10 GB/s, as 8 ranks measured it."""
    row = {"kind": "all_gather", "ranks": 8, "latency": 1e-9, "bandwidth": 1e10, "smallest": 1, "largest": 10**12}
    path, known = tmp_path / "ours.toml", FOLDER / "h100-80.toml"
    path.write_text(known.read_text() + tomli_w.dumps({"collectives": {"version": 1, "rows": [row]}}))
    sent = {("dp_shard", "all_gather", "calls"): 1, ("dp_shard", "all_gather", "bytes"): 7e9}
    predicted = prediction.Prediction(0, 0, "clipping", {}, Counter(sent), {"dp_shard": tuple(range(8))})
    inside = load_hardware("h100-80").machine_link.reached_bandwidth / 1e9
    for options, seconds in (([], "0.700"), ([f"--inside={inside / 2}"], "1.400")):
        speeds, _ = estimate.parse_options(["--traffic", f"--gpu={path}", *options])
        assert estimate.traffic(predicted, 200e12, speeds)[1].split()[-3:] == [seconds, "s", "inside"]


def seconds_of_messages(jobs):
    """Return the seconds of a step's messages by axis of each job, as `estimate --traffic` rehearses and as `plan`
    counts them.
    """
    hardware, seconds = load_hardware("h100-80"), []
    for ranks, options in jobs:
        job, rehearsed = ResolvedJob(manager.load(options), ranks, "cuda"), Counter()
        predicted, *_ = prediction.predict(job, traffic=True)
        for axis, kind in {(axis, kind) for axis, kind, _ in predicted.sent}:
            calls, size = (float(predicted.sent[axis, kind, unit]) for unit in ("calls", "bytes"))
            message = Links.of(hardware).sent(kind, size, calls, predicted.groups[axis])
            rehearsed[AXES.get(axis, axis)] += message.seconds
        timer = StepTimer(Workload.of(job, job.layout.samples), hardware)
        formula = timer.messages_of_step(Plan.of(job, job.layout.samples), predicted.pipeline_rank)
        seconds.append((dict(rehearsed), {axis: message.seconds for axis, message in formula.items()}))
    return seconds


AXES = dict.fromkeys(("dp_shard", "efsdp", *SECOND_SHARDS), "fsdp") | {"dp_replicate": "replicas"}
BASE = ["--job.config_file=llama3_8b", "--model.tokenizer_path=bytes", "--model.overrides={n_layers = 4}"]
FULL, LORA = ["--activation_checkpoint.mode=full"], ["--adapter.kind=lora", "--adapter.rank=16"]
MESSAGES = {
    "FSDP 16": (16, []),
    "CP 16 over two machines": (32, ["--parallelism.context_parallel_degree=16"]),
    "PP 4": (8, ["--parallelism.pipeline_parallel_degree=4", "--training.local_batch_size=8"]),
    "no resharding": (16, ["--parallelism.fsdp_reshard_after_forward=never"]),
    "LoRA": (16, LORA),
    "LoRA, TP 4, full recompute": (16, [*LORA, *FULL, "--parallelism.tensor_parallel_degree=4"]),
}


def test_the_planner_has_the_messages_of_the_rehearsal():
    """Of the jobs above, and of ten that nobody chose, whose models are small or of few layers."""
    jobs = [(ranks, [*BASE, *options]) for ranks, options in MESSAGES.values()]
    drawn = [message_plan(31, number) for number in range(10)]
    results = run_alone(seconds_of_messages, [*jobs, *drawn])
    for name, (rehearsed, formula) in zip([*MESSAGES, *drawn], results, strict=True):
        assert formula == pytest.approx(rehearsed, rel=0.1), name
    axes = {axis for _, formula in results[len(jobs) :] for axis in formula}
    assert axes >= {"fsdp", "tp", "cp", "pp"}


def test_the_step_takes_as_long_as_by_the_planner():
    options, _ = estimate.parse_options(["--traffic", "--gpu=h100-80"])
    job = ResolvedJob(manager.load(["--job.config_file=llama3_8b"]), 64, "cuda")
    timer = StepTimer(Workload.of(job, 64), load_hardware("h100-80"), usual_calibration(load_hardware("h100-80")))
    (line,) = answer.step_line(answer.predicted_step(job, estimate.hardware_of(options)))
    assert line.startswith(f"a step takes {timer.step_time(Plan.of(job, 64)).seconds:.3g} s (")
    adapted = ResolvedJob(manager.load(["--job.config_file=llama3_8b", "--adapter.kind=dora"]), 64, "cuda")
    assert answer.step_line(answer.predicted_step(adapted, estimate.hardware_of(options))) == []


def test_hardware_gives_memory_device_and_speeds():
    options, _ = estimate.parse_options(["--gpu=H200"])
    assert (options.device, options.memory) == ("cuda", None)
    for limit, expected in (([], 139.8), (["--memory.limit=20GiB"], 20), (["--memory.limit=0.5"], 69.9)):
        assert estimate.allowed(manager.load(limit), options) == pytest.approx(expected * GIB)
    with pytest.raises(JobError, match="memory.limit: given 200 GiB; allowed: at most the 139.80 GiB"):
        estimate.allowed(manager.load(["--memory.limit=200GiB"]), options)
    assert estimate.parse_options(["--gpu=cpu"])[0].device == "cpu"
    options, _ = estimate.parse_options(["--gpu=gb200", "--traffic", "--outside=7", "--memory=80GiB"])
    assert (options.inside, options.outside, options.machine) == (pytest.approx(702), 7, 72)
    assert (options.tflops, options.memory) == (pytest.approx(1000), 80 * GIB)


def test_one_rank_has_no_traffic(needs, capsys):
    code, out = run(capsys, *needs, "--traffic")
    assert code == 0 and out.splitlines()[-1].startswith("  computes")


def test_a_step_that_is_refused_has_an_exit_code_of_its_own(needs, monkeypatch, capsys):
    """`torchtitan check` then does not call the job OK. What the machine ended says nothing about the job."""

    def refuse(*arguments):
        raise JobError("model.s2_group_size: given 8;\n    allowed: 0 for Gemma3")

    monkeypatch.setattr(estimate, "predict", refuse)
    assert estimate.main(needs) == STEP_FAILED
    assert capsys.readouterr().err == "model.s2_group_size: given 8; allowed: 0 for Gemma3\n"

    def end(*arguments):
        raise WorkerEnded("a rehearsal was ended")

    monkeypatch.setattr(estimate, "predict", end)
    with pytest.raises(WorkerEnded):
        estimate.main(needs)
