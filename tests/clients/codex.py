"""Codex CLI over `/v1/responses`: codex.py BRAIN PATH_TO_CODEX

Codex sends tens of kilobytes of its own instructions and tools, several times the demo model's
context of 4,096 tokens. So its conversations are held with brain's fake device, which has room and
answers with noise: what is tested is that Codex understands brain, not that the model helps.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from brain import Brain
from cases import run

PROGRAM, CODEX = sys.argv[1:3]
PATIENCE = 120


def codex(home, url, *arguments):
    settings = {
        "model": '"demo"',
        "model_provider": '"brain"',
        "model_context_window": "65536",
        "check_for_update_on_startup": "false",
        "analytics.enabled": "false",
        "model_providers.brain.name": '"brain"',
        "model_providers.brain.base_url": f'"{url}/v1"',
        "model_providers.brain.wire_api": '"responses"',
        "model_providers.brain.request_max_retries": "0",
        "model_providers.brain.stream_max_retries": "0",
    }
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    work = pathlib.Path(home) / "work"
    work.mkdir(exist_ok=True)
    done = subprocess.run(
        [CODEX, "exec", *flags, "--skip-git-repo-check", "--sandbox", "read-only", "--json", *arguments],
        cwd=work,
        env={**os.environ, "CODEX_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, events, done.stderr


def of(kind, events):
    return [event for event in events if event["type"] == kind]


def answers(events):
    items = (event["item"] for event in of("item.completed", events))
    return [item["text"] for item in items if item["type"] == "agent_message"]


def two_turns_of_a_session():
    with tempfile.TemporaryDirectory() as home:
        code, events, errors = codex(home, fake.url, "Say something.")
        assert code == 0, (events, errors)
        assert answers(events), events
        usage = of("turn.completed", events)[-1]["usage"]
        assert usage["input_tokens"] > 0 and usage["output_tokens"] > 0, usage
        session = of("thread.started", events)[0]["thread_id"]
        code, events, errors = codex(home, fake.url, "resume", session, "Go on.")
        assert code == 0, (events, errors)
        assert answers(events), events
        again = of("turn.completed", events)[-1]["usage"]
        # The second turn goes on from the first.
        assert again["cached_input_tokens"] > usage["input_tokens"] // 2, (usage, again)


def an_overflow_ends_with_what_brain_said():
    with tempfile.TemporaryDirectory() as home:
        code, events, errors = codex(home, demo.url, "Say something.")
        assert code != 0, events
        said = json.dumps(events) + errors
        assert "context window" in said or "maximum context length" in said, said


FAKE = ["--device", "fake", "--max-model-len", "65536"]
with Brain(PROGRAM, *FAKE) as fake, Brain(PROGRAM) as demo:
    run([two_turns_of_a_session, an_overflow_ends_with_what_brain_said])
