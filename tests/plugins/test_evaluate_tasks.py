"""Compare answers to lm-eval's requests with losses of single requests, with `torchtitan evaluate` and `generate`,
and, where lm-eval is installed, with its own class for transformers models.
"""

import importlib.util
import json
import math
import sys
from itertools import product
from types import SimpleNamespace

import jinja2
import pytest
import torch

from tests.support.hf_parity import build
from tests.support.lm_eval_tasks import CHOICE, LINES, ROLLING, WRITTEN, write_tasks
from tests.support.remembering import remembering
from tests.support.tiny_decoders import DEEPSEEK, GATED, GPT2, LLAMA, MISTRAL, OPT, QWEN2, QWEN3, QWEN3_MOE
from torchtitan import cli
from torchtitan.commands.generate import sample
from torchtitan.core.errors import JobError
from torchtitan.datasets.tokenizer.byte_level import ByteTokenizer
from torchtitan.losses.evaluation import measure_position_losses, total_loss
from torchtitan.models.llama import LlamaArgs
from torchtitan.models.llama.model import HF, Llama
from torchtitan.models.spec import MODELS
from torchtitan.plugins.eval_tasks import evaluate_tasks
from torchtitan.plugins.eval_tasks.evaluate_tasks import Answers, likelihoods, split_into_requests, tasks_table
from torchtitan.plugins.eval_tasks.task_files import FIGURES, FILTERS

ARGS = LlamaArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=16, max_seq_len=128)
BYTES = ByteTokenizer()
CONTEXT = 24
PAIRS = [
    ("a question: ", "yes"),
    ("a question:", " no, not at all"),
    ("", "nothing before it"),
    ("what stands far before it has no place in the context of ", "this"),
    ("x", "y"),
]
TEXTS = ["a document of some length, " * 12, "short", "", "no two places of this are alike: 0123456789 ZYXWV"]


def request(*args):
    return SimpleNamespace(args=args)


def reference_likelihoods(model, pairs, context=CONTEXT):
    """Compute (log-likelihood, greedy) of each pair by log_softmax, one forward pass a pair."""
    results = []
    for prompt, continuation in pairs:
        ids = torch.tensor((prompt + continuation)[-context - 1 :])
        logs = model(ids[None, :-1])[0, -len(continuation) :].double().log_softmax(-1)
        log = logs.gather(1, ids[-len(continuation) :, None]).sum().item()
        results.append((log, logs.argmax(-1).tolist() == continuation))
    return results


@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_likelihoods_equal_those_of_single_requests(rows):
    model = build(Llama, ARGS)
    answers = Answers(model, BYTES, CONTEXT, rows)
    pairs = [
        (BYTES.encode(context.rstrip(), bos=True), BYTES.encode(context[len(context.rstrip()) :] + continuation))
        for context, continuation in PAIRS
    ]
    expected = reference_likelihoods(model, pairs)
    results = answers.loglikelihood([request(*pair) for pair in PAIRS])
    for (log, greedy), (reference, likeliest) in zip(results, expected, strict=True):
        assert log == pytest.approx(reference, rel=1e-5) and greedy == likeliest
    assert model.loss is None and answers.loglikelihood([request("a", "")]) == [(0.0, True)]


FAMILIES = {
    "llama3": LLAMA["llama3"],
    "deepseek": DEEPSEEK["v3"],
    "mistral": MISTRAL["window"],
    "mixtral": GATED["mixtral"],
    "qwen2": QWEN2["plain"],
    "qwen3": QWEN3["plain"],
    "qwen3_moe": QWEN3_MOE["published"],
    "gpt2": GPT2["words"],
    "opt": OPT["350M"],
}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_likelihoods_of_every_decoder_family(family):
    """Compare in float64, with a short prompt, a long one and one longer than the context."""
    model = build(MODELS[family].build, FAMILIES[family], dtype=torch.float64)
    ids = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [(ids[:5], ids[5:9]), (ids[:20], ids[20:24]), (ids[:30], ids[30:])]
    results = dict(likelihoods(model, requests, seq_len=CONTEXT, context=CONTEXT, rows=3))
    for number, (log, greedy) in enumerate(reference_likelihoods(model, requests)):
        assert results[number].log == pytest.approx(log, rel=1e-12) and results[number].greedy == greedy


