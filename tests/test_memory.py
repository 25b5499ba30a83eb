"""What a step is foretold to need is what it needs: real steps of small jobs, weighed by torch's profiler."""

import contextlib
import io
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.pool import run_alone, run_ranks
from tests.test_launcher import gone
from torchtitan.build import parts
from torchtitan.build.data import batches_of_a_step
from torchtitan.commands import check, estimate
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.core.initialization import local_part
from torchtitan.parallelisms import data_parallel
from torchtitan.planner import estimate as prediction
from torchtitan.planner import rehearsal
from torchtitan.planner.live_tensors import Live
from torchtitan.planner.rehearsal import Rehearsal, rehearse
from torchtitan.process.distributed import device_type
from torchtitan.training.batches import zero_batch

SMALL = {
    "model.name": "llama3",
    "model.overrides": "{dim=128, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=512, multiple_of=64}",
    "model.tokenizer_path": "bytes",
    "training.local_batch_size": 4,
    "training.seq_len": 128,
    "training.mixed_precision_param": "float32",
    "training.loss_chunks": 2,
    "compile.enable": "false",
}
LEARNED = {
    "AdamW": {},
    "bfloat16": {"optimizer.name": "AdamWBF16", "training.dtype": "bfloat16"},
    "8 bits": {"optimizer.name": "AdamW8bit"},
    "GaLore": {"optimizer.name": "GaLore", "optimizer.options": "{rank=8, targets=['*']}"},
    "LoRA": {"adapter.kind": "lora", "adapter.rank": 8},
    "QLoRA": {"adapter.kind": "qlora", "adapter.rank": 8},
}
SENT = 4 * 128 * 128 * 4
"""Bytes of the hidden states of a batch [4, 128, 128]: what a pipeline rank sends, gloo holds until the step ends."""
# gloo copies what it reduces, which is to be little beside the model
WIDE = {"training.seq_len": 64, "model.overrides": SMALL["model.overrides"].replace("dim=128", "dim=256")}
PLANS = {  # ranks, options, what is learned under it
    "one rank": (1, {}, list(LEARNED)),
    "FSDP 2": (2, {}, ["GaLore", "AdamW", "QLoRA"]),
    "TP 2": (2, {"parallelism.tensor_parallel_degree": 2} | WIDE, ["8 bits", "LoRA", "AdamW"]),
    "PP 2": (2, {"parallelism.pipeline_parallel_degree": 2}, ["AdamW", "bfloat16", "QLoRA"]),
}
RECOMPUTE = {
    "none": {"activation_checkpoint.mode": "none"},
    "selective": {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"},
    "full": {"activation_checkpoint.mode": "full"},
}


def argv(*options):
    joined = SMALL | {name: value for part in options for name, value in part.items()}
    return [f"--{name}={value}" for name, value in joined.items()]


def measured(jobs):
    """Of each job's second step on this rank, or a later one, the most bytes of all allocations on the CPU that live at
    once. The least of some steps: gloo's threads hold what they send for as long as they please.
    """
    found = []
    for words in jobs:
        config = manager.load(words)
        world = torch.distributed.get_world_size()
        dims, device = parts.dims(config, world), torch.device(device_type())
        model = parts.model(config, dims.build_mesh(device.type), dims, device)
        optimizers = parts.optimizers(config, model)
        batch = zero_batch(config, dims, model.draws)

        def step(config=config, dims=dims, model=model, optimizers=optimizers, batch=batch):
            passes = batches_of_a_step(config, dims)
            for index in range(passes):
                model.forward_backward(batch, 1000, is_last=index == passes - 1)
            model.clip_gradients(1.0)
            optimizers.step()
            model.after_step(1, optimizers.optimizers)
            optimizers.zero_grad()

        step()
        states = [value for each in optimizers for state in each.state.values() for value in state.values()]
        held = [*(p for _, p in model.named_tensors()), *filter(torch.is_tensor, states)]
        storages = {local_part(tensor)[0].untyped_storage() for tensor in held}
        before = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        found.append(before + min(most_allocated(step) for _ in range(3)))
    return found


def most_allocated(step):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    sizes = [event.nbytes() for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(sizes))


def foretold(jobs, ranks):
    """By job, of each of these ranks of 2."""
    found = []
    for config in map(manager.load, jobs):
        moments = [rehearse(config, rank, max(1, len(ranks)), "cpu") for rank in ranks]
        found.append([max(map(Counter.total, of_rank.moments.values())) for of_rank in moments])
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_needs_what_was_foretold(plan):
    """All optimizers and adapters on one rank, and by turns under the others; each with one way of recompute, by turns.
    5 %: kernels need some room of their own, which the profiler sees too.
    """
    ranks, degrees, learned = PLANS[plan]
    turns = list(RECOMPUTE.values())
    jobs = [argv(degrees, LEARNED[name], turns[i % 3]) for i, name in enumerate(learned)]
    real = list(zip(*run_ranks(ranks, measured, jobs), strict=True))
    told = run_alone(foretold, jobs, list(range(ranks)))
    for name, were, will in zip(learned, real, told, strict=True):
        if plan != "PP 2":  # ranks are alike, and the one of which gloo's threads hold less is nearer to the truth
            were, will = [min(were)], [min(will)]
        for taken, expected in zip(were, will, strict=True):
            assert expected <= 1.05 * taken and taken <= 1.05 * (expected + SENT * (plan == "PP 2")), name


# What is sent


def sends(jobs):
    """What this rank sends in a step of each job."""
    found = []
    for config in map(manager.load, jobs):
        dims, device = parts.dims(config, 2), torch.device(device_type())
        model = parts.model(config, dims.build_mesh(device.type), dims, device)
        batch, passes = zero_batch(config, dims, model.draws), batches_of_a_step(config, dims)
        rehearsal = Rehearsal(config, model, parts.optimizers(config, model), batch, passes)
        found.append(dict(rehearsal.step(Live()).sent))
    return found


def would_send(jobs, rank):
    return [dict(rehearse(manager.load(words), rank, 2, "cpu").sent) for words in jobs]


THREE_PASSES = {"training.global_batch_size": 24}
SENDING = {
    "FSDP 2": THREE_PASSES | RECOMPUTE["full"],
    "TP 2": {"parallelism.tensor_parallel_degree": 2} | RECOMPUTE["full"],
    "PP 2": {"parallelism.pipeline_parallel_degree": 2},
    "CP 2": {"parallelism.context_parallel_degree": 2},
    "EP 2": {"model.name": "deepseek", "model.flavor": "debugmodel", "model.overrides": "{n_layers=2}"}
    | {"parallelism.expert_parallel_degree": 2},
}


def test_a_rank_sends_what_was_foretold():
    """To the byte; where experts get tokens, in as many calls."""
    jobs = list(map(argv, SENDING.values()))
    really, told = run_ranks(2, sends, jobs)[1], run_alone(would_send, jobs, 1)
    for plan, were, will in zip(SENDING, really, told, strict=True):
        counted = {"calls"} if plan == "EP 2" else {"calls", "bytes"}
        here, there = ({key: sent[key] for key in sent if key[2] in counted} for sent in (were, will))
        assert there and here == there, plan
    numbers = parts.model_args(manager.load(jobs[0])).num_parameters
    assert told[0]["dp_shard", "reduce_scatter", "bytes"] == 3 * 4 * numbers / 2  # in float32, half to the other


def test_replicas_of_shards_add_up_what_each_shard_has():
    replicas = {f"parallelism.data_parallel_{way}_degree": 2 for way in ("replicate", "shard")}
    (_, (sent,)), _ = run_alone(both_ways, argv(replicas), 4)
    size = sent["dp_replicate", "all_reduce", "bytes"]
    assert size == sent["dp_shard", "reduce_scatter", "bytes"] > 0  # half of all gradients, once to one other


# Less than the whole step


def both_ways(words, world_size):
    """By pipeline rank peaks and what is sent: of the whole job, and of what is rehearsed of it where little may be
    rehearsed whole, by processes of their own.
    """
    config = manager.load(words)
    found = []
    for at_once, together in ((10**6, 10**6), (0, 0)):
        prediction.AT_ONCE, prediction.TOGETHER = at_once, together
        told = prediction.predict(config, world_size, "cuda", traffic=True)
        found.append(([each.peak for each in told], [dict(each.sent) for each in told]))
    return found


DEEP = {
    "layers": (2, {"model.overrides": SMALL["model.overrides"].replace("n_layers=3", "n_layers=7")}),
    "dense layers and experts": (
        2,
        {"model.name": "deepseek", "model.flavor": "debugmodel", "model.overrides": "{n_layers=7, n_dense_layers=2}"},
    ),
    "microbatches": (
        2,
        {
            "model.overrides": SMALL["model.overrides"].replace("n_layers=3", "n_layers=8"),
            "parallelism.pipeline_parallel_degree": 2,
            "training.local_batch_size": 12,
        },
    ),
}


@pytest.mark.parametrize("case", DEEP)
def test_a_part_of_a_deep_job_tells_what_the_whole_takes(case):
    world_size, options = DEEP[case]
    whole, part = run_alone(both_ways, argv(options, RECOMPUTE["full"]), world_size)
    assert part[0] == pytest.approx(whole[0], rel=0.01)
    assert part[1] == [pytest.approx(sent) for sent in whole[1]]
    assert all(part[1])


def of_a_task(number, place):
    if number < 0:
        raise JobError(f"given {number}")
    return number * place, os.getpid(), torch.get_num_threads()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_rehearsals_have_as_many_processes_as_there_are_processors(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    tasks = [(number, 10) for number in range(4)]
    for processors, daemon, elsewhere in ((2, False, True), (1, False, False), (2, True, False)):
        monkeypatch.setattr(rehearsal, "_processors", lambda number=processors: number)
        monkeypatch.setattr(type(multiprocessing.current_process()), "daemon", daemon)
        found = rehearsal.run_in_processes(of_a_task, tasks)
        assert [number for number, _, _ in found] == [0, 10, 20, 30]
        assert all((pid != os.getpid()) == elsewhere for _, pid, _ in found)
        assert not elsewhere or {threads for *_, threads in found} == {1}
        with pytest.raises(JobError, match="given -1"):
            rehearsal.run_in_processes(of_a_task, [*tasks, (-1, 1)])


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_a_rehearsal_that_is_ended_is_said(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(rehearsal, "_processors", lambda: 2)
    with pytest.raises(JobError, match="a rehearsal was ended, as where memory runs out"):
        rehearsal.run_in_processes(os._exit, [(9,), (9,)])


def note(folder, number):
    """The first one fails, and as many as there are processes end a little later."""
    if number == 0:
        raise JobError("the first")
    time.sleep(0.1)
    (folder / str(number)).touch()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_after_a_failure_no_rehearsal_is_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(rehearsal, "_processors", lambda: 2)
    with pytest.raises(JobError, match="the first"):
        rehearsal.run_in_processes(note, [(tmp_path, number) for number in range(40)])
    assert len(list(tmp_path.iterdir())) < 39


def stay(folder):
    (folder / str(os.getpid())).touch()
    signal.pause()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_rehearsals_end_with_whoever_asked_for_them(tmp_path, monkeypatch):
    """As where Ctrl-C ends `torchtitan check`, which kills the estimate that it has begun."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(rehearsal, "_processors", lambda: 2)
    asking = multiprocessing.get_context("fork").Process(
        target=rehearsal.run_in_processes, args=(stay, [(tmp_path,)] * 2)
    )
    asking.start()
    try:
        deadline = time.monotonic() + 60
        while len(begun := list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        asking.kill()
        assert all(gone(int(path.name)) for path in begun)
    finally:
        asking.kill()
        for path in tmp_path.iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.name), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
@pytest.mark.parametrize("gpu", [False, True])
def test_beside_a_gpu_processes_are_forked_from_one_that_has_done_nothing(gpu, monkeypatch):
    """autograd has threads there after its first backward, and works in no fork of this process any more."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpu)
    monkeypatch.setattr(rehearsal, "_processors", lambda: 2)
    torch.ones((), requires_grad=True).backward()
    parents = set(rehearsal.run_in_processes(os.getppid, [(), ()]))
    assert parents == {os.getpid()} if not gpu else not parents & {os.getpid(), os.getppid()}
    assert rehearsal.run_in_processes(os.getenv, [("CUDA_VISIBLE_DEVICES",)] * 2) == ["", ""]
    assert rehearsal.run_in_processes(torch.get_num_threads, [(), ()]) == [1, 1]


CHOSEN = {  # patterns -> whether it takes every layer of the model to tell
    ("*norm*", "output.weight"): False,
    ("layers.*.attention.w[qk].weight",): False,
    ("layers.*",): False,
    ("layers.1.*",): True,
    ("*norm*", "layers.[12]*"): True,
    ("*2*",): True,  # layer 2, and w2 of all
}


@pytest.mark.parametrize("patterns", CHOSEN)
@pytest.mark.parametrize("option", ["training.unfrozen", "adapter.train_fully"])
def test_layers_that_learn_alike_are_not_all_rehearsed(option, patterns):
    adapter = LEARNED["LoRA"] if option.startswith("adapter") else {}
    config = manager.load(argv(adapter, {option: list(patterns)}))
    assert prediction._layers_differ(config) == CHOSEN[patterns]


def with_reference(words):
    """The highest moment without another reference and with one, and this job's moments on one of two ranks."""
    jobs = [manager.load(words), manager.load([*words, "--dpo.reference=elsewhere"])]
    told = [prediction.predict(job, 1, "cpu")[0] for job in jobs]
    return [(each.moment, each.kinds) for each in told], rehearse(jobs[1], 0, 2, "cpu").moments


def test_the_reference_is_counted_beside_an_adapter_in_4_bits():
    """Its weights are whole and in float32, while nothing of the optimizer is there yet."""
    small = {"training.seq_len": 16, "training.local_batch_size": 2, "training.loss_chunks": 0}
    words = argv(LEARNED["QLoRA"], {"task.kind": "dpo"} | small)
    ((before, kinds), (moment, more)), of_two = run_alone(with_reference, words)
    assert before == "forward and backward" and moment == "asking the reference"
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384 + 2 * 128
    assert more["parameters of the reference"] == 4 * (2 * 512 * 128 + 128 + 3 * layer)
    for kind in ("parameters", "frozen parameters"):
        assert more[kind] == kinds[kind]
    assert "optimizer state" not in more and "gradients" not in more
    assert of_two[moment]["parameters of the reference"] == more["parameters of the reference"] / 2
    assert not of_two["optimizer"]["parameters of the reference"]  # it is gone by then


def gathered(words):
    """Devices of the storages that FSDP fills in a rehearsal of the first of four ranks, and all-gathers of experts."""
    devices, resize = set(), torch.UntypedStorage.resize_

    def seen(storage, size):
        devices.add(storage.device.type)
        return resize(storage, size)

    torch.UntypedStorage.resize_ = seen
    return devices, rehearse(manager.load(words), 0, 4, "cpu").sent["efsdp", "all_gather", "calls"]


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_experts_are_gathered_without_values(recompute):
    """A layer's of a large model are half a GiB, and what FSDP does with them is to be counted as the rest is."""
    devices, calls = run_alone(gathered, argv(SENDING["EP 2"], RECOMPUTE[recompute]))
    assert devices == {"meta"}
    assert calls == 2, "one layer has experts, whose shards are gathered ahead of forward and again ahead of backward"


class Noted(TorchDispatchMode):
    def __init__(self, name, seen):
        super().__init__()
        self.name, self.seen = name, seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(self.name)
        return func(*args, **kwargs or {})


def test_what_counts_a_rehearsal_stays_in_its_order_where_fsdp_gathers():
    seen = []
    with Noted("outer", seen), Noted("inner", seen):
        data_parallel._without_recompute(torch.ones)(1)
    assert seen == ["inner", "outer"]


def test_a_thinned_pipeline_keeps_its_cut():
    """Stages that are rehearsed keep their ends and first layers, numbered anew; the others one layer each."""
    stages = [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "layers.3", "layers.4"], ["layers.5", "norm"]]
    config = manager.load(argv({"parallelism.pipeline_parallel_degree": 3}))
    thin = prediction._thinned(config, stages, {1: 2}, parts.dims(config, 3))
    cut = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2"], ["layers.3", "norm"]]
    assert thin.parallelism.module_fqns_per_model_part == cut
    assert parts.model_args(thin).n_layers == 4


# What check says of it


def answers(words):
    """Of `torchtitan check` and of `torchtitan estimate`."""
    outs = [io.StringIO(), io.StringIO()]
    for command, out in zip((check, estimate), outs, strict=True):
        with contextlib.redirect_stdout(out):
            assert command.main(words) == 0
    return [out.getvalue().splitlines() for out in outs]


def test_checks_memory_is_what_estimate_foretells():
    words = ["--model.tokenizer_path=bytes", "--model.overrides={n_layers=1}", "--world-size=2", "--device=cuda"]
    checked, told = run_alone(answers, words)
    assert checked[0] == "the default job: OK" and checked[-len(told) :] == told
    assert told[0].startswith("the default job on 2 ranks (cuda): ") and "together" in told[-1]
