"""Times of plans on a CPU: closed formulas of shared cores and messages, and scripts/compare_plan_times.py."""

import dataclasses
import importlib
import itertools
import re
import subprocess
import sys

import pytest

from tests.support.jobs import ROOT
from tests.support.pool import run_alone
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.core.hardware import Curve, Curves, MeasuredCollective, MeasuredCollectives, load_hardware
from torchtitan.job import ResolvedJob
from torchtitan.models.sizes import POST_NORMS
from torchtitan.parallelisms.fsdp_messages import BLOCK, PIECE, block_bytes
from torchtitan.planner import answer, estimate, rehearsal
from torchtitan.planner.memory.closed_form import MemoryPrediction
from torchtitan.planner.plan import Plan, Workload
from torchtitan.planner.search import Candidate, PipelineTimer
from torchtitan.planner.time import measured_hardware, measured_runs
from torchtitan.planner.time.block_kernels import elementwise
from torchtitan.planner.time.messages import Calibration, Parts, WeightCounts
from torchtitan.planner.time.step_time import StepTimer

CPU = dataclasses.replace(load_hardware("cpu"), devices_per_machine=8)
"""A machine of two cores and any number of ranks."""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("compare_plan_times")


def timer(hardware=CPU, factors=None, **changes):
    workload = Workload.of(ResolvedJob(manager.load(["--job.config_file", "debug_model"])), 16)
    return StepTimer(dataclasses.replace(workload, **changes), hardware, Calibration(factors or {}))


# The formula


@pytest.mark.parametrize(
    ("cores", "ranks", "slowdown"),
    [(2, 1, 1 / 2), (2, 2, 1), (2, 4, 2), (4, 3, 1), (8, 3, 1 / 2), (2, 64, 4), (None, 64, 1)],
)
def test_ranks_share_cores_as_the_launcher_divides_them(cores, ranks, slowdown):
    """Each rank has cores // ranks threads; more ranks than cores take turns. 64 ranks are 8 machines of 8."""
    assert dataclasses.replace(CPU, cores=cores).slowdown(ranks) == slowdown


