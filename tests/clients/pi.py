"""Pi, the coding agent, against brain: pi.py BRAIN PATH_TO_PI [--record FILE]

Pi's own prompt and tools do not fit into the demo model's context of 4,096 tokens, and the model does
not know them. Pi's extensions replace both (pi_tools.mjs); everything else of Pi is as installed.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading

import demo_task
from brain import Brain
from cases import run

PROGRAM, PI = sys.argv[1:3]
RECORD = sys.argv[4] if sys.argv[3:4] == ["--record"] else None
EXTENSION = pathlib.Path(__file__).with_name("pi_tools.mjs")
# A run that hangs is ended; nothing is measured.
PATIENCE = 120


class Pi:
    """A folder for Pi and its work, and Pi's events."""

    def __init__(self, folder, url):
        self.agent = pathlib.Path(folder) / "agent"
        self.work = pathlib.Path(folder) / "work"
        self.agent.mkdir()
        self.work.mkdir()
        # Of this window Pi keeps thousands of tokens back, more than the demo model has in all.
        model = {"id": "demo", "contextWindow": 32768, "maxTokens": 256, "reasoning": False}
        provider = {
            "baseUrl": f"{url}/v1",
            "api": "openai-completions",
            "apiKey": "none",
            "models": [model],
        }
        (self.agent / "models.json").write_text(json.dumps({"providers": {"brain": provider}}))
        (self.agent / "settings.json").write_text(json.dumps({"compaction": {"enabled": False}}))

    def start(self, *arguments):
        command = [PI, "--model", "brain/demo", "--no-session", "--no-context-files", "--no-skills"]
        command += ["--no-builtin-tools", "--extension", str(EXTENSION)]
        process = subprocess.Popen(
            command + list(arguments),
            cwd=self.work,
            env={
                **os.environ,
                "PI_OFFLINE": "1",
                "PI_TELEMETRY": "0",
                "PI_SKIP_VERSION_CHECK": "1",
                "PI_CODING_AGENT_DIR": str(self.agent),
                "DEMO_SYSTEM_PROMPT": demo_task.SYSTEM,
                # Its programs are beside it; one of them may be a newer Node.
                "PATH": f"{pathlib.Path(PI).parent}:{os.environ['PATH']}",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(self.agent / "stderr", "ab"),
            text=True,
        )
        if "rpc" not in arguments:
            # It would wait for more of its prompt there.
            process.stdin.close()
        self.watch = threading.Timer(PATIENCE, process.kill)
        self.watch.daemon = True
        self.watch.start()
        return process

    def errors(self):
        return (self.agent / "stderr").read_text()


@contextlib.contextmanager
def fresh(url):
    with tempfile.TemporaryDirectory() as folder:
        yield Pi(folder, url)


def whole(pi, *arguments):
    """Runs Pi to its end."""
    process = pi.start(*arguments)
    output = process.stdout.read()
    return process.wait(), output


def events(output):
    for line in output:
        if line.startswith("{"):
            yield json.loads(line)


def answers(seen):
    ends = (event for event in seen if event["type"] == "message_end")
    return [end["message"] for end in ends if end["message"]["role"] == "assistant"]


def called(seen):
    return [event["toolName"] for event in seen if event["type"] == "tool_execution_start"]


def check_work(pi, ws, seen):
    wrong = demo_task.wrong_files(ws, pi.work)
    assert not wrong, (wrong, called(seen), pi.errors())
    assert called(seen)[0] == "write" and called(seen)[-1] == "finish", called(seen)


def print_mode():
    ws = demo_task.workspace(seed=1, records=2)
    with fresh(brain.url) as pi:
        demo_task.write_out(ws, pi.work)
        code, _ = whole(pi, "-p", ws.goal)
        assert code == 0, pi.errors()
        assert not demo_task.wrong_files(ws, pi.work), pi.errors()


def an_overflow_is_recognised():
    with fresh(brain.url) as pi:
        _, output = whole(pi, "--mode", "json", "word " * 5000)
        last = answers(events(output.splitlines()))[-1]
        assert last["stopReason"] == "error", last
        assert "maximum context length is 4096 tokens" in last["errorMessage"], last


def a_task_of_many_tools_in_json_mode():
    ws = demo_task.workspace(seed=2)
    with fresh(brain.url) as pi:
        demo_task.write_out(ws, pi.work)
        code, output = whole(pi, "--mode", "json", ws.goal)
        seen = list(events(output.splitlines()))
        assert code == 0, pi.errors()
        check_work(pi, ws, seen)
        usage = [answer["usage"] for answer in answers(seen)]
        assert all(turn["output"] > 0 for turn in usage), usage
        # Every turn goes on from the one before it.
        assert all(turn["cacheRead"] > 0 for turn in usage[1:]), usage


def a_task_of_many_tools_in_rpc_mode():
    ws = demo_task.workspace(seed=3)
    with fresh(brain.url) as pi:
        demo_task.write_out(ws, pi.work)
        process = pi.start("--mode", "rpc")

        def send(command):
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()

        seen = []
        send({"id": "1", "type": "get_state"})
        send({"id": "2", "type": "prompt", "message": ws.goal})
        for event in events(process.stdout):
            seen.append(event)
            if event["type"] == "response":
                assert event["success"], event
            if event["type"] == "agent_end":
                break
        process.stdin.close()
        process.stdout.read()
        assert process.wait() == 0, pi.errors()
        states = [event for event in seen if event.get("command") == "get_state"]
        assert states[0]["data"]["model"]["id"] == "demo", states
        check_work(pi, ws, seen)


def brain_is_killed_three_times_and_the_files_are_right():
    ws = demo_task.workspace(seed=4, records=6)
    with fresh(brain.url) as pi:
        demo_task.write_out(ws, pi.work)
        process = pi.start("--mode", "json", ws.goal)
        seen, kills = [], []
        # In the middle of an answer, while a tool runs, in the middle of another answer.
        due = [(2, "message_update"), (6, "tool_execution_start"), (11, "message_update")]
        for event in events(process.stdout):
            seen.append(event)
            if due and event["type"] == due[0][1] and len(called(seen)) >= due[0][0]:
                kills.append((len(seen), due.pop(0)[1]))
                brain.restart()
        assert process.wait() == 0, pi.errors()
        assert len(kills) == 3, kills
        check_work(pi, ws, seen)
        retries = sum(event["type"] == "auto_retry_start" for event in seen)
        assert retries >= 1, "no kill was noticed"
        if RECORD:
            record(ws, pi, seen, dict(kills))


def record(ws, pi, seen, kills):
    """Writes what happened, without times and texts that are in it twice."""
    lines = [{"goal": ws.goal, "records": sorted([*ws.files, *ws.odd])}]
    for number, event in enumerate(seen, 1):
        kind = event["type"]
        if kind == "tool_execution_start":
            lines.append({"call": event["toolName"], "arguments": event["args"]})
        elif kind == "tool_execution_end":
            lines.append({"result": event["result"]["content"][0]["text"]})
        elif kind == "auto_retry_start":
            lines.append({"retry": event["attempt"], "because": event["errorMessage"]})
        elif kind == "message_end" and event["message"]["role"] == "assistant":
            usage = event["message"]["usage"]
            lines.append({"answer": event["message"]["stopReason"], "tokens": usage["output"],
                          "prompt": usage["input"], "cached": usage["cacheRead"]})
        if number in kills:
            lines.append({"brain": "killed and started again", "at": kills[number]})
    lines.append({"right files": sorted(ws.expected), "report": (pi.work / ws.report).read_text()})
    pathlib.Path(RECORD).write_text("".join(json.dumps(line) + "\n" for line in lines))


with Brain(PROGRAM) as brain:
    run(
        [
            print_mode,
            an_overflow_is_recognised,
            a_task_of_many_tools_in_json_mode,
            a_task_of_many_tools_in_rpc_mode,
            brain_is_killed_three_times_and_the_files_are_right,
        ]
    )
