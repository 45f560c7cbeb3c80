#!/usr/bin/env python3
"""Writes templates.json: what transformers renders, for brain to render alike.

    pip install transformers==5.17.0 jinja2==3.1.6
    python tests/goldens/templates.py

`conversations`: random conversations through the demonstration's own chat template. `snippets`: small
templates that use what chat templates use of Python and Jinja. `different`: what brain is known to
render otherwise, or to refuse.
"""

import json
import pathlib
import random

from transformers.utils.chat_template_utils import render_jinja_template

HERE = pathlib.Path(__file__).resolve().parent
TEMPLATE = (HERE / "../../brain/assets/demo/chat_template.jinja").read_text()
CONVERSATIONS = 110

TEXTS = [
    "Hi", "  Hi ", "", "\n\n", "two\nlines\n", "Café déjà vu — 123 😊", "a<b && c>d", "{x: 1}",
    "it's \"quoted\"", "tab\there", "back\\slash", "call:f{a:1}", "thought\nnot one", "ünï",
    "\u00a0non-breaking\u00a0", "end with space ",
]
NAMES = ["read", "write_file", "ns:create", "get-weather", "a.b", "x/y"]
NUMBERS = [0, -1, 7, 2**53, 0.1, 1.0, -2.5, 1e20, 1e16, 1e15, 1e-7, 0.0001, 123456.789]


def value(rng, depth=0):
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind < 2:
        return rng.choice(TEXTS)
    if kind == 2:
        return rng.choice(NUMBERS)
    if kind == 3:
        return rng.choice([True, False])
    if kind == 4:
        return None
    if kind == 5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return arguments(rng, depth + 1)


def arguments(rng, depth=0):
    keys = rng.sample(["path", "Path2", "a", "B", "content", "n", "é", "z_last"], rng.randrange(5))
    return {key: value(rng, depth) for key in keys}


def schema(rng, depth=0):
    kind = rng.choice(["string", "integer", "number", "boolean"] + ["array", "object"] * (depth < 2))
    out = {"type": kind}
    if rng.random() < 0.6:
        out["description"] = rng.choice(["What it is", "Ein Fähnchen", "one\ntwo"])
    if kind == "string" and rng.random() < 0.4:
        out["enum"] = rng.sample(["C", "F", "b", "A"], 2)
    if rng.random() < 0.2:
        out["nullable"] = True
    if kind == "array":
        out["items"] = {"type": rng.choice(["string", "integer"])}
        if rng.random() < 0.3:
            out["items"]["description"] = "an item"
    if kind == "object":
        out["properties"] = properties(rng, depth + 1)
        if out["properties"] and rng.random() < 0.5:
            out["required"] = sorted(out["properties"])[:1]
    return out


def properties(rng, depth):
    names = rng.sample(["city", "Days", "opts", "tags", "unit", "_x"], rng.randrange(4))
    return {name: schema(rng, depth) for name in names}


def tool(rng, name):
    function = {"name": name, "description": rng.choice(["Does it", "", "Reads <a> file"])}
    if rng.random() < 0.8:
        parameters = {"type": "object", "properties": properties(rng, 0)}
        if parameters["properties"] and rng.random() < 0.7:
            parameters["required"] = sorted(parameters["properties"])
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def exchange(rng, last):
    """An assistant message and what answers it."""
    message = {"role": "assistant", "content": rng.choice(TEXTS)}
    if rng.random() < 0.4:
        message["reasoning"] = rng.choice(["greet", "think\nhard"])
    if rng.random() < 0.5:
        return [message]
    if rng.random() < 0.6:
        message["content"] = ""
    calls = []
    for index in range(rng.randrange(1, 4)):
        call = {"name": rng.choice(NAMES), "arguments": arguments(rng)}
        calls.append({"id": f"c{index}", "type": "function", "function": call})
    message["tool_calls"] = calls
    if last and rng.random() < 0.3:
        return [message]
    results = []
    for call in calls:
        result = {"role": "tool", "content": rng.choice(TEXTS)}
        if rng.random() < 0.7:
            result["tool_call_id"] = call["id"]
        if rng.random() < 0.4:
            result["name"] = call["function"]["name"]
        results.append(result)
    if rng.random() < 0.3:
        rng.shuffle(results)
    return [message] + results


