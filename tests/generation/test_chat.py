"""Chat templates, which come from strangers, and conversations with a tiny published model."""

import io
import json
import os
import re
import resource
import signal
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from scratchformer.commands import cli
from scratchformer.data import DataError
from scratchformer.generation import Chat, ChatTemplate, generate
from scratchformer.models import Llama
from scratchformer.rng import Key
from scratchformer.training.readers import load_published

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

NAMES = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|end|>"]
CHATML = """{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content + '<|im_end|>' + '\\n' -}}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
BRACKETS = """{{ bos_token }}{%- set ns = namespace(expected='user') -%}
{% for m in messages if m['role'] != 'system' %}
{% if m.role != ns.expected %}{{ raise_exception('expected a message of the ' + ns.expected) }}{% endif %}
{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]
{%- else %} {{ m['content'] | trim }}{{ eos_token }}{% endif %}
{% set ns.expected = 'assistant' if m.role == 'user' else 'user' %}
{% endfor %}
"""
HEADERS = """{%- if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{{- strftime_now('%Y') }}{{ pad_token }}{{ documents }}
{%- macro header(role) %}<|im_start|>{{ role | upper }}:{% endmacro %}
{%- for message in messages %}
{%- if loop.last and message['content'] == 'skip' %}{% continue %}{% endif %}
{{- header(message.role) }}{% generation %}{{ message | tojson }}{% endgeneration %}{{ '<é>' | tojson }}
{%- if loop.index > 4 %}{% break %}{% endif %}
{%- endfor %}{{ dict(a=1).items() | list }}{{ messages[-1:] | map(attribute='role') | join }}
"""
TEMPLATES = {"chatml": CHATML, "brackets": BRACKETS, "headers": HEADERS}


def said(*contents, system=None):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *messages] if system else messages


CONVERSATIONS = [
    said("hi"),
    said(" a\n", '<é> "b" ', "<|im_end|> c", system="Be short."),
    said("1", "2", "3", "4", "skip"),
]


@pytest.fixture
def folder(tmp_path):
    """The folder of a tiny Llama with CHATML."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({b: i for i, b in enumerate(sorted(
        tokenizers.pre_tokenizers.ByteLevel.alphabet()))}, []))  # fmt: skip
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(NAMES)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 256)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = Llama(260, 16, 4, 1, 8, kv_heads=2, d_ff=8, std=0.6, key=Key(1))
    tensors, sources = {}, model.tensors()
    for name, p in model.named_parameters().items():
        tensor = sources[name]
        prefix = "" if tensor.name.startswith("lm_head") else "model."
        tensors[prefix + tensor.name] = np.ascontiguousarray(p.data.T if tensor.transposed else p.data)
    save_file(tensors, tmp_path / "model.safetensors")
    sizes = dict(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, intermediate_size=8)
    config = dict(model_type="llama", vocab_size=260, max_position_embeddings=2048, eos_token_id=259, **sizes)
    write(tmp_path, "config.json", config)
    write(tmp_path, "tokenizer_config.json", dict(chat_template=CHATML, eos_token={"content": "<|im_end|>"}))
    return tmp_path


def write(folder, name, settings):
    (folder / name).write_text(json.dumps(settings))


def of(folder, template, **settings):
    write(folder, "tokenizer_config.json", dict(chat_template=template, **settings))
    return ChatTemplate(folder)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_writes_what_transformers_writes(folder, name):
    transformers = pytest.importorskip("transformers")
    template = of(folder, TEMPLATES[name], bos_token="<|bos|>", eos_token={"content": "<|end|>"}, pad_token=None)
    settings = dict(bos_token="<|bos|>", eos_token="<|end|>", chat_template=TEMPLATES[name])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **settings)
    _, vocabulary = load_published(folder)
    for messages in CONVERSATIONS:
        text = template.apply(messages)
        assert text == theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert vocabulary.encode(text, begin=False).tolist() == ids
    messages = said("a", "b")[::-1]
    if name == "brackets":
        with pytest.raises(
            DataError, match=r"tokenizer_config.json: the chat template: expected a message of the user"
        ):
            template.apply(messages)