@torch.no_grad()
def test_the_models_own_continuation_is_greedy():
    model = build(Llama, ARGS)
    prompt = BYTES.encode("so", bos=True)
    options = dict(max_new_tokens=4, context=CONTEXT, temperature=0, top_k=0, seed=0)
    continuation = list(sample(model, prompt, BYTES, **options))
    other = [*continuation[:-1], continuation[-1] ^ 1]
    results = dict(
        likelihoods(model, [(prompt, continuation), (prompt, other)], seq_len=CONTEXT, context=CONTEXT, rows=2)
    )
    assert [results[0].greedy, results[1].greedy] == [True, False]


@pytest.mark.parametrize("length, context", product([0, 1, 3, 4, 5, 8, 10, 25], [1, 4, 24]))
def test_windows_score_each_token_once_with_the_longest_context(length, context):
    ids = list(range(length))
    pairs = list(split_into_requests(ids, -1, context))
    assert [token for _, continuation in pairs for token in continuation] == ids
    for prefix, continuation in pairs:
        window = prefix + continuation
        assert window == [-1, *ids][window[0] + 1 : window[-1] + 2]  # in text order, without gaps
        assert len(window) == min(context, length) + 1


@torch.no_grad()
def test_log_likelihood_of_a_text_is_the_sum_over_its_windows():
    model = build(Llama, ARGS)
    results = Answers(model, BYTES, CONTEXT, 3).loglikelihood_rolling([request(text) for text in TEXTS])
    for text, log in zip(TEXTS, results, strict=True):
        pieces = reference_likelihoods(model, split_into_requests(BYTES.encode(text), BYTES.bos_id, CONTEXT))
        assert log == pytest.approx(math.fsum(piece for piece, _ in pieces), rel=1e-5)


def test_a_continuation_longer_than_the_context_is_refused():
    answers = Answers(build(Llama, ARGS), BYTES, CONTEXT, 1)
    with pytest.raises(JobError, match="a continuation has 25 tokens; allowed: 24; use a longer context"):
        answers.loglikelihood([request("a", "b" * 25)])


# Generated texts

GREEDY = {"max_gen_toks": 12, "do_sample": False, "temperature": 0.0}


