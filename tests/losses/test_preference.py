"""Tests of preference pairs: closed forms of the losses, pairs kept together in batches, and whole training jobs."""

import errno
import gc
import json
import math
import weakref
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.support import jobs, judged
from tests.support.judged import lines
from tests.support.pool import run_ranks
from tests.support.preference_jobs import BYTES, dpo_arguments, validation_losses, write_pairs
from tests.support.tiny_decoders import LLAMA
from torchtitan.assembly.data import JobDatasets
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.core.machine_errors import MachineError
from torchtitan.core.random_draws import initialize
from torchtitan.datasets import open_source, preparing
from torchtitan.datasets.encoding import TrainOn, encode
from torchtitan.datasets.preparing import PrepareOptions, prepared_shards
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sample_packing import Packing, PackReader
from torchtitan.datasets.sources import Chat, DataError, Span
from torchtitan.datasets.token_shards import TokenReader
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.job import ResolvedJob
from torchtitan.losses.preference import IPO, ORPO, Preference
from torchtitan.losses.tasks import CHUNK_BYTES
from torchtitan.models.llama.model import SPEC as LLAMA_SPEC
from torchtitan.models.spec import MODELS
from torchtitan.process.heartbeat import Progress
from torchtitan.process.ranks import read_ranks
from torchtitan.training import reference_logprobs, run
from torchtitan.training.inference_model import load_model
from torchtitan.training.reference_logprobs import FILE, MODEL, References, digests_of, load_references

anywhere = judged.anywhere


# Losses


def test_closed_forms():
    log_probabilities = torch.tensor([[-3.0, -5.0], [-6.0, -2.0]], dtype=torch.float64)
    reference = torch.tensor([[-4.0, -4.5], [-6.0, -2.5]], dtype=torch.float64)
    lengths = torch.tensor([[2, 5], [3, 1]])
    h = [(-3 + 4) - (-5 + 4.5), (-6 + 6) - (-2 + 2.5)]
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    plain, rewards = Preference(beta=0.3).losses(log_probabilities, reference, lengths)
    assert plain.tolist() == pytest.approx([-math.log(sigmoid(0.3 * x)) for x in h], rel=1e-12)
    assert rewards.tolist() == [[1.0, -0.5], [0.0, 0.5]]
    smooth, _ = Preference(beta=0.3, label_smoothing=0.2).losses(log_probabilities, reference, lengths)
    expected = [-0.8 * math.log(sigmoid(0.3 * x)) - 0.2 * math.log(sigmoid(-0.3 * x)) for x in h]
    assert smooth.tolist() == pytest.approx(expected, rel=1e-12)
    means = [(1 / 2) - (-0.5 / 5), 0 / 3 - 0.5 / 1]
    ipo, _ = IPO(beta=0.3).losses(log_probabilities, reference, lengths)
    assert ipo.tolist() == pytest.approx([(x - 1 / 0.6) ** 2 for x in means], rel=1e-12)
    odds = lambda mean: math.log(math.exp(mean) / (1 - math.exp(mean)))  # noqa: E731
    orpo, _ = ORPO(beta=0.3).losses(log_probabilities, reference, lengths)
    expected = [
        -w / n - 0.3 * math.log(sigmoid(odds(w / n) - odds(x / m)))
        for (w, x), (n, m) in zip(log_probabilities.tolist(), lengths.tolist(), strict=True)
    ]
    assert orpo.tolist() == pytest.approx(expected, rel=1e-9)


def test_count_loss_and_measured_sums():
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(4, 7, bias=False), torch.randn(6, 5, 4)
    labels = torch.randint(0, 7, (6, 5))
    labels[4:] = -100  # padding rows, which fill up a step
    batch = {"labels": labels, "reference": torch.zeros(6)}
    objective = Preference(beta=0.5)
    logs = torch.log_softmax(head(hidden), -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0].sum(-1)
    margins = 0.5 * (logs[:4:2] - logs[1:4:2])
    assert objective.count(batch) == 2
    loss = objective(hidden, head, batch)
    assert loss.item() == pytest.approx(-torch.nn.functional.logsigmoid(margins).sum().item(), rel=1e-5)
    chosen_rewards, rejected_rewards, correct, margin_sum, pairs = objective.take_sums().tolist()
    assert pairs == 2 and margin_sum == pytest.approx(margins.sum().item(), rel=1e-5) and correct == (margins > 0).sum()
    assert chosen_rewards - rejected_rewards == pytest.approx(margin_sum, rel=1e-5) and objective.take_sums() is None
    objective.num_chunks = 3
    assert objective(hidden, head, batch).item() == pytest.approx(loss.item(), rel=1e-5)
    assert objective.first(batch, 2)["labels"][2:].eq(-100).all() and objective.count(objective.first(batch, 2)) == 1


