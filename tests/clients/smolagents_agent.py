"""smolagents' ToolCallingAgent against brain: smolagents_agent.py BRAIN

The agent forces a call in every step (`tool_choice: "required"`) and shows the model earlier steps as
text ("Calling tools: …", "Observation: …"), a form that the demo model was not trained on. So it does
its job's first step as an agent; later ones are only asked to be calls of a tool that there is.
"""

import sys

from smolagents import OpenAIModel, Tool, ToolCallingAgent

import demo_task
import task
from brain import Brain
from cases import run

TYPES = {"integer": "integer", "string": "string"}


def tools(ws, called):
    """The demo's tools, acting on a workspace in memory."""

    def make(declared):
        given = declared["function"]
        required = given["parameters"]["required"]
        inputs = {
            name: {
                "type": TYPES[field["type"]],
                "description": field["description"],
                **({} if name in required else {"nullable": True}),
            }
            for name, field in given["parameters"]["properties"].items()
        }

        class Declared(Tool):
            name = given["name"]
            description = given["description"]
            output_type = "string"
            skip_forward_signature_validation = True

            def forward(self, **arguments):
                called.append((self.name, arguments))
                return task.perform(ws, self.name, arguments)

        Declared.inputs = inputs
        return Declared()

    return [make(tool) for tool in demo_task.TOOLS]


def agent(ws, called, steps):
    model = OpenAIModel(
        model_id="demo", api_base=f"{brain.url}/v1", api_key="none", temperature=0, max_tokens=256
    )
    made = ToolCallingAgent(tools=tools(ws, called), model=model, max_steps=steps, verbosity_level=0)
    made.prompt_templates["system_prompt"] = demo_task.SYSTEM
    return made


def the_first_step_is_the_right_call():
    ws, called = demo_task.workspace(), []
    agent(ws, called, 1).run(ws.goal)
    demo_task.check_call(*called[0])
    assert ws.files[ws.report].strip() == ws.heading


def every_step_is_a_call():
    ws, called = demo_task.workspace(seed=2), []
    made = agent(ws, called, 4)
    made.run(ws.goal)
    steps = [step for step in made.memory.steps if getattr(step, "model_output_message", None)]
    names = {tool["function"]["name"] for tool in demo_task.TOOLS} | {"final_answer"}
    assert steps, "no step"
    for step in steps:
        assert step.tool_calls and {call.name for call in step.tool_calls} <= names, step


with Brain(sys.argv[1]) as brain:
    run([the_first_step_is_the_right_call, every_step_is_a_call])