def conversation(rng):
    messages = []
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(["system", "developer"]), "content": rng.choice(TEXTS)})
    turns = rng.randrange(1, 5)
    for turn in range(turns):
        if rng.random() < 0.9 or not messages:
            messages.append({"role": "user", "content": rng.choice(TEXTS)})
        if turn + 1 < turns or rng.random() < 0.5:
            messages += exchange(rng, turn + 1 == turns)
        if rng.random() < 0.1:
            messages.append({"role": "system", "content": "later"})
    tools = [tool(rng, name) for name in rng.sample(NAMES, rng.randrange(3))]
    case = {
        "messages": messages,
        "tools": tools,
        "thinking": rng.random() < 0.5,
        "generation_prompt": rng.random() < 0.7,
    }
    text = render(TEMPLATE, case)
    return {**case, "text": text}


def render(template, case):
    rendered, _ = render_jinja_template(
        conversations=[case["messages"]],
        tools=case["tools"] or None,
        chat_template=template,
        add_generation_prompt=case["generation_prompt"],
        enable_thinking=case["thinking"],
        preserve_thinking=False,
        bos_token="<bos>",
        eos_token="<eos>",
    )
    return rendered[0]


# What every snippet sees as messages[0].
SEEN = {
    "role": "user",
    "content": "  Hello, World  ",
    "words": ["b", "A", "c", "a"],
    "numbers": [3, 1, 2.5],
    "map": {"b": 1, "A": [True, None, "it's"], "c": {"d": 1e20}},
    "flag": True,
    "off": False,
    "nothing": None,
    "float": 1e20,
    "half": 0.5,
    "int": 42,
    "text": "a,b,,c\nd",
    "html": "<a href=\"x\">é & ü</a>",
    "items": "shadows a method",
    "list": [{"n": "x", "v": 2, "ok": True}, {"n": "y", "v": 1}, {"n": "x", "v": 3, "ok": False}],
}

