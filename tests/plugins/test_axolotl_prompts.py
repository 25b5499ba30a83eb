"""Axolotl's prompt types: the texts, ids and masks that its prompters write, and the room of a record.

The expected texts are derived from prompters.py, prompt_tokenizers.py and prompt_strategies of Axolotl v0.18. There a
prompt and its answer are two calls of the tokenizer; the begin token of the second is taken away.
"""

import json

import numpy as np
import pytest
import tokenizers
import yaml

from torchtitan.assembly.data import JobDatasets
from torchtitan.config.layers import assemble, layer_of
from torchtitan.core.errors import JobError
from torchtitan.datasets.encoding import encode
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import DataError, Document, Pair
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.job import ResolvedJob
from torchtitan.plugins.importers import axolotl, parse, split
from torchtitan.plugins.importers.axolotl_prompts import BY_STYLE, PAIRS, REASONS, STRATEGIES
from torchtitan.plugins.importers.command import translate
from torchtitan.rules import check

JOB = {"base_model": "llama", "learning_rate": 1e-4, "max_steps": 100}
TASK = "Below is an instruction that describes a task"
INPUT = ", paired with an input that provides further context"
ASK = "Write a response that appropriately completes the request."
CHAT = "Below is an instruction from a USER that describes a task"
CONCISE = "The ASSISTANT writes a response that concisely and appropriately completes the request.\n\n"
PLAIN = "The ASSISTANT writes a response that appropriately and concisely completes the request.\n\n"
ADD = {"instruction": "Add {1}.", "input": "2, 3", "output": "5"}
ONE = {"instruction": "Add {1}.", "output": "5"}
QUESTION = {"question": "Why?", "answer": "So."}
ORCA = {"system_prompt": "Be kind.", "question": "Why?", "response": "So."}
TEXTS = [  # type, record, and the prompt and answer that Axolotl writes
    (
        "alpaca",
        ADD,
        f"{TASK}{INPUT}. {ASK}\n\n### Instruction:\nAdd {{1}}.\n\n### Input:\n2, 3\n\n### Response:\n",
        "5",
    ),
    ("alpaca", ONE, f"{TASK}. {ASK}\n\n### Instruction:\nAdd {{1}}.\n\n### Response:\n", "5"),
    ("alpaca:chat", ADD, f"SYSTEM: {TASK}{INPUT}. {ASK}\nUSER: Add {{1}}.\n2, 3\nASSISTANT:", "5"),
    ("alpaca:chat", ONE, f"SYSTEM: {TASK}. {ASK}\nUSER: Add {{1}}.\nASSISTANT:", "5"),
    ("alpaca_chat.load", ONE, f"SYSTEM: {TASK}. {ASK}\nUSER: Add {{1}}.\nASSISTANT:", "5"),
    ("alpaca_chat.load_concise", ADD, f"SYSTEM: {CHAT}{INPUT}. {CONCISE}\nUSER: Add {{1}}.\n2, 3\nASSISTANT:", "5"),
    ("alpaca_chat.load_qa", QUESTION | {"input": "x"}, f"SYSTEM: {CHAT}. {PLAIN}\nUSER: Why?\nASSISTANT:", "So."),
    (
        "alpaca_chat.load_camel_ai",
        {"message_1": "Why?", "message_2": "So."},
        f"SYSTEM: {CHAT}. {PLAIN}\nUSER: Why?\nASSISTANT:",
        "So.",
    ),
    ("alpaca_chat.load_no_prompt", ADD, "USER: Add {1}.\n2, 3\nASSISTANT:", "5"),
    ("alpaca_instruct", ONE, f"{TASK}. {ASK}\n\n### Instruction:\nAdd {{1}}.\n\n### Response:\n", "5"),
    ("alpaca_instruct.load_no_prompt", ONE, "### Instruction:\nAdd {1}.\n\n### Response:\n", "5"),
    ("alpaca_w_system", ADD | {"system": "Hi"}, "SYSTEM: Hi\nUSER: Add {1}.\n2, 3\nASSISTANT:", "5"),
    ("alpaca_w_system.load_chat", ONE | {"system": ""}, "USER: Add {1}.\nASSISTANT:", "5"),
    (
        "alpaca_w_system.load_instruct",
        ONE | {"system": "Hi"},
        "Hi\n\n### Instruction:\nAdd {1}.\n\n### Response:\n",
        "5",
    ),
    (
        "alpaca_w_system.load_open_orca",
        ORCA,
        "### System:\nBe kind.\n### Human:\nWhy?\n### Assistant:\n",
        "So.",
    ),
    ("orcamini", ORCA, "### System:\nBe kind.\n\n### User:\nWhy?\n\n### Response:\n", "So."),
    (
        "context_qa",
        QUESTION | {"article": "It is."},
        "SYSTEM: Use the following contextual information to concisely answer the question.\n\n"
        "USER: It is.\n===\nWhy?\nASSISTANT:",
        "So.",
    ),
    ("context_qa.load_v2", QUESTION | {"context": "It is."}, "Context: It is.\nQuestion: Why?\n", "Answer: So."),
    (
        "creative_acr.load_answer",
        {"instruction": "Why?", "answer": "No.", "revision": "So."},
        "Answer the following question in a comprehensive, in-depth, and creative way. Additionally your response "
        "should be relevant, accurate, and free of any ambiguity.\nUSER: Why?\nASSISTANT:",
        "So.",
    ),
    (
        "summarizetldr",
        {"article": "Long.", "summary": "Short."},
        "USER: Summarize the following article as a TL;DR.\nLong.\nASSISTANT:",
        "Short.",
    ),
    (
        "gpteacher:chat",
        {"instruction": "Why?", "response": "So."},
        f"SYSTEM: {TASK}. {ASK}\nUSER: Why?\nASSISTANT:",
        "So.",
    ),
    (
        "oasst",
        {"INSTRUCTION": "Why?", "RESPONSE": "So."},
        f"{TASK}. {ASK}\n\n### Instruction:\nWhy?\n\n### Response:\n",
        "So.",
    ),
    (
        "jeopardy",
        {"question": "It is red", "category": "Colours", "answer": "a rose"},
        f"{TASK}{INPUT}. {ASK}\n\n### Instruction:\nIt is red\n\n### Input:\nColours\n\n### Response:\n",
        "what is a rose",
    ),
    (
        {"format": "[INST] {instruction} {input} [/INST]", "system_prompt": "Hi "},
        ADD,
        "Hi [INST] Add {1}. 2, 3 [/INST]",
        "5",
    ),
    ({"field_output": "reply"}, {"instruction": "Why?", "reply": "So."}, "Why? ", "So."),
]


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text('{"model_type": "llama"}')