def test_twice_the_ranks_on_the_same_cores_compute_as_long():
    """Half of the rows on half of a core; the products are of the same sizes."""
    two, four = (timer().step_time(Plan(shards=ranks, passes=16 // ranks)).parts for ranks in (2, 4))
    assert all(four[name] == pytest.approx(two[name]) for name in ("products", "attention", "memory"))
    alone = timer().step_time(Plan(passes=16)).parts
    assert alone["products"] == pytest.approx(two["products"])  # two threads


def test_mfu_is_of_all_cores():
    step = timer().step_time(Plan(shards=2, microbatch=8))
    four = timer().step_time(Plan(shards=4, microbatch=4))
    for time in (step, four):
        assert time.mfu == pytest.approx(timer().workload.flops / (2 * CPU.peak.bfloat16 * time.seconds))


def test_gradients_of_microbatches_are_added():
    """A sum in float32 is read and written, and a gradient read, for each microbatch but the first."""
    times = timer()
    one, four = (Plan(pp=2, microbatch=16 // n, microbatches=n, schedule="1F1B") for n in (1, 4))
    size = (4 + 4 + times.workload.compute_bytes) * times.rank_weights(four).dense
    assert "memory" not in times.finished(one, Parts()).parts
    assert times.finished(four, Parts()).parts["memory"] == pytest.approx(3 * times._moved(size))


@pytest.mark.parametrize(("schedule", "actions"), [("1F1B", 2), ("ZBVZeroBubble", 3)])
def test_actions_of_a_pipeline_take_time_on_a_cpu(schedule, actions):
    """Forward, backward, and the weight gradients where they are computed apart. A GPU computes meanwhile."""
    plan = Plan(pp=2, microbatch=4, microbatches=4, schedule=schedule, stages_per_rank=actions - 1, recompute="none")
    gpu = dataclasses.replace(CPU, cores=None)
    cpu_times, gpu_times = (timer(hardware).stage_times(plan) for hardware in (CPU, gpu))
    for cpu_stage, gpu_stage in zip(cpu_times, gpu_times, strict=True):
        assert sum(cpu_stage) - sum(gpu_stage) == pytest.approx(actions * 1.5e-3, rel=1e-6)


@pytest.mark.parametrize("passes", [1, 4])
def test_gathers_on_a_cpu_add_to_computation(passes):
    """Each block gathers its weights twice a pass, in latency + half of the bytes / bandwidth, and reduces once.

    The embedding and the head, which are further units, are gathered once. A rank sums its half of both gradients.
    """
    plan, times = Plan(shards=2, microbatch=8 // passes, passes=passes), timer()
    weights, link = times.rank_weights(plan).dense, CPU.machine_link
    args, size = times.workload.args, times.workload.compute_bytes
    gathered_again = weights - 2 * args.vocab_size * args.dim

    def exchange(sent, ends=2):
        return (args.n_layers + ends) * link.latency + sent / 2 / link.bandwidth

    copied = times._moved(2 * (size * (weights + gathered_again) + 4 * weights) + 3 * 4 * weights / 2)
    expected = passes * (exchange(size * weights) + exchange(size * gathered_again, 0) + exchange(4 * weights) + copied)
    assert times.step_time(plan).parts["fsdp"] == pytest.approx(expected)
    overlapped = timer(dataclasses.replace(CPU, cores=None)).step_time(plan).parts["fsdp"]
    assert overlapped < expected


MESSAGES = {
    "exact": [],
    "no resharding": ["--parallelism.fsdp_reshard_after_forward=never"],
    "reduced in bfloat16": ["--training.mixed_precision_reduce=bfloat16"],
    "float8": ["--training.float8=tensorwise", '--training.float8_exclude=["*.wk"]'],
    "int8 gathers": ["--parallelism.fsdp_quantized_gather=int8"],
    "int4 reductions": ["--parallelism.fsdp_quantized_reduce=int4"],
    "second shards": ["--parallelism.fsdp_reshard_after_forward=2"],
    "ZeRO++": [
        *("--parallelism.fsdp_reshard_after_forward=4", "--parallelism.fsdp_quantized_gather=int8"),
        "--parallelism.fsdp_quantized_reduce=int8",
    ],
}


def sent_in_a_step(options):
    """Return the bytes that a rank of 8 sends in FSDP's messages: by the formula, and in the rehearsal."""
    link = dataclasses.replace(CPU.machine_link, bandwidth=1.0, latency=1e-30, reached=1.0)
    seconds_are_bytes = dataclasses.replace(CPU, machine_link=link, cores=8)
    job = ["--job.config_file", "debug_model", "--model.tokenizer_path=bytes", "--model.overrides={n_layers = 2}"]
    config = manager.load([*job, *options])
    formula = StepTimer(Workload.of(ResolvedJob(config), 8), seconds_are_bytes, Calibration()).step_time(Plan(shards=8))
    sent = rehearsal.rehearse(ResolvedJob(config, 8), 0).sent
    rehearsed = sum(size for (_, kind, unit), size in sent.items() if unit == "bytes" and kind != "all_reduce")
    return formula.parts["fsdp"], float(rehearsed)


@pytest.mark.parametrize("messages", MESSAGES)
def test_bytes_of_fsdp_are_those_of_the_rehearsal(messages):
    """The formula leaves out norms: 0.1 % of the weights."""
    formula, rehearsed = run_alone(sent_in_a_step, MESSAGES[messages])
    assert formula == pytest.approx(rehearsed, rel=2e-3)


def test_every_second_block_of_a_stage_is_replayed_with_its_messages():
    """The blocks of each stage with an even number are, as parallelize wraps them: one of one, two of three."""
    times = timer(load_hardware("h100-80"))
    plan = Plan(tp=2, shards=4, recompute="2")
    layers = times.workload.args.n_layers
    none, full = (times.step_time(plan._replace(recompute=mode)).parts for mode in ("none", "full"))
    share, every_second = -(-layers // 2) / layers, times.step_time(plan).parts
    assert every_second["recompute"] == pytest.approx(share * full["recompute"])
    assert every_second["tp"] == pytest.approx(none["tp"] + share * (full["tp"] - none["tp"]))
    assert [plan.replayed_share(blocks) for blocks in (1, 2, 3)] == [1, 1 / 2, 2 / 3]
    single = Plan(pp=layers, recompute="2", schedule="1F1B", microbatches=8)
    assert times.stage_times(single) == times.stage_times(single._replace(recompute="full"))


def test_an_all_to_all_between_machines_sends_all_its_parts_there():
    """Of 16 ranks in two machines half of the bytes go to the other one; a gather sends them there once for 8 ranks."""
    gpu = load_hardware("h100-80")
    messages = timer(gpu).messages
    assert messages.links.exchange(1e9, 16, 1).transfer == pytest.approx(5e8 / gpu.network_link.reached_bandwidth)
    assert messages.links.gather(1e9, 16, 1).transfer < messages.links.exchange(1e9, 16, 1).transfer


@pytest.mark.parametrize("gpus", [6, 12])
def test_groups_that_some_ranks_have_in_two_machines_use_the_network(gpus):
    """A group of 3 ranks in machines of 8 is of the ranks 6, 7 and 8, too, unless the job fits into one machine."""
    gpu = load_hardware("h100-80")
    times = timer(gpu).messages
    links, link = times.links_of(Plan(tp=3, shards=gpus // 3)), gpu.machine_link if gpus == 6 else gpu.network_link
    for message in (links.gather(3e9, 3, 1), links.exchange(3e9, 3, 1), links.send(2e9, 3)):
        assert message.transfer == pytest.approx(2e9 / link.reached_bandwidth)
    assert times.links.sent("all_gather", 2e9, 1, [6, 7, 8]) == times.links_of(Plan(shards=12)).gather(3e9, 3, 1)
    assert times.links.sent("all_gather", 2e9, 1, [3, 4, 5]) == times.links_of(Plan(shards=3)).gather(3e9, 3, 1)
    assert times.links.gather(3e9, 2, 3) == times.links.gather(3e9, 2, 8)  # the ranks 6 and 9


def measured_row(kind, ranks=8, machines=1, latency=1e-5, bandwidth=1e9, smallest=1, largest=1e15):
    figures = {"latency": latency, "bandwidth": bandwidth, "smallest": smallest, "largest": largest}
    return MeasuredCollective(kind=kind, ranks=ranks, machines=machines, **figures)


def with_rows(*rows):
    return dataclasses.replace(load_hardware("h100-80"), collectives=MeasuredCollectives(version=1, rows=rows))


def test_measured_collectives_replace_the_figures_of_links():
    """A group takes the nearest row of its kind; others keep those of the links."""
    near, far = measured_row("all_gather", 4), measured_row("all_gather", 64, 8, latency=3e-5, bandwidth=1e7)
    summed, turned = measured_row("all_reduce", bandwidth=2e9), measured_row("all_to_all", bandwidth=3e9)
    links, plain = timer(with_rows(far, near, summed, turned)).messages.links, timer(with_rows()).messages.links
    assert links.gather(8e9, 8, 1, 2) == pytest.approx((7, 2 * 7 * 1e-5))
    assert links.gather(8e9, 8, 1, kind="reduce_scatter") == plain.gather(8e9, 8, 1)
    assert links.all_reduce(8e9, 8, 1) == pytest.approx((7, 14e-5))
    assert links.exchange(6e9, 2, 1) == pytest.approx((1, 1e-5))
    # 16 ranks on two machines: inside of them by the row of one, and eight cards send the other half
    assert links.gather(16e7, 16, 1) == pytest.approx((8e7 / 8 / 1e7, 14 * 1e-5 + 3e-5))


def test_the_size_of_a_message_chooses_among_rows_of_a_group():
    small, large = measured_row("all_gather", largest=1e6), measured_row("all_gather", bandwidth=4e9, smallest=1e6)
    links = timer(with_rows(small, large)).messages.links
    assert links.gather(8e9, 8, 1).transfer == pytest.approx(7 / 4)
    assert links.gather(8e9, 8, 1, messages=1e5).transfer == pytest.approx(7)  # of 80 KB each


def test_measured_collectives_change_the_step_by_their_formula():
    """Tensor parallel waits for four gathers and four reduce-scatters of a block's hidden states without recompute, for
    two of each at the embedding and the head, and for sums of the loss and of the norms' gradients.
    """
    gpu = with_rows(measured_row("all_gather"), measured_row("reduce_scatter", bandwidth=5e8))
    plan, times = Plan(tp=8, microbatch=2, recompute="none"), timer(gpu)
    args, tokens = times.workload.args, 2 * times.workload.seq_len
    size = times.workload.compute_bytes * args.dim * tokens
    expected = (args.n_layers * 4 + 2) * (14e-5 + 7 / 8 * size * (1 / 1e9 + 1 / 5e8))
    expected += times.messages.links.all_reduce(12 * tokens, 8, 1, 2).seconds
    norms = 2 * args.n_layers + 1
    expected += times.messages.links.all_reduce(times.workload.compute_bytes * norms * args.dim, 8, 1, norms).seconds
    assert times.step_time(plan).parts["tp"] == pytest.approx(expected)
    slower = StepTimer(times.workload, gpu, Calibration({"messages": 2.0}))
    assert slower.step_time(plan).parts["tp"] == pytest.approx(2 * expected)


def test_context_parallel_between_machines_shares_their_network_cards():
    """Keys and values of 8 ranks leave a machine once, by 8 cards. In backward each rank exchanges its gradients."""
    gpu = load_hardware("h100-80")
    times, tokens = timer(gpu).messages, 4096
    args, plan = times.workload.args, Plan(cp=16)
    size = 16 * times.workload.compute_bytes * tokens * args.head_dim * 2 * args.num_kv_heads
    message = times.of_block(plan, False, tokens, 0.0)["cp"]
    assert message == times.links.gather(size, 16, 1).and_then(times.links.exchange(size, 16, 1))
    inside, between = (link.reached_bandwidth for link in (gpu.machine_link, gpu.network_link))
    assert message.transfer == pytest.approx(max(7 / 8 / inside, 1 / 2 / 8 / between) * size + size / 2 / between)
    ring = times.of_block(plan._replace(cp_method="alltoall"), False, tokens, 0.0)["cp"]
    assert ring.transfer == pytest.approx(4 * 15 / 16 * size / between)


def test_reductions_on_a_cpu_take_what_all_to_alls_do():
    """gloo's own sums are on all ranks, so FSDP exchanges the parts; a GPU has a message for both."""
    rows = (measured_row("reduce_scatter"), measured_row("all_to_all", bandwidth=3e9))
    collectives = MeasuredCollectives(version=1, rows=rows)
    weights = WeightCounts(dense=6e9, experts=0.0, blocks=2)
    for hardware, bandwidth in ((CPU, 3e9), (load_hardware("h100-80"), 1e9)):
        messages = timer(dataclasses.replace(hardware, collectives=collectives, cores=hardware.cores and 8)).messages
        assert messages.reduce_gradients(Plan(shards=8), weights) == pytest.approx((7 / 8 * 24e9 / bandwidth, 14e-5))


def test_quantized_reductions_between_machines_take_two_hops():
    """An all-to-all of all numbers in a machine of 8, then one of an eighth of them with the same GPU of the other."""
    times = timer(load_hardware("h100-80"), reduce_bits=4, reshard=8)
    messages, blocks = times.messages, times.workload.args.n_layers
    weights = WeightCounts(dense=1e9, experts=0.0, blocks=blocks)
    size, count = 1e9 * block_bytes(4) / BLOCK, blocks * -(-1e9 // (blocks * PIECE))
    expected = messages.links.exchange(size, 8, 1, count).and_then(messages.links.exchange(size / 8, 2, 8, count))
    assert messages.reduce_gradients(Plan(shards=16), weights) == pytest.approx(expected)
    at_once = messages.links.exchange(size, 16, 1, count)
    one_hop = timer(load_hardware("h100-80"), reduce_bits=4).messages
    assert one_hop.reduce_gradients(Plan(shards=16), weights) == pytest.approx(at_once)


def test_tensor_parallel_ranks_sum_the_gradients_of_experts_that_none_of_them_splits():
    """In each pass and block, in the type of the computation, as the rehearsal of Mixtral 8x7B on 8 ranks has it."""
    job = ResolvedJob(manager.load(["--model.name=mixtral", "--model.flavor=8x7B"]), 8, "cuda")
    timer = StepTimer(Workload.of(job, 8), load_hardware("h100-80"))
    whole, split = (
        timer.messages.sum_partial_gradients(plan, timer.block(plan, 0, 0.0).weights)
        for plan in (Plan(tp=8), Plan(tp=8, ep=8))
    )
    link, sent = timer.messages.links.inside, 14797971454 / 3  # of 3 layers, 1 % of which is not of experts
    assert whole.transfer == pytest.approx(sent / link.reached_bandwidth, rel=0.01)
    assert split.transfer < 0.001 * whole.transfer


def test_norms_after_attention_and_feed_forward_move_their_bytes_too(monkeypatch):
    """Each of the two reads and writes the hidden states of the rank."""
    workload = Workload.of(ResolvedJob(manager.load(["--model.name=gemma3", "--model.tokenizer_path=bytes"])), 16)
    args, post_norms = workload.args, {*POST_NORMS} & {*workload.args.block_others(0)}
    others = [name for name in args.block_others(0) if name not in post_norms]
    with_both = elementwise(workload, Plan(), 0, 100, 100).size
    monkeypatch.setattr(type(args), "block_others", lambda self, layer: others)
    assert with_both - elementwise(workload, Plan(), 0, 100, 100).size == pytest.approx(2 * 2 * args.dim * 100 * 2)


def test_replicas_on_a_cpu_add_their_sums_and_pipelines_their_gathers():
    """Each block, the embedding and the head are units with a message of their own."""
    times, link = timer(), CPU.machine_link
    plan = Plan(replicas=2, microbatch=8)
    blocks, size = times.workload.args.n_layers, 4 * times.stored(plan, times.rank_weights(plan))
    assert times.step_time(plan).parts["fsdp"] == pytest.approx(
        2 * ((blocks + 2) * link.latency + size / 2 / link.bandwidth)
    )
    pipeline = Plan(shards=2, pp=2, schedule="1F1B", microbatches=8)
    weights, turns, units = times.rank_weights(pipeline).dense, 2, blocks / 2 + 1
    sizes = (times.workload.compute_bytes * weights, 4 * weights)
    copied = turns * times._moved(2 * sum(sizes) + 3 * 4 * weights / 2)
    expected = copied + turns * sum(units * link.latency + size / 2 / link.bandwidth for size in sizes)
    assert times.step_time(pipeline).parts["fsdp"] == pytest.approx(expected)


def test_all_messages_have_one_factor_and_none_hide_on_a_cpu():
    plans = [Plan(tp=2, microbatch=16), Plan(cp=2, microbatch=16), Plan(shards=2, microbatch=8)]
    weights, workload = timer().rank_weights(plans[2]), timer().workload
    gathered = 2 * workload.gathered_bytes * weights.dense - workload.ends_bytes
    for plan, part in zip(plans, ("tp", "cp", "fsdp"), strict=True):
        copied = timer()._copied(plan, weights, gathered, 0.0) if part == "fsdp" else 0.0
        seconds = timer().step_time(plan).parts[part] - copied
        assert timer(factors={"messages": 3.0}).step_time(plan).parts[part] == pytest.approx(3 * seconds + copied)
    asynchronous = plans[0]._replace(async_tp=True)
    assert timer().step_time(asynchronous).parts["tp"] == pytest.approx(timer().step_time(plans[0]).parts["tp"])


def test_idle_ranks_of_a_pipeline_leave_their_turns_to_others():
    """On a core for each rank GPipe idles; if two ranks take turns, the step is the computation of all ranks."""
    plan = Plan(pp=4, schedule="GPipe", microbatches=4, microbatch=4)
    (apart, turns) = (PipelineTimer(timer(dataclasses.replace(CPU, cores=cores))).step_time(plan) for cores in (4, 2))
    busy = apart.seconds - apart.parts["bubble"] - apart.parts["optimizer"]
    assert apart.parts["bubble"] > 0.3 * busy
    bubble = max(0.0, apart.parts["bubble"] + busy - 2 * busy)
    assert turns.parts["bubble"] == pytest.approx(bubble, rel=1e-3)  # the simulator counts microseconds
    assert turns.parts["products"] == pytest.approx(2 * apart.parts["products"])


def test_float32_has_its_own_curves():
    slow = Curves(products=Curve(most=0.5, half=(1, 1, 1)), attention=Curve(most=0.25, half=(1,)))
    fast = Curves(products=Curve(most=1.0, half=(1, 1, 1)), attention=Curve(most=1.0, half=(1,)))
    plan = Plan(shards=2, microbatch=8)

    def parts(curves, **changes):
        return timer(dataclasses.replace(CPU, float32=curves), **changes).step_time(plan).parts

    single = {"compute_bytes": 4, "dtype": "float32"}
    assert parts(slow, **single)["products"] == pytest.approx(2 * parts(fast, **single)["products"])
    assert parts(slow, **single)["attention"] == pytest.approx(4 * parts(fast, **single)["attention"])
    assert parts(slow) == parts(fast)  # bfloat16


def test_published_factors_are_of_assumed_curves_and_of_gpus():
    assert measured_runs.usual_calibration(CPU).factors == {}
    gpu = load_hardware("h200")
    measured = dataclasses.replace(
        gpu, products=dataclasses.replace(gpu.products, evidence="fitted on 17 measurements")
    )
    factors = measured_runs.usual_calibration(measured).factors
    assert "products" not in factors and factors["tp"] == measured_runs.PUBLISHED["tp"]
    assert measured_runs.usual_calibration(gpu).factors == measured_runs.PUBLISHED


def test_accumulated_batches_of_a_pipeline_take_one_after_the_other():
    plan = Plan(pp=2, schedule="1F1B", shards=2, microbatches=4)
    formula = timer(dataclasses.replace(CPU, cores=8))
    for predict in (formula.step_time, PipelineTimer(formula).step_time):
        one, three = predict(plan).parts, predict(plan._replace(passes=3)).parts
        assert one["bubble"] > 0 and one["fsdp"] > 0
        assert three == pytest.approx({name: s * (1 if name == "optimizer" else 3) for name, s in one.items()})


def test_only_runs_of_from_fit_messages():
    step = timer().step_time(Plan(shards=2, microbatch=8))
    memory = MemoryPrediction(1, 0, 0, 0, 0, 0, 1, 1, 1)
    candidate = Candidate(Plan(shards=2), step, memory)
    for factors, evidence in (({}, "assumed"), ({"messages": 1.2, "fsdp": 1.1}, "fitted on 3 runs")):
        lines = answer.explanation(candidate, Calibration(factors, evidence="fitted on 3 runs"))
        assert any("FSDP" in line and line.endswith(evidence) for line in lines)
        assert any("optimizer" in line and line.endswith("assumed") for line in lines)


# Hardware


def test_a_link_follows_from_its_exchanges():
    """Three ranks: each receives from two others, in two hops."""
    sizes = dataclasses.replace(measured_hardware.USUAL_SIZES["cpu"], sent=(1000, 10**6))
    link = measured_hardware._link(3, sizes, [0.001 + 2 * size / 1e8 for size in sizes.sent])
    assert link == pytest.approx({"bandwidth": 1e8, "latency": 0.0005}, rel=1e-3)


def test_a_curve_of_float32_with_too_many_sizes_is_refused(tmp_path):
    text = (ROOT / "torchtitan/hardware/cpu.toml").read_text()
    path = tmp_path / "ours.toml"
    path.write_text(re.sub(r"(\[float32.attention\]\nmost = \S+\nhalf = \[)", r"\g<1>1.0,", text))
    with pytest.raises(JobError, match="float32.attention.half has 1 value;"):
        load_hardware(str(path))


# The script


def test_tau_counts_pairs_in_the_same_order(script):
    assert script.kendall([(1, 1), (2, 3), (3, 2), (4, 4)]) == pytest.approx((5 - 1) / 6)
    assert script.kendall([(1, 3), (2, 2), (3, 1)]) == -1
    assert script.kendall([(1, 1), (1, 2), (2, 3)]) == pytest.approx(2 / 3)  # a tie counts as neither


def test_the_winner_is_the_plan_that_is_predicted_to_be_fastest(script):
    rows = [script.Row("a", 2.0, 1.0), script.Row("b", 1.6, 1.1), script.Row("c", 3.0, 3.0)]
    assert script.winner_gap(rows) == pytest.approx(0.25)


def test_only_plans_without_a_measurement_are_judged(script):
    rows = [script.Row(name, 1.0 + number, 1.0 + number) for number, name in enumerate(script.PREDICTED)]
    bad = [script.Row(name, 100.0 - number, 1.0 + number) for number, name in enumerate(script.CALIBRATED)]
    assert "8 plans without their own measurement: Kendall's tau 1.00" in script.summary(bad + rows)
    assert script.summary([]) == "Not measured yet."


def test_the_page_agrees_with_its_rows(script):
    """The summary below the table of docs/planning.md follows from the table's rows."""
    section = script.PAGE.read_text().partition(script.BEGIN)[2].partition(script.END)[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
    rows = [script.Row(name.removesuffix(" (calibrates)"), float(a), float(b)) for name, a, b, _ in cells]
    assert script.summary(rows) in section and [row.name for row in rows] in ([], list(script.PLANS))


def test_pairs_in_the_wrong_order_are_named(script):
    rows = [script.Row("a", 2.0, 1.2), script.Row("b", 1.6, 1.1), script.Row("c", 3.0, 1.15)]
    assert script.wrong_pairs(rows) == ["in the wrong order: c takes 50.0% longer than a"]


def test_work_of_others_is_told_from_that_of_children(script):
    before = script.core_seconds()
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    busy, ours = (after - earlier for after, earlier in zip(script.core_seconds(), before, strict=True))
    assert 0 < ours < busy + 0.05  # which is counted in hundredths of a second, of each core


def test_rounds_have_folders_of_their_own(script, tmp_path):
    assert len({script.name_of_folder("CP 2", number) for number in (1, 2, 3)}) == 3
    assert f"--job.dump_folder={tmp_path / 'CP-2-round-2'}" in script.job_of("CP 2", tmp_path, True, 2)[1]


def test_the_section_is_replaced_alone(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "PAGE", tmp_path / "page.md")
    script.PAGE.write_text(f"before\n{script.BEGIN}\nold\n{script.END}\nafter\n")
    script.write_page(script.table([]))
    assert script.PAGE.read_text() == f"before\n{script.BEGIN}\nNot measured yet.\n{script.END}\nafter\n"


def test_planted_runs_are_predicted_by_what_three_of_them_calibrate(script, tmp_path):
    """Steps take what the formula says with doubled computation and slower messages. Three of them give that away, but
    for the prior of the factors."""
    runs, uncalibrated = {}, []
    for name in script.PLANS:
        _, job, steps = script.job_of(name, tmp_path, False)
        run = tmp_path / script.name_of_folder(name)
        runs[name] = [run]
        run.mkdir()
        config = manager.load(job)
        (run / "config.toml").write_text(manager.to_toml(config))
        resolved = ResolvedJob(config, script.PLANS[name][0])
        plan, workload = Plan.of(resolved, script.SAMPLES), Workload.of(resolved, script.SAMPLES)
        times = PipelineTimer(StepTimer(workload, CPU, Calibration({"cpu": 2.0, "messages": 1.5})))
        seconds = times.step_time(plan).seconds
        uncalibrated.append(PipelineTimer(StepTimer(workload, CPU)).step_time(plan).seconds / seconds - 1)
        line = f'{{"step": 1, "step_seconds": {seconds}, "tokens_per_second": {workload.tokens / seconds}}}\n'
        (run / "metrics.jsonl").write_text(line * steps)
        assert not script.complete(run, steps)  # stopped before its last file, or by a script that had none
        (run / script.OTHERS).write_text("0.010\n")
        assert script.complete(run, steps) and not script.complete(run, steps + 1)
    rows, residuals = script.predict(runs, CPU)
    assert len(residuals) == 3 and [row.name for row in rows] == list(script.PLANS)
    errors = {row.name: row.predicted / row.measured - 1 for row in rows}
    assert max(map(abs, errors.values())) < 0.05 and max(uncalibrated) < -0.4, errors
    assert not script.complete(tmp_path / "missing", 1)


def test_plans_of_the_script_train_the_same_and_are_legal(script, tmp_path):
    plans = []
    for name, (ranks, _) in script.PLANS.items():
        config = manager.load(script.job_of(name, tmp_path, False)[1])
        plans.append(Plan.of(ResolvedJob(config, ranks), script.SAMPLES))
        assert plans[-1].gpus == ranks
        rows = plans[-1].shards * plans[-1].replicas * plans[-1].microbatch * plans[-1].microbatches * plans[-1].passes
        assert rows == script.SAMPLES == config.training.global_batch_size
    assert all(a != b for a, b in itertools.combinations(plans, 2))


# Adapters


def adapted_step(kind, recompute="none", gpus=1):
    """Return the time of a step of 8B with 4 samples of 4,096 tokens and an adapter of rank 16, and the workload."""
    arguments = [f"--adapter.kind={kind}", "--adapter.rank=16", "--training.seq_len=4096"]
    job = ResolvedJob(manager.load(["--job.config_file=llama3_8b", *arguments]), gpus, "cuda")
    times = StepTimer(Workload.of(job, 4), load_hardware("h100-80"))
    return times.step_time(Plan(shards=gpus, microbatch=4 // gpus, recompute=recompute)), times.workload


@pytest.mark.parametrize("recompute", ["none", "op", "full"])
def test_a_frozen_model_has_no_products_for_gradients_of_its_weights(recompute):
    """So a step of an adapter takes less than full training and more than forward, a third of that."""
    full, lora, qlora = (adapted_step(kind, recompute)[0] for kind in ("none", "lora", "qlora"))
    assert full.parts["products"] / 3 < lora.parts["products"] < 0.8 * full.parts["products"]
    assert full.seconds / 3 < lora.seconds < full.seconds
    assert qlora.parts["products"] == lora.parts["products"]
    assert lora.parts["memory"] < qlora.parts["memory"]  # unpacks in forward and in backward
    unpacked = qlora.parts["memory"] - lora.parts["memory"]
    assert qlora.parts["recompute"] - lora.parts["recompute"] == pytest.approx(
        0.0 if recompute == "none" else unpacked / 2
    )


def test_flops_of_adapters_are_those_of_the_rehearsal():
    _, workload = adapted_step("lora")
    job = ResolvedJob(
        manager.load(["--job.config_file=llama3_8b", "--adapter.kind=lora", "--adapter.rank=16"]), 1, "cuda"
    ).with_options({"training.seq_len": 4096, "training.local_batch_size": 4})
    assert workload.flops == pytest.approx(estimate.flops_of_a_rank(job))


def test_a_frozen_model_is_gathered_and_only_the_adapter_reduced():
    (full, lora, qlora) = (adapted_step(kind, gpus=4) for kind in ("none", "lora", "qlora"))
    sent = []
    for _, workload in (full, lora, qlora):
        times = StepTimer(workload, load_hardware("h100-80"))
        sent.append(times.messages_of_step(Plan(shards=4))["fsdp"].transfer)
    # of full training 2 x 2 bytes gathered and 4 reduced for each weight; with packed weights half a byte gathered
    assert sent[1] == pytest.approx(sent[0] / 2, rel=0.1)
    assert sent[2] < 0.4 * sent[1]