def test_generation_ends_at_stop_strings_and_leaves_the_model_unchanged():
    model = build(Llama, ARGS)
    answers = Answers(model, BYTES, CONTEXT, 2)
    before = answers.loglikelihood([request(*pair) for pair in PAIRS])
    prompts = ["a", "", "what stands far before it has no place"]
    texts = answers.generate_until([request(prompt, GREEDY) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        ids = BYTES.encode(prompt, bos=True)[-(CONTEXT - 12) :]
        options = dict(max_new_tokens=12, context=CONTEXT, temperature=0, top_k=0, seed=0)
        assert BYTES.decode(sample(model, ids, BYTES, **options)).startswith(text) and text
    ends = [text[2] for text in texts]
    for text, end in zip(texts, ends, strict=True):
        options = GREEDY | {"until": [end, "", "never"]}
        prompt = prompts[texts.index(text)]
        assert answers.generate_until([request(prompt, options)]) == [text.split(end)[0]]
    assert answers.loglikelihood([request(*pair) for pair in PAIRS]) == before


def test_max_gen_toks_beyond_the_context_is_refused():
    answers = Answers(build(Llama, ARGS), BYTES, CONTEXT, 1)
    with pytest.raises(JobError, match="max_gen_toks: given 256; allowed: less than the context, 24"):
        answers.generate_until([request("a", {})])


# A model with a cache


def model_with_cache(**options):
    model, _ = remembering(sizes=dict(vocab_size=260), **options)
    return model.eval()


def segments(ids, length):
    """Yield the segments of one document as batches of one row, as datasets/segments.py makes them."""
    for start in range(0, len(ids) - 1, length):
        segment = torch.tensor(ids[start : start + length + 1])
        state = dict(begins=torch.tensor([start == 0]), filled=torch.tensor([len(segment) - 1]))
        yield dict(tokens=segment[None, :-1], labels=segment[None, 1:], offsets=torch.tensor([start])) | state


@pytest.mark.parametrize("scope", ["lane", "global"])
def test_a_model_with_a_cache_reads_texts_of_any_length(scope):
    """Compare with `torchtitan evaluate`, which reads each document from an empty cache."""
    model, length = model_with_cache(scope=scope), 8
    answers = Answers(model, BYTES, length, 3)
    texts = [text for text in TEXTS if text]
    results = answers.loglikelihood_rolling([request(text) for text in texts])
    for text, log in zip(texts, results, strict=True):
        model.memory.clear()
        nats = total_loss(
            measure_position_losses(model, segments(BYTES.encode(text, bos=True), length), length, 1)
        ).nats
        assert log == pytest.approx(-nats, rel=1e-5)
    # tokens far before the continuation are read, too
    prompt, continuation = TEXTS[0].rstrip(), " and its end"
    both, prompt_only = answers.loglikelihood_rolling([request(prompt + continuation), request(prompt)])
    assert answers.loglikelihood([request(prompt, continuation)])[0][0] == pytest.approx(both - prompt_only, abs=1e-3)


def test_requests_to_a_model_with_a_cache_leave_it_empty():
    model = model_with_cache()
    answers = Answers(model, BYTES, 8, 2)
    before = answers.loglikelihood_rolling([request(text) for text in TEXTS])
    texts = answers.generate_until([request(TEXTS[0], GREEDY), request("a", GREEDY)])
    assert not model.memory.stores
    assert texts == answers.generate_until([request(TEXTS[0], GREEDY), request("a", GREEDY)])
    assert answers.loglikelihood_rolling([request(text) for text in TEXTS]) == before


# The command

LM_EVAL = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(not LM_EVAL, reason="needs the package lm_eval, of the extra eval")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Create a folder with a tiny model, its tokenizer, and tasks."""
    folder = tmp_path_factory.mktemp("evaluated")
    HF.save_hf(folder / "model", build(Llama, ARGS).state_dict(), ARGS)
    for name, content in BYTES.as_hf_files().items():
        (folder / "model" / name).write_bytes(content)
    write_tasks(folder / "tasks", CHOICE, ROLLING, WRITTEN)
    return folder


def command(home, *argv):
    return ["evaluate", str(home / "model"), "--tasks", str(home / "tasks"), "--training.seq_len=64", *map(str, argv)]


def test_templates_are_sandboxed(monkeypatch):
    """Replace lm-eval's module by a fake that has its template environment, so that the test needs no package."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters["twice"] = lambda text: 2 * text
    utils = SimpleNamespace(env=environment)
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(utils=utils))
    with evaluate_tasks._sandboxed():
        assert utils.env.from_string("{{ word | twice }}").render(word="ab") == "abab"
        for reaching in ("{{ word.__class__.__mro__ }}", "{{ words.append(1) }}"):
            with pytest.raises(jinja2.exceptions.SecurityError):
                utils.env.from_string(reaching).render(word="ab", words=[])
    assert utils.env is environment


def test_without_the_package_its_install_is_named(home, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(command(home)) == 2
    assert "install it with: pip install 'torchtitan-toml[eval]'" in capsys.readouterr().err


def test_a_model_of_classes_is_refused(home, capsys):
    argv = ["--model.name=gpt2", "--model.flavor=debugmodel", "--model.overrides={n_classes = 2}"]
    assert cli.main(command(home, *argv)) == 2
    assert "distinguishes 2 classes" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--plot=p.svg"], ["--cache-sizes=0"]])
def test_options_for_documents_are_refused_with_tasks(home, capsys, argv):
    assert cli.main(command(home, *argv)) == 2
    assert "leave these out" in capsys.readouterr().err


def test_the_table_has_a_row_for_each_metric():
    figures = {"documents": 1200, "acc,none": 0.5, "acc_stderr,none": 0.01, "f1,cut": 0.25}
    head, *rows = tasks_table({"tasks": {"choice": figures}}).splitlines()
    assert [row.split() for row in rows] == [
        ["choice", "1,200", "acc", "none", "0.5000", "0.0100"],
        ["choice", "1,200", "f1", "cut", "0.2500"],
    ]


def lm_eval_model(home, **options):
    """Return lm-eval's own class, which runs the same weights through transformers."""
    from lm_eval.models.huggingface import HFLM

    # Its cache of logits confuses windows that differ only in where the continuation begins, as in a text that
    # repeats itself, and returns logits of wrong positions (0.4.13).
    defaults = dict(pretrained=str(home / "model"), device="cpu", dtype="float32", batch_size=2, logits_cache=False)
    return HFLM(**defaults | options)


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, 0) for args in arguments]