SNIPPETS = r"""
{{ m.content }}|{{ m.content | trim }}|{{ m.content.strip() }}|{{ m.content.lstrip() }}|{{ m.content.rstrip() }}
{{ m.text.split(',') }}
{{ m.text.split(',', 1) }}
{{ m.text.rsplit(',', 1) }}
{{ m.text.split() }}
{{ m.text.splitlines() }}
{{ 'xxabxx'.strip('x') }} {{ 'xxabxx'.lstrip('x') }} {{ 'xxabxx'.rstrip('x') }}
{{ 'abcabc'.replace('b', 'X') }} {{ 'abcabc'.replace('b', 'X', 1) }} {{ 'abc' | replace('b', 'Y') }}
{{ 'abc'.startswith('a') }} {{ 'abc'.endswith('bc') }} {{ 'abc'.startswith(('x', 'a')) }}
{{ 'abc'.find('c') }} {{ 'abc'.find('z') }} {{ 'abcb'.rfind('b') }} {{ 'abab'.count('a') }}
{{ 'hello world'.title() }} {{ 'hello'.upper() }} {{ 'HELLO'.lower() }} {{ 'hello WORLD'.capitalize() }}
{{ '12'.isdigit() }} {{ 'ab'.isalpha() }} {{ 'a1'.isalnum() }} {{ 'ab'.isupper() }} {{ 'ab'.islower() }} {{ ' '.isspace() }}
{{ ','.join(m.words) }} {{ m.words | join('-') }}
{{ m.map.get('b') }} {{ m.map.get('q') }} {{ m.map.get('q', 'd') }}
{% for k, v in m.map.items() %}{{ k }}={{ v }};{% endfor %}
{% for k in m.map.keys() %}{{ k }};{% endfor %}{% for v in m.map.values() %}{{ v }};{% endfor %}
{% for k, v in m.map | dictsort %}{{ k }}={{ v }};{% endfor %}
{% for k, v in m.map | items %}{{ k }};{% endfor %}
{{ m['items'] }} {{ m.map | length }} {{ m.words | count }}
{{ m.flag }} {{ m.off }} {{ m.nothing }} {{ m.float }} {{ m.half }} {{ m.int }} {{ m.map }} {{ m.numbers }}
{{ m.missing }}|{{ m.missing is defined }}|{{ m.missing or 'none' }}
{{ 'x' ~ m.flag }} {{ 'x' ~ m.nothing }} {{ 'x' ~ m.half }} {{ 'x' ~ m.int }} {{ 'x' ~ m.text }}
{{ m.flag | string }} {{ m.float | string }} {{ m.nothing | string }} {{ m.words | string }}
{{ [1, 2.0, true, none, 'a'] | join(',') }}
{{ m.map | tojson }}
{{ m.html | tojson }} {{ m.html }} {{ m.html | e }}
{{ m.map | tojson(indent=2) }}
{{ m.words | tojson(indent=4) }} {{ [] | tojson(indent=2) }} {{ {} | tojson(indent=2) }}
{{ m.map | tojson(separators=(',', ':')) }}
{{ m.map | tojson(sort_keys=true) }}
{{ m.html | tojson(ensure_ascii=true) }} {{ '😊' | tojson(ensure_ascii=true) }}
{{ m.float | tojson }} {{ m.half | tojson }} {{ 1.0 | tojson }} {{ m.nothing | tojson }} {{ m.flag | tojson }}
{{ 4 / 2 }} {{ 5 / 2 }} {{ 5 // 2 }} {{ -5 // 2 }} {{ 5 % 3 }} {{ 2 ** 3 }} {{ 1 + 2.0 }}
{{ 'ab' * 3 }} {{ [1] + [2] }} {{ 'a' + 'b' }} {{ [0] * 3 }}
{{ m.words[0] }} {{ m.words[-1] }} {{ m.words[1:] }} {{ m.words[:-1] }} {{ m.words[::-1] }} {{ m.text[1:4] }} {{ m.text[::-1] }}
{{ 'a' in m.words }} {{ 'z' not in m.words }} {{ 'b' in m.map }} {{ 'b,' in m.text }}
{{ m.map is mapping }} {{ m.words is sequence }} {{ m.text is string }} {{ m.int is number }} {{ m.flag is boolean }} {{ m.nothing is none }} {{ m.words is iterable }} {{ m.int is integer }} {{ m.half is float }} {{ m.flag is true }} {{ m.off is false }} {{ m.map is sequence }} {{ m.text is sequence }} {{ m.text is iterable }} {{ m.flag is number }}
{{ m.words | sort | list }} {{ m.words | sort(case_sensitive=true) | list }} {{ m.words | reverse | list }} {{ m.words | unique | list }}
{{ m.words | first }} {{ m.words | last }} {{ m.numbers | max }} {{ m.numbers | min }} {{ m.numbers | sum }}
{{ m.list | map(attribute='n') | list }} {{ m.list | selectattr('ok') | map(attribute='v') | list }} {{ m.list | selectattr('n', 'equalto', 'x') | list | length }} {{ m.list | rejectattr('ok', 'defined') | list | length }}
{{ m.words | map('upper') | list }} {{ m.words | select('equalto', 'a') | list }} {{ m.words | reject('in', ['a']) | list }}
{{ m.list | sort(attribute='v') | map(attribute='v') | list }} {% for g in m.list | groupby('n') %}{{ g.grouper }}:{{ g.list | length }};{% endfor %}
{{ m.missing | default('d') }} {{ '' | default('d') }} {{ '' | default('d', true) }}
{{ 'hello' | upper }} {{ 'HELLO' | lower }} {{ 'hello wORLD' | title }} {{ 'hELLO' | capitalize }} {{ '3' | int + 1 }} {{ '2.5' | float }} {{ 2.567 | round(1) }} {{ -3 | abs }} {{ 3.7 | int }}
{{ 'a\nb' | indent(2) }} {{ 'a\nb' | indent(2, true) }}
{% set ns = namespace(n=0, s='') %}{% for w in m.words %}{% set ns.n = ns.n + loop.index %}{% set ns.s = ns.s + w %}{% endfor %}{{ ns.n }} {{ ns.s }}
{% for w in m.words %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.previtem }}{{ loop.nextitem }};{% endfor %}
{% for w in m.words if w != 'c' %}{{ loop.index }}{{ w }}{% else %}none{% endfor %}{% for w in [] %}x{% else %}empty{% endfor %}
{% for w in m.words %}{% if w == 'c' %}{% break %}{% endif %}{% if w == 'A' %}{% continue %}{% endif %}{{ w }}{% endfor %}
{% for w in m.words %}{{ loop.cycle('o', 'e') }}{% endfor %}
{% macro greet(name, greeting='Hi') %}{{ greeting }} {{ name }}{% endmacro %}{{ greet('you') }} {{ greet('you', greeting='Yo') }}
{% macro outer() %}[{{ caller() }}]{% endmacro %}{% call outer() %}inside{% endcall %}
{% set block %}  text {{ m.int }} {% endset %}{{ block | trim }}
{% filter upper %}shout {{ m.text[0] }}{% endfilter %}
{% raw %}{{ not rendered }}{% endraw %}
{{ 'yes' if m.flag else 'no' }} {{ 'yes' if m.off }}|
{% if m.content is string and not m.off %}a{% elif m.flag %}b{% else %}c{% endif %}
{% generation %}{{ m.int }}{% endgeneration %}
{%- generation -%} {{ m.int }} {%- endgeneration -%}
{{ range(3) | list }} {{ range(1, 7, 2) | list }} {{ dict(a=1, b=2) }} {{ {'a': 1, 'b': [1, 2]} }}
{{ m.map.A[2] }} {{ m['map']['c']['d'] }} {{ messages | length }} {{ messages[0]['role'] }}
{{ '{} and {}'.format('a', 1) }} {{ "%.2f" | format(3.14159) }}
{{ 1 == 1.0 }} {{ 'a' < 'b' }} {{ not m.flag }} {{ 1 < 2 < 3 }} {{ m.flag and 'x' }} {{ m.off or 'y' }}
{{ m.words | batch(2) | list }} {{ m.words | slice(2) | list }}
{{ '\\' }} {{ "\t|\n|" }} {{ 'é' }} {{ '\u00e9' }}
{{ "a'b" | list }} {{ 'ab' | list }} {{ m.map | list }}
{{ m.text.partition(',')[2] }} {{ 'aXbXc'.rpartition('X')[0] }} {{ 'q'.partition('X')[1] }}| {{ 'prefix-x'.removeprefix('prefix-') }} {{ 'x-suffix'.removesuffix('-suffix') }}
{{ m.nothing.x is defined }}
{{ m.int.foo }}
{{ m | length }} {{ m.keys() | list }}
{# a comment #}{{ -42 }} {{ -(m.int) }} {{ m.half * 2 }} {{ 10 ** 20 }} {{ 0.1 + 0.2 }} {{ 100000.0 }}
""".strip("\n").split("\n")


