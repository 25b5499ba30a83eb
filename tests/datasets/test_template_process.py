"""Untrusted chat templates: too much time or memory is refused in a line that names the template."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.jobs import ROOT
from torchtitan.datasets import template_process, template_worker
from torchtitan.datasets.conversations import chat_spans
from torchtitan.datasets.sources import BadRecord, Chat, DataError
from torchtitan.datasets.tokenizer import build_tokenizer

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
GOOD = "{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}"
# description -> template
HOSTILE = {
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested ranges, four deep": ("{% for a in range(9999) %}" * 4 + "{% endfor %}" * 4),
    "a text that doubles": ("{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
                            "{% endfor %}{{ ns.x | length }}"),
    "one long text": "{% set n = 10 ** 10 %}{% set x = 'a' * n %}{{ x | length }}",
    "one long text, when compiled": "{{ ('a' * 10 ** 10) | length }}",
    "a list": "{% set n = 10 ** 10 %}{% set x = [0] * n %}{{ x | length }}",
    "a width": "{{ ('%9999999999d' % 1) | length }}",
    "a width of a method": "{{ ('a'.center(10 ** 10)) | length }}",
    "a width of a filter": "{{ ('a' | center(10 ** 10)) | length }}",
    "joined": "{% set x = 'a' * 10 ** 6 %}{{ (range(99999) | join(x)) | length }}",
    "replaced": "{% set x = 'a' * 10 ** 6 %}{{ x.replace('', x) | length }}",
    "paragraphs": "{{ lipsum(10 ** 9) | length }}",
    "one power": "{% set n = 10 ** 8 %}{{ 7 ** n }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "lists in lists": ("{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
                       "{% endfor %}{{ ns.x | string | length }}"),
    "a macro that calls itself": ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
                                  "{{ f(40) }}"),
}  # fmt: skip


@pytest.fixture
def quick(monkeypatch):
    """Limit the child to half a second of CPU time and 200 MiB."""
    template_process._end()
    worker = template_process.template_worker
    original = Path(worker.__file__).read_text()
    source = original.replace("SECONDS, MEMORY = 10, 2**29", "SECONDS, MEMORY = 0.5, 200 * 2**20")
    assert source != original

    def make(folder):
        (folder / "worker.py").write_text(source)
        monkeypatch.setattr(worker, "__file__", str(folder / "worker.py"))

    yield make
    template_process._end()


@pytest.mark.parametrize("name", HOSTILE)
def test_templates_over_the_limits_are_refused(name, tmp_path, quick):
    quick(tmp_path)
    (tmp_path / "hostile.jinja").write_text(HOSTILE[name])
    tokenizer = build_tokenizer("debug", str(tmp_path / "hostile.jinja"))
    began = time.process_time()
    with pytest.raises(DataError) as caught:
        chat_spans(tokenizer, Chat(CHAT), "a.jsonl:1")
    message = str(caught.value)
    assert f"a.jsonl:1: the chat template {tmp_path}/hostile.jinja needs more than 10 s of" in message, message
    assert not isinstance(caught.value, BadRecord) and "\n" not in message
    assert time.process_time() - began < 5  # CPU time of this process only; the child does the work
    tokenizer = build_tokenizer("debug")  # the next template is rendered
    tokenizer.chat_template = GOOD
    assert chat_spans(tokenizer, Chat(CHAT), "a.jsonl:1")


def test_the_text_limit_is_that_of_a_record(tmp_path):
    tokenizer = build_tokenizer("debug")
    tokenizer.chat_template = "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}"
    with pytest.raises(BadRecord, match="makes more than 4,194,304 characters"):
        chat_spans(tokenizer, Chat(CHAT), "a.jsonl:1")


def test_other_failures_keep_their_errors():
    tokenizer = build_tokenizer("debug")
    for source, kind, message in (
        ("{{ raise_exception('no role') }}", BadRecord, "refuses this conversation: no role"),
        ("{{ messages[0].content + 1 }}", BadRecord, "refuses this conversation: can only concatenate str"),
        ("{{ 1 / 0 }}", BadRecord, "refuses this conversation: division by zero"),
        ("{% for %}", DataError, "refuses this conversation: Expected an expression"),
        ("{{ messages.__class__.__mro__ }}", BadRecord, "refuses this conversation: access to attribute '__class__'"),
    ):
        tokenizer.chat_template = source
        with pytest.raises(kind, match=message):
            chat_spans(tokenizer, Chat(CHAT), "a.jsonl:1")


def test_a_fork_renders_with_a_new_child():
    tokenizer = build_tokenizer("debug")
    tokenizer.chat_template = GOOD
    spans = chat_spans(tokenizer, Chat(CHAT), "p")
    (child,) = template_process._children
    if not (fork := os.fork()):
        same = chat_spans(tokenizer, Chat(CHAT), "p") == spans
        os._exit(0 if same and template_process._children[0].process.pid != child.process.pid else 1)
    assert os.waitpid(fork, 0)[1] == 0
    assert chat_spans(tokenizer, Chat(CHAT), "p") == spans and template_process._children == [child]


def test_the_child_ends_with_its_parent_even_if_that_is_killed():
    code = (
        "from torchtitan.datasets import template_process as t; import time\n"
        "t.render('{{ 1 }}', [], {}, [(0, False)]); print(t._children[0].process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for _ in range(600):
        try:
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.1)
    raise AssertionError("the child outlives its parent")


def test_documented_limits_are_the_real_ones():
    page = (ROOT / "docs/data.md").read_text()
    assert f"{template_worker.SECONDS} seconds" in page and f"{template_worker.MEMORY // 2**20} MiB" in page


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a' * 10 ** 10 }}"])
def test_a_malformed_template_has_the_same_error_each_time(source):
    template_process._end()
    errors = []
    for _ in range(3):
        with pytest.raises(template_process.RenderingFailed) as raised:
            template_process.render(source, CHAT, {}, [(2, False)])
        errors.append((raised.value.kind, str(raised.value)))
    assert errors[0] == errors[1] == errors[2] and "NoneType" not in errors[0][1]
    assert template_process.render(GOOD, CHAT, {}, [(2, False)]) == ["Hi<|eot_id|>Hello<|eot_id|>"]


def test_an_unresponsive_child_is_ended_after_a_time(monkeypatch):
    template_process._end()
    assert template_process.render(GOOD, CHAT, {}, [(2, False)])
    os.kill(template_process._children[0].process.pid, signal.SIGSTOP)
    monkeypatch.setattr(template_process, "WAIT", 0.01)
    with pytest.raises(template_process.RenderingFailed) as raised:
        template_process.render(GOOD, CHAT, {}, [(2, False)])
    assert raised.value.kind == template_process.OUT_OF_TIME and not template_process._children
    monkeypatch.undo()
    assert template_process.render(GOOD, CHAT, {}, [(2, False)])