@needs_lm_eval
@pytest.mark.parametrize("context", [24, 40])
def test_answers_equal_those_of_lm_eval_for_transformers(home, context):
    answers, reference = Answers(build(Llama, ARGS), BYTES, context, 3), lm_eval_model(home, max_length=context)
    pairs = instances("loglikelihood", [pair for pair in PAIRS if len(pair[1]) <= context])
    for (log, greedy), (other, likeliest) in zip(
        answers.loglikelihood(pairs), reference.loglikelihood(pairs, disable_tqdm=True), strict=True
    ):
        assert log == pytest.approx(other, rel=1e-5) and greedy == likeliest
    texts = instances("loglikelihood_rolling", [(text,) for text in TEXTS if text])
    # otherwise lm-eval also scores the begin-of-text token, after itself
    plain = lm_eval_model(home, max_length=context, add_bos_token=False).loglikelihood_rolling(texts, disable_tqdm=True)
    assert answers.loglikelihood_rolling(texts) == pytest.approx(plain, rel=1e-5)
    prompts = instances("generate_until", [(prompt, GREEDY | {"until": [end]}) for prompt in TEXTS[:2] for end in "an"])
    expected = [text.rstrip("\ufffd") for text in reference.generate_until(prompts, disable_tqdm=True)]
    assert answers.generate_until(prompts) == expected and any(expected)


@needs_lm_eval
def test_metrics_equal_those_of_lm_eval(home, tmp_path, capsys):
    from lm_eval.evaluator import evaluate

    from torchtitan.plugins.eval_tasks.evaluate_tasks import _open_task_files

    assert cli.main(command(home, "--out", tmp_path / "found.json")) == 0, capsys.readouterr().err
    results, output = json.loads((tmp_path / "found.json").read_text()), capsys.readouterr().out
    tasks = _open_task_files(home / "tasks", str(tmp_path))
    model = lm_eval_model(home, max_length=64, add_bos_token=False)
    rolling = evaluate(model, {"tasks": {"rolling": tasks["tasks"].pop("rolling")}}, bootstrap_iters=0)
    expected = evaluate(lm_eval_model(home, max_length=64), tasks, bootstrap_iters=0)["results"] | rolling["results"]
    for name, figures in results["tasks"].items():
        assert figures.pop("documents") == len(LINES)
        plain = {key: value for key, value in figures.items() if "_stderr" not in key}
        assert plain and plain == pytest.approx({key: expected[name][key] for key in plain}, rel=1e-5)
        assert all(f"{value:.4f}" in output for value in plain.values())
    assert results["tasks"]["choice"]["acc_stderr,none"] > 0


@needs_lm_eval
def test_a_document_without_a_field_is_reported(home, tmp_path, capsys):
    """Remove the field from a later document; lm-eval reads the first one when it opens a task."""
    write_tasks(tmp_path / "tasks", CHOICE | {"doc_to_text": "{{ question if answer else missing }}"})
    assert cli.main([*command(home, "--samples=2"), f"--tasks={tmp_path / 'tasks'}"]) == 2
    assert "a metric of choice fails: UndefinedError" in capsys.readouterr().err


RECURSIVE = "{% macro a() %}{{a()}}{% endmacro %}{% if not answer %}{{a()}}{% endif %}"


@needs_lm_eval
@pytest.mark.parametrize(
    "task, change, message",
    [
        (CHOICE, {"doc_to_text": "{{question.__class__.__mro__}}"}, "SecurityError"),
        (CHOICE, {"doc_to_text": "{{nothing}}"}, "'nothing' is undefined"),
        (CHOICE, {"test_split": "train"}, "lm-eval does not open it: KeyError"),
        (CHOICE, {"num_fewshot": 20, "fewshot_split": "test"}, "of choice fails: ValueError: Sample larger"),
        (CHOICE, {"doc_to_text": "{{1 // answer}}"}, "of choice fails: ZeroDivisionError"),
        (CHOICE, {"doc_to_text": RECURSIVE}, "of choice fails: RecursionError"),
        (CHOICE, {"doc_to_text": "{% if not answer %}{{'a' * 10**15}}{% endif %}"}, "of choice fails: MemoryError"),
        (
            WRITTEN,
            {"generation_kwargs": {"max_gen_toks": 64}},
            "written: max_gen_toks: given 64; allowed: less than the",
        ),
    ],
    ids=[
        "reaching",
        "undefined",
        "split",
        "examples",
        "division",
        "recursion",
        "memory",
        "long",
    ],  # the first three fail when the task is opened
)
def test_tasks_that_lm_eval_cannot_use_are_reported(home, tmp_path, capsys, task, change, message):
    write_tasks(tmp_path / "tasks", task | change)
    assert cli.main([*command(home), f"--tasks={tmp_path / 'tasks'}"]) == 2
    assert message in capsys.readouterr().err


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@needs_lm_eval
@pytest.mark.parametrize(
    "change, message",
    [
        (
            {
                "doc_to_target": "{{'a' * 40}}",
                "metric_list": [{"metric": "exact_match", "regexes_to_ignore": ["(a+)+b"]}],
            },
            "a metric of written fails: TimeLimitExceeded: no end after 1 s",
        ),
        (
            {"doc_to_text": f"{{% if not answer %}}{ENDLESS}{{% endif %}}"},
            "a metric of written fails: TimeLimitExceeded",
        ),
        ({"doc_to_text": ENDLESS}, "lm-eval does not open it: TimeLimitExceeded: no end after 3 s"),
    ],
    ids=["pattern", "template", "first"],
)
def test_endless_templates_and_patterns_are_stopped(home, tmp_path, capsys, monkeypatch, change, message):
    opening = 3.0 if "after 3 s" in message else 60.0  # long enough where opening the task should succeed
    for name, seconds in (("OPENING", opening), ("COUNTING", 1.0), ("OF_DOCUMENT", 0.0)):
        monkeypatch.setattr(evaluate_tasks, name, seconds)
    write_tasks(tmp_path / "tasks", WRITTEN | change)
    assert cli.main([*command(home), f"--tasks={tmp_path / 'tasks'}"]) == 2
    assert message in capsys.readouterr().err


