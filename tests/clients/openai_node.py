"""Runs openai_node.mjs against a brain of its own: openai_node.py BRAIN FOLDER_WITH_NODE_MODULES"""

import json
import pathlib
import subprocess
import sys

import demo_task
from brain import Brain

PROGRAM, INSTALLED = sys.argv[1:3]
CASES = pathlib.Path(__file__).with_name("openai_node.mjs")

with Brain(PROGRAM) as brain:
    task = {"model": "demo", "seed": 3, "tools": demo_task.TOOLS, "messages": demo_task.messages()}
    first = {"report": demo_task.FIRST.report, "heading": demo_task.FIRST.heading}
    arguments = [brain.url, INSTALLED, json.dumps(task), json.dumps(first)]
    done = subprocess.run(["node", CASES, *arguments], timeout=300)
sys.exit(done.returncode)