# What minijinja does another way: listed so that nobody takes it for tested.
DIFFERENT = r"""
{{ 'x' ~ m.float }}
{{ 'x' ~ m.words }}
{{ 2 ** -1 }}
{{ -m.int }}
{{ 2.5 | round }}
{{ (1, 2) }}
{{ '%s is %d' % ('x', 3) }}
{{ +m.int }}
""".strip("\n").split("\n")


def snippets(sources):
    for source in sources:
        template = "{% set m = messages[0] %}" + source
        case = {"messages": [SEEN], "tools": None, "thinking": False, "generation_prompt": False}
        try:
            yield {"template": template, "text": render(template, case)}
        except Exception as error:  # noqa: BLE001 - any refusal is the expectation
            yield {"template": template, "refused": type(error).__name__}


def main():
    rng = random.Random(20261130)
    out = {
        "seen": SEEN,
        "snippets": list(snippets(SNIPPETS)),
        "different": list(snippets(DIFFERENT)),
        "conversations": [conversation(rng) for _ in range(CONVERSATIONS)],
    }
    lines = ["{", ' "seen": ' + json.dumps(out["seen"], ensure_ascii=False) + ","]
    for part, end in (("snippets", ","), ("different", ","), ("conversations", "")):
        items = [json.dumps(item, ensure_ascii=False) for item in out[part]]
        lines += [f' "{part}": [', ",\n".join(items), "]" + end]
    (HERE / "templates.json").write_text("\n".join([*lines, "}", ""]))
    refused = sum("refused" in snippet for snippet in out["snippets"])
    print(f"{len(out['snippets'])} snippets ({refused} refused), {CONVERSATIONS} conversations")


if __name__ == "__main__":
    main()