def job_of(kind, **options):
    with open("job.yml", "w") as file:
        yaml.safe_dump(JOB | {"datasets": [{"path": "a.jsonl", "type": kind}]} | options, file)
    return axolotl.read(parse(split(["axolotl train job.yml --launcher python"])))


def source_of(kind, **options):
    job = job_of(kind, **options)
    assert job.faults == [], job.faults
    return job.values.get("training.sources", [{}])[0]


def reader_of(source, **options):
    return RecordReader(
        format_name=source.get("format"),
        fields=source.get("fields", {}),
        template=source.get("template", {}),
        **options,
    )


def tokenizer_with_blanks(folder):
    """Return a tokenizer that puts a blank before every text, as Llama 2's, and the library's own of the same file."""
    letters = sorted({letter for _, record, *texts in TEXTS for text in (*record.values(), *texts) for letter in text})
    vocabulary = {name: number for number, name in enumerate(["<unk>", "<s>", "</s>", "\u2581", *letters, "\u2581S"])}
    pipeline = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, merges=[("\u2581", "S")], unk_token="<unk>", byte_fallback=False)
    )
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    pipeline.decoder = tokenizers.decoders.Metaspace()
    pipeline.add_special_tokens(["<s>", "</s>"])
    folder.mkdir()
    pipeline.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return build_tokenizer(folder), pipeline