def test_where_the_template_is(folder):
    """A file of its own comes before the settings; of several in the settings, the default."""
    several = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes {{ bos_token }}"}]
    assert of(folder, several, bos_token="<b>").apply(said("a")) == "yes <b>"
    (folder / "chat_template.jinja").write_text("file {{ bos_token }}\n")
    assert ChatTemplate(folder).apply(said("a")) == "file <b>"
    (folder / "chat_template.jinja").unlink()
    for settings in {}, {"chat_template": None}, {"chat_template": several[:1]}, {"chat_template": 3}:
        write(folder, "tokenizer_config.json", settings)
        with pytest.raises(DataError, match=r"no chat template in chat_template.jinja or tokenizer_config.json"):
            ChatTemplate(folder)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch made') }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ strftime_now.__closure__.x }}",
        "{{ dict.__globals__.x }}",
        "{{ (messages | attr('__class__')).x }}",
        "{{ '{0.__class__.x}'.format(messages) }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ open('/etc/passwd') }}",
        "{% for i in range(9999999) %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages",
        "{% if %}",
        "{{ raise_exception('\x1b[2J') }}",
    ],
)
def test_a_template_can_only_read_the_messages_and_write_text(folder, text, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(os.listdir(folder))
    messages = said("a")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: the chat template: ") as caught:
        of(folder, text).apply(messages)
    assert messages == said("a") and sorted(os.listdir(folder)) == before and "\x1b" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory as Linux has them")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "still running after 1 sec"),
        ("{{ '%1000000000d' % 1 }}", "takes more than 134,217,728 bytes of memory"),
        ("{{ '%1000000000d' % messages | length }}", "takes more than 134,217,728 bytes of memory"),
        ("{{ 'a' | center(1000000000) }}", "takes more than 134,217,728 bytes of memory"),
        ("{{ 'a\n' * 9999 | indent(100000) }}", ""),
        ("{{ ('a\n' * 9999) | indent(100000) }}", "takes more than 134,217,728 bytes of memory"),
        ("{{ messages * 99999999 }}", "takes more than 134,217,728 bytes of memory"),
        ("{{ 'x' * 16777216 }}", "sent a message of more than 16,777,216 bytes"),
        ("{{ raise_exception('x' * 16777216) }}", "'xxxx"),
        ("{{ " + "(" * 99999 + ")" * 99999 + " }}", ""),
        ("{{ 1" + " + 1" * 99999 + " }}", ""),
    ],
)
def test_a_template_takes_a_limited_time_and_memory(folder, text, says, monkeypatch):
    if "still running" in says:
        monkeypatch.setattr("scratchformer.generation.chat.SECONDS", 1.0)
    monkeypatch.setattr("scratchformer.generation.chat.MEMORY", 1 << 27)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=rf"tokenizer_config\.json: the chat template: .*{says}"):
        of(folder, text).apply(said("a"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 16  # KiB


def chat_with(folder, context=400, **options):
    model, vocabulary = load_published(folder, context)
    assert model.context == context
    return Chat(model.to(dtype=np.float64), vocabulary, ChatTemplate(folder), **options)


def test_each_answer_continues_the_whole_conversation_and_only_what_is_new_is_read(folder, monkeypatch):
    chat, read = chat_with(folder, system="You are a café."), []
    extend = chat.model.extend
    monkeypatch.setattr(
        chat.model, "extend", lambda ids, *rest, **last: read.append(ids.shape[1]) or extend(ids, *rest, **last)
    )
    for turn, text in enumerate(("hello", "what is <|im_end|>?", "é€𝄞", "bye")):
        ids = chat.vocabulary.encode(
            chat.template.apply([*chat.messages, {"role": "user", "content": text}]), begin=False
        )
        read.clear()
        answer = "".join(chat.answer(text, 12, temperature=0))
        new, steps = read[0], len(read)
        expected = [int(i) for (i,) in generate(chat.model, ids[None], 12, temperature=0)]
        ends = [i for i, token in enumerate(expected) if token in (258, 259)]
        expected = expected[: ends[0]] if ends else expected
        assert answer == chat.vocabulary.decode(expected) == chat.messages[-1]["content"]
        assert new == len(ids) if not turn else new < len(ids) // 2
        assert steps <= 12
    assert [m["role"] for m in chat.messages] == ["system"] + ["user", "assistant"] * 4


def test_an_answer_ends_with_any_end_token(folder, monkeypatch):
    """Those of generation_config.json, or else config.json, and the tokenizer's; other special tokens are not shown."""
    script = []
    monkeypatch.setattr("scratchformer.generation.chat.generate", lambda *a, **k: (np.array([i]) for i in script))
    letters = chat_with(folder).vocabulary.encode("ab", begin=False).tolist()
    for ends, config in ({258, 259}, None), ({256, 258}, [256]):
        if config:
            write(folder, "generation_config.json", {"eos_token_id": config})
        chat = chat_with(folder)
        for end in sorted({256, 257, 258, 259}):
            script[:] = [letters[0], end, letters[1]]
            assert "".join(chat.answer("x", 9)) == ("a" if end in ends else "ab")


def test_the_oldest_messages_are_forgotten_when_the_context_is_full(folder):
    chat = chat_with(folder, 300, system="S")
    for i in range(12):
        "".join(chat.answer(f"message {i}", 30, temperature=0))
        assert chat.messages[0]["content"] == "S" and chat.messages[-2]["content"] == f"message {i}"
    assert 3 <= len(chat.messages) < 12
    before = list(chat.messages)
    with pytest.raises(ValueError, match=r"^text: expected less than the context of 300 tokens, got"):
        next(chat.answer("x" * 300, 30))
    assert chat.messages == before
    assert "".join(chat.answer("still here", 30, temperature=0)) == chat.messages[-1]["content"]


def test_an_answer_that_is_ended_early_is_what_was_shown(folder):
    chat = chat_with(folder)
    answer = chat.answer("hello", 50, temperature=0)
    shown = next(answer) + next(answer)
    answer.close()
    assert chat.messages[-1]["content"].startswith(shown) and len(chat.messages) == 2
    assert "".join(chat.answer("again", 5, temperature=0)) == chat.messages[-1]["content"]


def run_chat(folder, lines, monkeypatch, capsys, *options):
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    cli.run_command(["chat", str(folder), "--tokens", "20", "--device", "cpu", *options])
    return capsys.readouterr()


def test_the_command_answers_each_line(folder, monkeypatch, capsys):
    """With control characters, which the model writes, replaced."""
    options = ("--system", "S", "--temperature", "5", "--seed", "3")
    told = run_chat(folder, "hello\n\n\nand \x1b[2J now\n", monkeypatch, capsys, *options).out
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", told) and len(told) > 10
    assert told == run_chat(folder, "hello\nand \x1b[2J now\n", monkeypatch, capsys, *options).out
    assert told != run_chat(folder, "hello\nand \x1b[2J now\n", monkeypatch, capsys, *options[:-1], "4").out
    with pytest.raises(ValueError, match="text: expected less than the context of 20 tokens"):
        run_chat(folder, "hello\n", monkeypatch, capsys, "--context", "20")


def test_ctrl_c_ends_the_answer_and_not_the_conversation(folder, monkeypatch, capsys, default_signals):
    letters, turns = chat_with(folder).vocabulary.encode("abcd", begin=False), []

    def interrupted(*args, **options):
        turns.append(0)
        for i, letter in enumerate(letters):
            if i == 2 and len(turns) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield np.array([letter])

    monkeypatch.setattr("scratchformer.generation.chat.generate", interrupted)
    assert run_chat(folder, "hello\nagain\n", monkeypatch, capsys).out == "abc\nabcd\n"


def test_what_is_no_published_model_is_refused(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="expected a published model"):
        cli.run_command(["chat", str(folder)])
    with pytest.raises(ValueError, match="no such folder"):
        cli.run_command(["chat", str(folder / "other")])