@pytest.mark.parametrize(("pairs_of_chunk", "most_tokens"), [(3, 30), (2, 20), (1, 10), (0.25, 2)])
def test_a_pair_with_too_many_logits_is_computed_in_chunks_of_tokens(monkeypatch, pairs_of_chunk, most_tokens):
    """Three pairs of 10 tokens. Chunks are pairs; where not even one is within the limit, its tokens are divided."""
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(4, 7, bias=False), torch.randn(6, 5, 4, requires_grad=True)
    labels, tokens = torch.randint(0, 7, (6, 5)), []
    monkeypatch.setattr("torch.nn.functional.linear", lambda x, w, b=None: tokens.append(len(x)) or x @ w.T)
    batch = {"labels": labels, "reference": torch.randn(6)}
    expected = torch.autograd.grad(Preference(1)(hidden, head, batch), (hidden, head.weight))
    monkeypatch.setitem(CHUNK_BYTES, "cpu", int(pairs_of_chunk * 10 * 4 * 7))
    objective = Preference(0)
    objective.logits_width = 7
    tokens.clear()
    loss = objective(hidden, head, batch)
    assert objective.take_sums()[-1] == 3 and max(tokens) <= most_tokens
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, head.weight)), expected)
    objective.compile(backend="aot_eager")
    compiled = torch.autograd.grad(objective(hidden, head, batch), (hidden, head.weight))
    torch.testing.assert_close(compiled, expected)
    with torch.no_grad():
        assert objective(hidden, head, batch).item() == pytest.approx(loss.item(), rel=1e-6)


def pair_gradients(limit):
    """Return loss and gradients of one pair, whose head is split over two ranks."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    head, hidden = torch.nn.Linear(4, 8, bias=False), torch.randn(2, 5, 4, requires_grad=True)
    head.weight = torch.nn.Parameter(head.weight.detach().chunk(2)[mesh.get_local_rank()].clone())
    head.register_forward_hook(lambda _, inputs, output: DTensor.from_local(output, mesh, [Shard(1)]))
    objective, batch = Preference(0), {"labels": torch.randint(0, 8, (2, 5)), "reference": torch.randn(2)}
    objective.logits_width = 4
    with pytest.MonkeyPatch.context() as patch:  # the rank runs other tests afterwards
        patch.setitem(CHUNK_BYTES, "cpu", limit)
        loss = objective(hidden, head, batch)
    return loss.item(), *torch.autograd.grad(loss, (hidden, head.weight))


def test_a_pair_in_chunks_of_tokens_with_the_vocabulary_split_over_ranks():
    expected, chunked = (run_ranks(2, pair_gradients, limit) for limit in (2**29, 3 * 4 * 4))
    torch.testing.assert_close(chunked, expected)


def pair_batch(seed):
    """Return four pairs of random prompts and answers: rows [8, S] of one document and padding, some without labels."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator)  # noqa: E731
    lengths, index = draw(3, 24, 8, 1), torch.arange(24)
    is_padding, labels = index >= lengths, draw(0, 64, 8, 24)
    labels[is_padding | (index < (lengths * torch.rand(8, 1, generator=generator)).long())] = -100
    labels[seed % 8 if seed % 2 else 8 :] = -100  # the pairs that fill a step up have none, or one of an answer's
    positions = torch.where(is_padding, index - lengths, index)
    batch = {"tokens": draw(0, 64, 8, 24), "labels": labels, "positions": positions, "document_ids": is_padding.long()}
    return batch | {"reference": torch.randn(8, generator=generator, dtype=torch.float64)}


