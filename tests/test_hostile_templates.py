"""Chat templates of strangers: what takes too long or too much memory is refused in a line that names the template."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.jobs import ROOT
from torchtitan.datasets import template_process, template_worker
from torchtitan.datasets.encoding import chat_spans
from torchtitan.datasets.sources import BadRecord, DataError
from torchtitan.datasets.tokenizer import build_tokenizer

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
GOOD = "{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}"
# what it does -> the template
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
    """Half a second of processor time and 200 MiB; the child reads its own copy of these."""
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
def test_a_template_that_takes_too_much_is_refused(name, tmp_path, quick):
    quick(tmp_path)
    (tmp_path / "hostile.jinja").write_text(HOSTILE[name])
    tokenizer = build_tokenizer("debug", str(tmp_path / "hostile.jinja"))
    began = time.process_time()
    with pytest.raises(DataError) as caught:
        chat_spans(tokenizer, CHAT, "a.jsonl:1")
    message = str(caught.value)
    assert f"a.jsonl:1: the chat template {tmp_path}/hostile.jinja needs more than 10 s of" in message, message
    assert not isinstance(caught.value, BadRecord) and "\n" not in message
    assert time.process_time() - began < 5  # of this process: the work is the child's
    tokenizer = build_tokenizer("debug")  # and the next template is served
    tokenizer.chat_template = GOOD
    assert chat_spans(tokenizer, CHAT, "a.jsonl:1")


def test_the_limit_of_text_is_that_of_a_record(tmp_path):
    tokenizer = build_tokenizer("debug")
    tokenizer.chat_template = "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}"
    with pytest.raises(BadRecord, match="makes more than 4,194,304 characters"):
        chat_spans(tokenizer, CHAT, "a.jsonl:1")


def test_other_failures_stay_what_they_were():
    tokenizer = build_tokenizer("debug")
    for source, kind, said in (
        ("{{ raise_exception('no role') }}", BadRecord, "refuses this conversation: no role"),
        ("{{ messages[0].content + 1 }}", BadRecord, "refuses this conversation: can only concatenate str"),
        ("{{ 1 / 0 }}", BadRecord, "refuses this conversation: division by zero"),
        ("{% for %}", DataError, "refuses this conversation: Expected an expression"),
        ("{{ messages.__class__.__mro__ }}", BadRecord, "refuses this conversation: access to attribute '__class__'"),
    ):
        tokenizer.chat_template = source
        with pytest.raises(kind, match=said):
            chat_spans(tokenizer, CHAT, "a.jsonl:1")


def test_a_fork_renders_with_a_child_of_its_own():
    tokenizer = build_tokenizer("debug")
    tokenizer.chat_template = GOOD
    spans = chat_spans(tokenizer, CHAT, "p")
    (mine,) = template_process._children
    if not (fork := os.fork()):
        same = chat_spans(tokenizer, CHAT, "p") == spans
        os._exit(0 if same and template_process._children[0].process.pid != mine.process.pid else 1)
    assert os.waitpid(fork, 0)[1] == 0
    assert chat_spans(tokenizer, CHAT, "p") == spans and template_process._children == [mine]


def test_the_child_ends_with_the_process_that_renders_even_when_that_is_killed():
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
        except FileNotFoundError:
            return
        time.sleep(0.1)
    raise AssertionError("the child lives on")


def test_the_limits_of_the_page_are_those_of_the_program():
    page = (ROOT / "docs/data.md").read_text()
    assert f"{template_worker.SECONDS} seconds" in page and f"{template_worker.MEMORY // 2**20} MiB" in page


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a' * 10 ** 10 }}"])
def test_a_template_that_cannot_be_compiled_is_refused_alike_each_time(source):
    template_process._end()
    found = []
    for _ in range(3):
        with pytest.raises(template_process.RenderingFailed) as raised:
            template_process.render(source, CHAT, {}, [(2, False)])
        found.append((raised.value.kind, str(raised.value)))
    assert found[0] == found[1] == found[2] and "NoneType" not in found[0][1]
    assert template_process.render(GOOD, CHAT, {}, [(2, False)]) == ["Hi<|eot_id|>Hello<|eot_id|>"]


def test_a_child_that_does_not_answer_is_not_waited_for_for_ever(monkeypatch):
    template_process._end()
    assert template_process.render(GOOD, CHAT, {}, [(2, False)])
    os.kill(template_process._children[0].process.pid, signal.SIGSTOP)
    monkeypatch.setattr(template_process, "WAIT", 0.01)
    with pytest.raises(template_process.RenderingFailed) as raised:
        template_process.render(GOOD, CHAT, {}, [(2, False)])
    assert raised.value.kind == template_process.OUT_OF_TIME and not template_process._children
    monkeypatch.undo()
    assert template_process.render(GOOD, CHAT, {}, [(2, False)])
