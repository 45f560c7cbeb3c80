"""Anthropic's Python SDK against brain: anthropic_python.py BRAIN"""

import sys

import anthropic

import demo_task
from brain import Brain
from cases import run

HELLO = [{"role": "user", "content": "Say something."}]
TOOLS = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in demo_task.TOOLS
]
TASK = {
    "model": "demo",
    "max_tokens": 200,
    "system": demo_task.SYSTEM,
    "messages": [{"role": "user", "content": demo_task.FIRST.goal}],
    "tools": TOOLS,
    "extra_body": {"seed": 3},
}


def message():
    answer = client.messages.create(model="demo", max_tokens=8, messages=HELLO)
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens <= 8


def tool_use():
    answer = client.messages.create(**TASK)
    call = next(block for block in answer.content if block.type == "tool_use")
    assert answer.stop_reason == "tool_use"
    demo_task.check_call(call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "wrote report.txt"}
    follow = client.messages.create(
        **{
            **TASK,
            "messages": TASK["messages"]
            + [
                {"role": "assistant", "content": [b.model_dump() for b in answer.content]},
                {"role": "user", "content": [result]},
            ],
        }
    )
    assert any(block.type == "tool_use" and block.name == "ls" for block in follow.content)


def tool_use_streamed():
    with client.messages.stream(**TASK) as stream:
        for _ in stream:
            pass
        final = stream.get_final_message()
    call = next(block for block in final.content if block.type == "tool_use")
    demo_task.check_call(call.name, call.input)
    assert final.stop_reason == "tool_use"


def tokens_counted():
    count = client.messages.count_tokens(model="demo", messages=HELLO)
    answer = client.messages.create(model="demo", max_tokens=1, messages=HELLO)
    usage = answer.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def errors():
    try:
        client.messages.create(model="claude", max_tokens=8, messages=HELLO)
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error"
    else:
        raise AssertionError("not refused")
    try:
        client.messages.create(model="demo", max_tokens=8, messages=[{"role": "king", "content": "x"}])
    except anthropic.BadRequestError as error:
        assert "messages[0].role" in str(error)
    else:
        raise AssertionError("not refused")


with Brain(sys.argv[1]) as brain:
    client = anthropic.Anthropic(base_url=brain.url, api_key="none", max_retries=0)
    run([message, tool_use, tool_use_streamed, tokens_counted, errors])