@pytest.mark.parametrize("kind", [Preference, IPO, ORPO])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_padding_of_pairs_is_left_out(kind, num_chunks):
    """Loss, gradients and rewards are those of all tokens, and of log-probabilities from all logits."""
    model = LLAMA_SPEC.build(LLAMA["llama3"]).double()
    initialize(model, 7, model.init_rule)
    model.loss, computed = kind(num_chunks, beta=0.3), []
    model.tok_embeddings.register_forward_pre_hook(lambda _, inputs: computed.append(inputs[0].numel()))
    parameters = list(model.parameters())
    for seed in range(6):
        batch = {name: x for name, x in pair_batch(seed).items() if name in model.loss.targets or x.dim() > 1}
        labels = batch["labels"]
        logits = model(**{name: x for name, x in batch.items() if name not in model.loss.targets})
        terms = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0].where(labels != -100, 0)
        log_probs, lengths = terms.sum(-1).view(-1, 2), (labels != -100).sum(-1).clamp(min=1).view(-1, 2)
        is_pair = (labels != -100).any(-1).view(-1, 2).all(-1)
        reference = batch.get("reference", torch.zeros(8)).view(-1, 2)
        losses, gained = model.loss.losses(log_probs, reference, lengths)
        expected, rewards = losses[is_pair].sum(), 0.3 * gained[is_pair].sum(0).detach()
        gradients = torch.autograd.grad(expected, parameters)
        for given in (batch, model.loss.join_documents(batch)):
            loss = model(**given)
            torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(model.loss.take_sums()[:2].double(), rewards, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(torch.autograd.grad(loss, parameters), gradients, rtol=1e-8, atol=1e-12)
        assert computed[-2] == 192 and computed[-1] < 150


# Records


TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
GOOD, BAD = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": TURNS, "chosen": "yes", "rejected": "no"},
        {"prompt": TURNS, "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "q", "chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]} | {"prompt": TURNS[:1]},
        {"chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]},
        {"prompt": "q", "messages": [*TURNS, GOOD], "chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]},
        {"messages": [*TURNS, GOOD], "chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]},
        {"prompt": "", "chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]},
    ],
)
def test_forms_of_conversations(record):
    pair = RecordReader().document(record, "", "").content
    assert pair.chosen.content == Chat([*TURNS, GOOD]) and pair.rejected.content == Chat([*TURNS, BAD])
    tokenizer = build_tokenizer("bytes", "alpaca")
    for side, answer in zip(pair, ("yes", "no"), strict=True):
        ids, trained = encode(tokenizer, side, TrainOn("last_turn"))
        assert tokenizer.decode(ids[trained]) == answer


def test_a_system_message_may_precede_a_repeated_prompt():
    prompt = [SYSTEM, {"role": "user", "content": "q"}]
    pair = (
        RecordReader().document({"prompt": "q", "chosen": [*prompt, GOOD], "rejected": [*prompt, BAD]}, "", "").content
    )
    assert pair.chosen.content == Chat([*prompt, GOOD]) and pair.rejected.content == Chat([*prompt, BAD])


def test_a_system_message_that_only_messages_has_precedes_both_answers():
    record = {"messages": [SYSTEM, *TURNS, GOOD], "chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]}
    pair = RecordReader().document(record, "", "").content
    assert pair.chosen.content == Chat([SYSTEM, *TURNS, GOOD]) and pair.rejected.content == Chat([SYSTEM, *TURNS, BAD])


def test_forms_of_text_and_records_that_are_no_pair(tmp_path):
    document = RecordReader().document({"prompt": "q", "chosen": "yes", "rejected": "no"}, "", "")
    assert document.content.chosen.content == [Span("q", False), Span("yes")] and document.format_name == "preference"
    assert document.text == "qyesqno"
    repeated = RecordReader().document({"prompt": "q? ", "chosen": "q? yes", "rejected": "q? no"}, "", "")
    assert repeated.text == "q? yesq? no" and repeated.content.chosen.content == [Span("q? ", False), Span("yes")]
    echoed = RecordReader().document({"prompt": "Hi", "chosen": "Hi you", "rejected": "no"}, "", "")
    assert echoed.content.chosen.content == [Span("Hi", False), Span("Hi you")], "as an answer to it alone does"
    same = RecordReader().document({"prompt": "Hi", "chosen": "Hi", "rejected": "Hi you"}, "", "")
    assert same.content.chosen.content == [Span("Hi", False), Span("Hi")], "and as the prompt itself does"
    for record, message in (
        ({"prompt": "q", "chosen": None, "rejected": "no"}, "a:1: field 'chosen' holds nothing \\(null\\), with str"),
        ({"prompt": 5, "chosen": "a", "rejected": "no"}, "holds str, with int as prompt; allowed: text after"),
        ({"prompt": "q", "chosen": [], "rejected": []}, "field 'chosen' holds list"),
        # full transcripts, and a question under another name: answers without a prompt would be learned
        ({"chosen": "Human: q Assistant: a", "rejected": "no"}, "field 'chosen' holds str, with nothing as prompt"),
        ({"prompt": None, "chosen": "yes", "rejected": "no"}, "field 'chosen' holds str, with nothing as prompt"),
        ({"prompt": "", "chosen": "yes", "rejected": "no"}, "field 'chosen' holds str, with nothing as prompt"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "'chosen' and 'rejected' are not both answers to the same messages"),
        ({"prompt": "p", "chosen": [*TURNS, GOOD], "rejected": [TURNS[2], BAD]}, "are not both answers to the same"),
    ):
        with pytest.raises(DataError, match=message):
            RecordReader().document(record, "a:1", "1")
    with pytest.raises(DataError, match="a pair of answers, which task.kind dpo, ipo, orpo and reward learn"):
        encode(BYTES, document)
    with pytest.raises(DataError, match="rows.jsonl:1: no pair of answers; give records with chosen and rejected"):
        shards_of(tmp_path, [{"prompt": "q", "completion": "a"}])


def shards_of(folder, rows, **options):
    """Tokenize records of pairs; return the token shards."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = PrepareOptions(TrainOn("last_turn"), max_tokens=16, group_size=2, **options)
    return prepared_shards(
        open_source("text", str(path), RecordReader()), str(path), "bytes", folder / "data", 1, True, recipe
    )


def test_pairs_are_kept_or_dropped_as_one(tmp_path):
    rows = [{"prompt": "q" * (1 + i % 3), "chosen": "+" * (1 + i), "rejected": "-" * 3} for i in range(20)]
    shards = shards_of(tmp_path, rows, too_long="drop")
    retained = [i for i in range(20) if 1 + i % 3 + i + 1 + 2 <= 16]
    assert shards.header["records"]["fates"] == {"whole": len(retained), "dropped": 20 - len(retained)}
    assert len(TokenReader(shards).documents) == 2 * len(retained)
    for split, held_out in ((None, False), (0.3, True), (0.3, False)):
        reader = PackReader([shards], 15, 0, True, Packing(1, 257, split, held_out, group_size=2))
        ids, _ = reader.read(np.arange(reader.samples(2)))
        signs = [["+" in BYTES.decode(row), "-" in BYTES.decode(row)] for row in ids]
        assert signs == [[True, False], [False, True]] * (len(ids) // 2)
        share = {None: 1, 0.3: 0.3 if held_out else 0.7}[split]
        assert len(ids) == 2 * 2 * round(share * len(retained))
    with pytest.raises(DataError, match="24 documents, which are no groups of 5; give records of pairs as text"):
        PackReader([shards], 15, 0, True, Packing(1, 257, group_size=5))


def test_a_new_pair_tokenization_version_tokenizes_pairs_again(tmp_path, monkeypatch):
    def folders(group_size):
        recipe = PrepareOptions(TrainOn("last_turn"), group_size=group_size)
        source = open_source("text", str(path), RecordReader())
        return prepared_shards(source, str(path), "bytes", tmp_path / "data", 1, True, recipe).folder

    path = tmp_path / "rows.jsonl"
    for group_size, record in ((2, {"prompt": "q", "chosen": "yes", "rejected": "no"}), (1, {"text": "alone"})):
        path.write_text(json.dumps(record))
        before = folders(group_size)
        assert folders(group_size) == before
        with monkeypatch.context() as patch:
            patch.setattr(preparing, "PAIR_TOKENIZATION_VERSION", 1)
            assert (folders(group_size) == before) == (group_size == 1)


# Jobs


@pytest.fixture(scope="module")
def one_rank_run(tmp_path_factory):
    """Train on one rank; return the records, the logged steps, and the run's folder."""
    folder = tmp_path_factory.mktemp("dpo")
    rows = write_pairs(folder / "rows.jsonl")
    ((steps, _),) = run_ranks(1, jobs.train, dpo_arguments(folder / "one", rows))
    return rows, steps, folder / "one"


def test_the_loss_starts_at_ln_2_and_the_margin_rises(one_rank_run):
    _, steps, folder = one_rank_run
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[0]["reward_margin"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["loss"] < 0.5 and steps[-1]["reward_accuracy"] == 1
    assert steps[-1]["reward_margin"] > steps[3]["reward_margin"] > 0.01
    gain = steps[-1]["reward_chosen"] - steps[-1]["reward_rejected"]
    assert gain == pytest.approx(steps[-1]["reward_margin"], rel=1e-4)
    assert validation_losses(folder)[-1] < 0.6


PLANS = {
    "FSDP 2": dict(parallelism__data_parallel_shard_degree=2),
    "FSDP 2, padded to each batch": dict(parallelism__data_parallel_shard_degree=2, data__pad_to="batch"),
    "TP 2": dict(parallelism__tensor_parallel_degree=2),
    "PP 2": dict(parallelism__pipeline_parallel_degree=2, parallelism__pipeline_parallel_microbatch_size=1),
}


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_logs_the_same_losses_and_rewards(one_rank_run, plan, tmp_path):
    rows, steps, folder = one_rank_run
    options = PLANS[plan] | (dict(validation__local_batch_size=2) if "PP" in plan else {})
    got, _ = run_ranks(2, jobs.train, dpo_arguments(tmp_path, rows, **options))[0]
    for name in ("loss", "reward_margin", "reward_chosen"):
        # differences of log-probabilities of about 10, in float32's seven digits, pass through Adam's division
        assert [step[name] for step in got] == pytest.approx([step[name] for step in steps], rel=1e-3, abs=1e-4)
    assert validation_losses(tmp_path) == pytest.approx(validation_losses(folder), rel=1e-3)


def test_the_reference_is_the_model_at_the_start_and_a_resume_keeps_it(one_rank_run, tmp_path):
    """Compare the saved log-probabilities with the plain model's, row by row."""
    rows, steps, _ = one_rank_run
    run_ranks(1, jobs.train, dpo_arguments(tmp_path, rows, training__steps=4, lr_scheduler__total_steps=8))
    config = manager.load(dpo_arguments(tmp_path, rows))
    plain = ModelBuilder(ResolvedJob(config)).meta_model().to_empty(device="cpu")
    initialize(plain, config.debug.seed, plain.init_rule)
    saved = load_file(tmp_path / FILE)
    references = References(saved["digests"], saved["values"])
    rows_compared = 0
    part = JobDatasets(ResolvedJob(config)).held_out(BYTES, 0, ModelBuilder(ResolvedJob(config)).objective())
    for batches in (islice(JobDatasets(ResolvedJob(config)).training_loader(BYTES, 0), 8), part):
        for batch in batches:
            with torch.no_grad():
                logits = plain(batch["tokens"], positions=batch["positions"], document_ids=batch["document_ids"])
            batch_references = references.add(batch)["reference"]
            for row, labels in enumerate(batch["labels"]):
                answer_mask = labels != -100
                logs = torch.log_softmax(logits[row, answer_mask], -1)
                expected = logs.gather(-1, labels[answer_mask][:, None]).sum()
                assert batch_references[row].item() == pytest.approx(expected.item(), rel=1e-5)
                rows_compared += 1
    assert rows_compared == 4 * 8 + 16 and len(saved["values"]) <= rows_compared  # those of 4 steps and of validation
    run_ranks(1, jobs.train, dpo_arguments(tmp_path, rows, lr_scheduler__total_steps=8))
    assert [step["loss"] for step in jobs.logged_steps(tmp_path)] == [step["loss"] for step in steps]
    other = {name: tensor + 1 for name, tensor in batch.items()}
    with pytest.raises(JobError, match="does not have all pairs: the data have changed since the run began"):
        references.add(other)
    assert digests_of(other).shape == (len(batch["tokens"]), 16)


def answer_log_probabilities(model, batch):
    """Compute the log-probability of each row's answer, [B], row by row."""
    log_probabilities = []
    for tokens, positions, labels in zip(batch["tokens"], batch["positions"], batch["labels"], strict=True):
        answer_mask = labels != -100
        with torch.no_grad():
            logs = torch.log_softmax(model(tokens[None], positions=positions[None])[0, : len(labels)], -1)
        log_probabilities.append(logs[answer_mask].gather(-1, labels[answer_mask][:, None]).sum())
    return torch.stack(log_probabilities)


REFERENCE_MODELS = {  # ranks, options, form of the other model
    "a folder of Hugging Face": (1, {}, "hf"),
    "a run, beside an adapter": (1, dict(adapter__kind="lora", adapter__rank=2), "run"),
    "FSDP 2": (2, dict(parallelism__data_parallel_shard_degree=2), "hf"),
    "PP 2": (2, PLANS["PP 2"] | dict(validation__local_batch_size=2), "hf"),
}


def train_and_count_reference_parameters(argv):
    """Run jobs.train: the logged steps, how many parameters the reference had, how many live after its pass."""
    weak_references, counts = [], []
    original_build, original_references = reference_logprobs.load_reference_model, run.load_references

    def build_other(*args):
        model = original_build(*args)
        weak_references.extend(weakref.ref(parameter) for part in model.parts for parameter in part.parameters())
        return model

    def ask(*args):
        gc.disable()  # a collection by Python would free them at some time and hide that nothing else did
        try:
            return original_references(*args)
        finally:
            counts.append(sum(ref() is not None for ref in weak_references))
            gc.enable()

    reference_logprobs.load_reference_model, run.load_references = build_other, ask
    try:
        return jobs.train(argv)[0], len(weak_references), *counts
    finally:
        reference_logprobs.load_reference_model, run.load_references = original_build, original_references


@pytest.mark.parametrize("name", REFERENCE_MODELS)
def test_the_first_loss_uses_the_other_reference_model(one_rank_run, name, tmp_path):
    """Compare the first step's loss with two plain models; the run has freed the reference by then."""
    rows, _, folder = one_rank_run
    ranks, options, form = REFERENCE_MODELS[name]
    config = manager.load(dpo_arguments(tmp_path / "run", rows))
    plain, other = (ModelBuilder(ResolvedJob(config)).meta_model().to_empty(device="cpu") for _ in range(2))
    initialize(plain, config.debug.seed, plain.init_rule)
    initialize(other, 7, other.init_rule)
    path = folder
    if form == "run":
        other, _ = load_model(ResolvedJob(config), folder / "checkpoint/step-00000008", torch.device("cpu"))
    else:
        MODELS["llama3"].hf.save_hf(path := tmp_path / "other", other.state_dict(), other.args)
    first, parameters, alive = run_ranks(
        ranks,
        train_and_count_reference_parameters,
        dpo_arguments(tmp_path / "run", rows, dpo__reference=path, training__steps=1, **options),
    )[0]
    assert parameters > 0 and alive == 0
    loader = JobDatasets(ResolvedJob(config)).training_loader(BYTES, 0)
    log_ratios = torch.cat(
        [answer_log_probabilities(plain, batch) - answer_log_probabilities(other, batch) for batch in islice(loader, 2)]
    ).view(-1, 2)
    loss = -torch.nn.functional.logsigmoid(0.1 * (log_ratios[:, 0] - log_ratios[:, 1])).mean().item()
    assert abs(loss - math.log(2)) > 1e-3
    assert first[0]["loss"] == pytest.approx(loss, rel=1e-5)


def test_padding_rows_need_no_reference():
    batch = {"tokens": torch.arange(12).view(4, 3), "labels": torch.ones(4, 3, dtype=torch.int64)}
    references = References(digests_of(batch), np.array([-1.0, -2.0, -3.0, -4.0], dtype=np.float32))
    assert references.add(Preference().first(batch, 2))["reference"].tolist() == [-1, -2, 0, 0]
    batch["labels"][3, 1] = 2
    with pytest.raises(DataError, match="does not have all pairs"):
        references.add(batch)


def test_a_damaged_file_of_references_is_refused(tmp_path):
    (tmp_path / FILE).write_bytes(b"x" * 20)
    job, feed = ResolvedJob(manager.load([f"--job.dump_folder={tmp_path}"])), SimpleNamespace(objective=Preference())
    with pytest.raises(JobError, match=r"reference\.safetensors: .* cannot be read \(.*\); bring the file back, or"):
        load_references(job, read_ranks(), None, feed, 1, Progress())


@pytest.mark.parametrize("step", [0, 1])
def test_a_disk_that_cannot_be_read_says_nothing_of_the_references(tmp_path, monkeypatch, step):
    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / FILE).write_bytes(b"x" * 20)
    monkeypatch.setattr(reference_logprobs, "safe_open", fail)
    job, feed = ResolvedJob(manager.load([f"--job.dump_folder={tmp_path}"])), SimpleNamespace(objective=Preference())
    with pytest.raises(MachineError, match=r"reference\.safetensors: the machine cannot read it now"):
        load_references(job, read_ranks(), None, feed, step, Progress())


@pytest.mark.parametrize(("before", "today", "same"), [("m", "./m", True), ("m", "n", False), (None, "n", False)])
def test_a_resume_keeps_the_reference_model_however_its_path_is_written(tmp_path, monkeypatch, before, today, same):
    """Saved log-probabilities belong to one model: the same path in another spelling is accepted, others are not."""
    monkeypatch.chdir(tmp_path)
    saved = {"digests": np.zeros((1, 16), np.uint8), "values": np.zeros(1, np.float32)}
    save_file(saved, tmp_path / FILE, {MODEL: str(tmp_path / before) if before else ""})
    argv = [f"--job.dump_folder={tmp_path}", "--task.kind=dpo", f"--dpo.reference={today}"]
    call = ResolvedJob(manager.load(argv)), read_ranks(), None, SimpleNamespace(objective=Preference()), 1, Progress()
    if same:
        assert len(load_references(*call).values) == 1
        return
    with pytest.raises(JobError, match='^dpo.reference: given .*/n"; allowed: (".*/m"|unset), as when .*bring it'):
        load_references(*call)


def test_references_that_cannot_be_used_are_refused(one_rank_run, tmp_path):
    rows, _, folder = one_rank_run
    job = [argument for argument in dpo_arguments(tmp_path, rows) if "tokenizer_path" not in argument]
    (line,) = lines(*job, f"--dpo.reference={tmp_path / 'none'}")
    assert line.startswith("dpo.reference: given ") and "no such file or folder; give a checkpoint, a folder" in line
    (tmp_path / FILE).write_bytes(b"")  # of a start that was stopped before its first checkpoint
    assert lines(*job, f"--dpo.reference={tmp_path / 'none'}") == [line]
    resumed = [argument.replace(str(tmp_path), str(folder)) for argument in job]
    assert not any(
        "no such file" in fault_line for fault_line in lines(*resumed, f"--dpo.reference={tmp_path / 'none'}")
    )
    wide = "{dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=264, multiple_of=16}"
    other = [f"--model.overrides={wide}" if "overrides" in argument else argument for argument in job]
    (line,) = lines(*other, f"--dpo.reference={folder}")
    assert (
        "allowed: a model of vocab_size = 264; " in line and "has vocab_size = 260; give a model of the job's" in line
    )
    built = ModelBuilder(ResolvedJob(manager.load(other))).meta_model().to_empty(device="cpu")
    MODELS["llama3"].hf.save_hf(tmp_path / "wide", built.state_dict(), built.args)
    (line,) = lines(*job, f"--dpo.reference={tmp_path / 'wide'}")
    assert "allowed: weights of llama3" in line and "vocab" in line
    (line,) = lines("--dpo.reference=x")
    assert line.endswith('allowed: unset with task.kind = pretrain; set task.kind = "dpo", or drop it')
    assert 'dpo.reference: given "x"; allowed: unset with task.kind = orpo, which has no reference; drop it' in lines(
        "--task.kind=orpo", "--dpo.reference=x"
    )


def test_rules():
    pairs = ["--task.kind=ipo", "--training.local_batch_size=1"]
    assert lines(*pairs, "--data.train_on=all", "--data.too_long=split", "--dpo.label_smoothing=0.1") == [
        'data.train_on: given "all"; allowed: unset with task.kind = ipo, which trains on last answers; drop it',
        'data.too_long: given "split"; allowed: not split with task.kind = ipo; drop or truncate them',
        "dpo.label_smoothing: given 0.1; allowed: 0 with task.kind = ipo; drop it",
    ]
    assert lines("--dpo.beta=0.2") == [
        'dpo.beta: given 0.2; allowed: 0.1 with task.kind = pretrain; set task.kind = "dpo", or drop it'
    ]
    (line,) = lines(*pairs, "--compile.enable")
    assert "allowed: without loss with task.kind = ipo, which computes metrics in it" in line