@pytest.mark.parametrize("kind, record, prompt, answer", TEXTS, ids=range(len(TEXTS)))
def test_ids_and_masks_are_those_of_axolotls_prompters(kind, record, prompt, answer, tmp_path):
    tokenizer, pipeline = tokenizer_with_blanks(tmp_path / "blanks")
    ids, trained = encode(tokenizer, reader_of(source_of(kind)).document(record, "long", "short"))
    expected = [[1, *pipeline.encode(prompt).ids], [*pipeline.encode(answer).ids, 2]]
    assert ids.tolist() == expected[0] + expected[1]
    assert trained.tolist() == [False] * len(expected[0]) + [True] * len(expected[1])


WITH_SYSTEM = ("alpaca_w_system", "orcamini")
WITHOUT_SYSTEM = [row for row in TEXTS if isinstance(row[0], str) and not row[0].startswith(WITH_SYSTEM)]


@pytest.mark.parametrize("kind, record, prompt, answer", WITHOUT_SYSTEM, ids=range(len(WITHOUT_SYSTEM)))
def test_a_system_message_is_only_read_where_axolotl_reads_it(kind, record, prompt, answer):
    """Datasets of instructions often have a field that the prompter of their type has no place for."""
    spans = reader_of(source_of(kind)).document(record | {"system": "Be kind."}, "long", "short").content
    assert [span.content for span in spans] == [prompt, answer]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "{instruction} {input!r}"}, 'format: given "{instruction} {input!r}"'),
        ({"format": "{instruction:>9}"}, "with the places {instruction} and {input}"),
        ({"format": "{instruction} {system}"}, "with the places {instruction} and {input}"),
        ({"no_input_format": "{instruction} {input}"}, "with the places {instruction}"),
        ({"system_format": "{system.name}"}, "with the places {system}"),
        ({"format": "{instruction} }"}, "with the places"),
        ({"format": "{}"}, "with the places"),
        ({"no_input_format": ""}, 'no_input_format: given ""; allowed: text'),
        ({"field_output": ""}, 'field_output: given ""; allowed: text'),
    ],
)
def test_parts_of_a_custom_prompt_that_are_not_read_are_refused(changes, message):
    faults = [str(fault) for fault in job_of({"format": "{instruction} {input} "} | changes).faults]
    assert any(message in fault for fault in faults), faults


@pytest.mark.parametrize("name, prompt", [("field_input", "Hi|Add."), ("field_system", "Add. 2"), ("", "Hi|Add. 2")])
def test_an_empty_name_leaves_a_field_out(name, prompt):
    record = {"instruction": "Add.", "input": "2", "system": "Hi", "output": "5"}
    parts = {"format": "{instruction} {input}", "no_input_format": "{instruction}", "system_format": "{system}|"}
    source = source_of(parts | ({name: ""} if name else {}))
    assert reader_of(source).document(record, "long", "short").content[0].content == prompt


def test_a_custom_prompt_without_a_system_format_writes_none():
    text = "Q: {instruction}"
    source = source_of({"format": text, "no_input_format": text, "system_format": "", "system_prompt": "Hi "})
    for system in ("Be kind.", "", None):
        spans = reader_of(source).document(ONE | {"system": system}, "long", "short").content
        assert spans[0].content == "Q: Add {1}."


def test_a_default_for_empty_system_messages_is_noted():
    assert any("empty system message" in note for note in job_of({"system_prompt": "Hi "}).notes)
    assert not any("empty system message" in note for note in job_of({"format": "{instruction}"}).notes)


