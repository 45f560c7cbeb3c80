"""OpenAI's Python SDK against brain: openai_python.py BRAIN"""

import sys

import openai

import demo_task
from brain import Brain
from cases import run

HELLO = [{"role": "user", "content": "Say something."}]
RESPONSE = {
    "model": "demo",
    "instructions": demo_task.SYSTEM,
    "input": demo_task.FIRST.goal,
    "tools": [{"type": "function", **tool["function"]} for tool in demo_task.TOOLS],
    "extra_body": {"seed": 3},
}


def models():
    model = client.models.list().data[0]
    assert model.id == "demo" and model.max_model_len > 0
    assert client.models.retrieve("demo").id == "demo"


def chat():
    answer = client.chat.completions.create(model="demo", messages=HELLO, max_tokens=8, seed=1)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def chat_streamed():
    whole = client.chat.completions.create(model="demo", messages=HELLO, max_tokens=20, seed=2)
    stream = client.chat.completions.create(
        model="demo",
        messages=HELLO,
        max_tokens=20,
        seed=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, finish = "", None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == (whole.choices[0].message.content or "")
    assert finish == whole.choices[0].finish_reason
    assert usage.total_tokens == whole.usage.total_tokens


def tool_call():
    answer = client.chat.completions.create(
        model="demo", messages=demo_task.messages(), tools=demo_task.TOOLS, seed=3
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    demo_task.check_call(call.function.name, call.function.arguments)
    messages = demo_task.messages() + [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "wrote report.txt"},
    ]
    follow = client.chat.completions.create(
        model="demo", messages=messages, tools=demo_task.TOOLS, seed=3
    )
    assert follow.choices[0].message.tool_calls[0].function.name == "ls"


def tool_call_through_the_stream_helper():
    with client.chat.completions.stream(
        model="demo", messages=demo_task.messages(), tools=demo_task.TOOLS, seed=3
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    call = final.choices[0].message.tool_calls[0]
    demo_task.check_call(call.function.name, call.function.arguments)


def choices_and_logprobs():
    answer = client.chat.completions.create(
        model="demo", messages=HELLO, n=2, max_tokens=4, logprobs=True, top_logprobs=2, seed=4
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    token = answer.choices[0].logprobs.content[0]
    assert token.logprob <= 0 and len(token.top_logprobs) == 2


def completions():
    answer = client.completions.create(model="demo", prompt=["Once", "Twice"], max_tokens=4, echo=True)
    assert [choice.text.startswith(word) for choice, word in zip(answer.choices, ("Once", "Twice"))]
    request = {"model": "demo", "prompt": "Once", "max_tokens": 8, "seed": 5}
    whole = client.completions.create(**request).choices[0].text
    text = "".join(
        chunk.choices[0].text for chunk in client.completions.create(**request, stream=True)
    )
    assert text == whole


def responses():
    answer = client.responses.create(**RESPONSE)
    call = next(item for item in answer.output if item.type == "function_call")
    demo_task.check_call(call.name, call.arguments)
    assert answer.status == "completed" and answer.usage.output_tokens > 0


def responses_streamed():
    kinds, numbers = [], []
    stream = client.responses.create(model="demo", input="Hi", max_output_tokens=8, stream=True)
    for event in stream:
        kinds.append(event.type)
        numbers.append(event.sequence_number)
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert numbers == list(range(len(numbers)))


def responses_through_the_stream_helper():
    # The helper wants an answer that ends by itself: the task's first step does.
    with client.responses.stream(**RESPONSE) as helper:
        for _ in helper:
            pass
        final = helper.get_final_response()
    call = next(item for item in final.output if item.type == "function_call")
    demo_task.check_call(call.name, call.arguments)


def refused(kind, code, **request):
    try:
        client.chat.completions.create(**{"model": "demo", "messages": HELLO, **request})
    except kind as error:
        assert error.code == code, error
        return error
    raise AssertionError(f"not refused: {request}")


def errors():
    refused(openai.NotFoundError, "model_not_found", model="gpt-9")
    refused(openai.BadRequestError, "invalid_value", temperature=9)
    error = refused(
        openai.BadRequestError,
        "unsupported_parameter",
        modalities=["text", "audio"],
    )
    assert error.param == "modalities"
    long = [{"role": "user", "content": "word " * 20000}]
    error = refused(openai.BadRequestError, "context_length_exceeded", messages=long)
    assert "maximum context length" in str(error)


with Brain(sys.argv[1]) as brain:
    client = openai.OpenAI(base_url=f"{brain.url}/v1", api_key="none", max_retries=0)
    run(
        [
            models,
            chat,
            chat_streamed,
            tool_call,
            tool_call_through_the_stream_helper,
            choices_and_logprobs,
            completions,
            responses,
            responses_streamed,
            responses_through_the_stream_helper,
            errors,
        ]
    )