@needs_lm_eval
def test_every_listed_metric_and_filter_is_computed(home, tmp_path):
    """Let lm-eval itself compute every metric and filter of the tables FIGURES and FILTERS."""
    extra = {"regex_pattern": "(a)", "k": 1, "mapping_dict": {}, "default_value": "a", "group_select": 0}
    filters = []
    for name, keys in FILTERS.items():
        step = {"function": name} | {key: extra[key] for key in keys if key in extra}
        filters.append({"name": name, "filter": [step, {"function": "take_first"}]})
    scored = WRITTEN | {"task": "told", "output_type": "loglikelihood", "generation_kwargs": None}
    for task in (CHOICE, ROLLING, WRITTEN, scored):
        figures = FIGURES[task["output_type"]]
        metrics = {
            "metric_list": [{"metric": name, "aggregation": aggregation} for name, aggregation in figures.items()]
        }
        if task is WRITTEN:
            metrics |= {"filter_list": [{"name": "none", "filter": [{"function": "take_first"}]}]}
        write_tasks(tmp_path / "tasks", task | metrics)
    filtered = WRITTEN | {"task": "filtered", "filter_list": filters}
    write_tasks(tmp_path / "tasks", filtered)
    out = tmp_path / "found.json"
    assert cli.main([*command(home), f"--tasks={tmp_path / 'tasks'}", f"--out={out}"]) == 0
    results = json.loads(out.read_text())["tasks"]
    for name, kind in (("choice", "multiple_choice"), ("told", "loglikelihood"), ("rolling", "loglikelihood_rolling")):
        assert {f"{figure},none" for figure in FIGURES[kind]} <= set(results[name])
    assert {f"{figure},none" for figure in FIGURES["generate_until"]} <= set(results["written"])
    assert {f"exact_match,{name}" for name in FILTERS} <= set(results["filtered"])


@needs_lm_eval
def test_task_fields_without_effect_are_reported(home, tmp_path, capsys):
    write_tasks(tmp_path / "tasks", CHOICE | {"tag": "words", "repeats": 2})
    assert cli.main([*command(home, "--samples=1"), f"--tasks={tmp_path / 'tasks'}"]) == 0
    assert "choice: without effect here: tag, repeats" in capsys.readouterr().err


@needs_lm_eval
def test_an_answer_outside_the_choices_is_reported(home, tmp_path, caplog):
    """lm-eval counts the document as wrong."""
    write_tasks(tmp_path / "tasks", CHOICE | {"doc_to_target": "nowhere"})
    assert cli.main([*command(home, "--samples=1"), f"--tasks={tmp_path / 'tasks'}"]) == 0
    assert "Label index was not in within range of available choices" in caplog.text


class PairTokenizer(ByteTokenizer):
    """A tokenizer that keeps every second byte, so that a text of one letter may have no token."""

    def encode(self, text, **kwargs):
        return super().encode(text, **kwargs)[::2]


def test_a_continuation_without_tokens_is_refused():
    answers = Answers(build(Llama, ARGS), PairTokenizer(), CONTEXT, 2)
    with pytest.raises(JobError, match="an answer, 'b', given after 'a', .*target_delimiter"):
        answers.loglikelihood([request("a", "b")])