def test_a_null_system_message_is_noted_where_axolotl_writes_none():
    assert any("system message that is null" in note for note in job_of("orcamini").notes)
    assert not any("that is null" in note for kind in ("alpaca_chat", "alpaca_w_system") for note in job_of(kind).notes)
    spans = reader_of(source_of("orcamini")).document(ORCA | {"system_prompt": None}, "long", "short").content
    assert spans[0].content == "### System:\n\n\n### User:\nWhy?\n\n### Response:\n"


def test_every_type_has_its_text():
    kinds = {kind.partition(":")[0].removesuffix(".load") for kind, *_ in TEXTS if isinstance(kind, str)}
    assert kinds == {*BY_STYLE, *STRATEGIES}


@pytest.mark.parametrize("kind", [*REASONS, "alpaca:chatml", "alpaca:phi", "alpaca:other", "summarizetldr:chat"])
def test_other_types_are_refused_by_name(kind):
    (fault,) = job_of(kind).faults
    assert fault.key == "datasets[0].type" and json.dumps(kind) in str(fault)
    assert REASONS.get(kind, "s") in str(fault)


@pytest.mark.parametrize("key, value", [("conversation", "chatml"), ("field", "x"), ("field_output", "reply")])
def test_keys_of_other_types_are_refused(key, value):
    entry = {"path": "a.jsonl", "type": "jeopardy", key: value}
    faults = job_of("jeopardy", datasets=[entry]).faults
    assert [fault.key for fault in faults] == [f"datasets[0].{key}"]
    faults = job_of("", rl="dpo", datasets=[entry | {"type": "chatml.intel"}]).faults
    assert f"datasets[0].{key}" in [fault.key for fault in faults]


def test_braces_in_a_custom_format_are_refused():
    (fault,) = job_of({"format": "{{{instruction}}}"}).faults
    assert fault.key == "datasets[0].format" and "without {{ and }}" in str(fault)


SYSTEM, USER = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}
ANSWERS = [{"role": "assistant", "content": text} for text in ("So.", "No.")]
TALK = {"chosen": [USER, ANSWERS[0]], "rejected": [USER, ANSWERS[1]]}
TWO = {"chosen": "So.", "rejected": "No."}
MESSAGES = {  # strategy -> record, and the messages of both that the template then renders
    "intel": (TWO | {"question": "Why?", "system": "Be kind."}, [SYSTEM, USER]),
    "icr": (TWO | {"input": "Why?", "system": ""}, [USER]),
    "prompt_pairs": (TWO | {"prompt": "Why?"}, [USER]),
    "ultra": (TALK | {"prompt": "Why?"}, [USER]),
    "argilla_chat": (TALK, [USER]),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_strategies_of_pairs_are_conversations_under_their_template(template, name):
    record, before = MESSAGES[name]
    job = job_of(f"{template}.{name}", rl="dpo")
    assert job.faults == [] and job.values["data.chat_template"] == template
    reader = reader_of(job.values["training.sources"][0], pairs=True)
    pair = reader.document(record, "long", "short").content
    assert [answer.content.messages for answer in pair] == [[*before, answer] for answer in ANSWERS]
    assert job_of(f"{template}.{name}").faults, "they need rl"
    assert any("reads its first two messages" in note for note in job.notes) == (name in ("ultra", "argilla_chat"))


def test_pairs_are_read_as_they_are_and_with_fields_of_their_own():
    as_it_is = reader_of(source_of("passthrough.default", rl="dpo"), pairs=True)
    table = {"field_prompt": "ask", "field_rejected": "bad", "prompt_format": "{prompt}", "chosen_format": None}
    custom = reader_of(source_of(table, rl="orpo"), pairs=True)
    for reader, record in ((as_it_is, TWO | {"prompt": "Q"}), (custom, {"ask": "Q", "chosen": "So.", "bad": "No."})):
        content = reader.document(record, "long", "short").content
        assert isinstance(content, Pair) and [answer.text for answer in content] == ["QSo.", "QNo."]
    for change in ({"prompt_format": "Q: {prompt}"}, {"field_chosen": 3}, {"field_answer": "a"}):
        (fault,) = job_of(table | change, rl="dpo").faults
        assert fault.key == f"datasets[0].type.{next(iter(change))}"


def piece_lengths(job, length):
    """Return the tokens of each piece that a job makes of a text of `length` tokens."""
    options = JobDatasets(ResolvedJob(job, 1)).prepare_options("training")
    pieces = options.apply(np.arange(length), np.ones(length, dtype=bool), Document("a", "a.jsonl:1")).pieces
    return [len(ids) for ids, _ in pieces]


def imported(line):
    return translate(parse(split([line])), None).config


def test_the_room_of_a_record_is_that_of_the_other_program(tmp_path):
    """Records of N - 1, N and N + 1 tokens: Axolotl and LLaMA-Factory have room for N, trl cuts to N."""
    drop = {"sequence_len": 64, "datasets": [{"path": "a.jsonl", "type": "alpaca"}]}
    (tmp_path / "drop.yml").write_text(yaml.safe_dump(JOB | drop))
    (tmp_path / "cut.yml").write_text(yaml.safe_dump(JOB | drop | {"excess_length_strategy": "truncate"}))
    (tmp_path / "stop.yml").write_text(yaml.safe_dump(JOB | drop | {"excess_length_strategy": "raise"}))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text('{"a": {"file_name": "a.json"}}')
    (tmp_path / "factory.yml").write_text(
        "stage: sft\ndo_train: true\nmodel_name_or_path: llama\ndataset: a\ncutoff_len: 64\noutput_dir: out\n"
    )
    trl = "trl sft --num_processes 1 --model_name_or_path llama --dataset_name owner/set --max_length 64"
    lines = {"drop.yml": [], "cut.yml": [64], "factory.yml --world-size 1": [], trl: [64], f"{trl} --packing": [64]}
    for line, longer in lines.items():
        job = imported(line)
        assert job.training.seq_len == 64
        assert [piece_lengths(job, length) for length in (63, 64, 65)] == [[63], [64], longer], line
    with pytest.raises(DataError, match="65 tokens, but data.max_tokens = 64"):
        piece_lengths(imported("stop.yml"), 65)
    texts = {"datasets": [{"path": "a.jsonl", "type": "completion"}], "sequence_len": 64}
    (tmp_path / "texts.yml").write_text(yaml.safe_dump(JOB | texts))
    assert piece_lengths(imported("texts.yml"), 130) == [65, 65, 2], "pieces with the inputs of Axolotl's"


def test_trl_without_a_length_cuts_nothing(tmp_path):
    (tmp_path / "sft.yaml").write_text("max_length: null\n")
    line = "trl sft --num_processes 1 --model_name_or_path llama --dataset_name owner/set --config sft.yaml"
    with pytest.raises(JobError, match="max_length: given nothing; allowed: null for a model with max_position"):
        imported(line)
    (tmp_path / "llama/config.json").write_text('{"model_type": "llama", "max_position_embeddings": 256}')
    job = imported(line)
    assert (job.training.seq_len, job.data.max_tokens, job.data.too_long) == (256, None, "error")
    assert piece_lengths(job, 257) == [257]
    with pytest.raises(JobError, match="max_length: given nothing; allowed: a number with packing"):
        imported(f"{line} --packing")


def test_the_limit_may_not_exceed_the_room():
    values = {"task.kind": "sft", "training.seq_len": 64, "data.max_tokens": 66, "training.steps": 1}
    faults = check(assemble(layer_of("a test", values.items()).values, ["a test"]), 1, "cpu")
    assert any("data.max_tokens: given 66; allowed: at most 65, the room of a sample" in str(fault) for fault in faults)
