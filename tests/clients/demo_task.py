"""The demo model's own task, for agents that are not pilot.

The model knows one job: copy facts of records into a report and mark the records (see
brain/assets/demo/train/task.md). An agent that offers it the tools it was trained with, under the
system prompt it was trained with, can have that job done.
"""

import json
import pathlib
import random
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAIN = ROOT / "brain/assets/demo/train"
sys.path.insert(0, str(TRAIN))

import task  # noqa: E402  the path is set above

SYSTEM = task.SYSTEM_PROMPT
TOOLS = json.loads((TRAIN / "tools.json").read_text())


def workspace(seed=1, records=5):
    """A workspace as the model learned them, small enough for its context of 4,096 tokens."""
    return task.make_workspace(random.Random(seed), records, odd_share=0.25)


def write_out(ws, folder):
    """Puts the workspace on disk."""
    folder = pathlib.Path(folder)
    (folder / ws.folder).mkdir(parents=True)
    for path, text in ws.files.items():
        (folder / path).write_text(text)
    for path, kind in ws.odd.items():
        if kind == "dangling":
            (folder / path).symlink_to("nowhere")
        elif kind == "folder":
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(b"\xff\xfe\x00")


def wrong_files(ws, folder):
    """Paths whose content is not what the oracle expects; none when the job is done."""
    folder = pathlib.Path(folder)

    def content(path):
        try:
            return (folder / path).read_text()
        except OSError:
            return None

    return sorted(path for path, text in ws.expected.items() if content(path) != text)


FIRST = workspace()


def messages():
    """The task before its first step."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": FIRST.goal}]


def check_call(name, arguments):
    """Whether a call is the task's first step: the report's heading is written."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "write", name
    assert given["path"] == FIRST.report, given
    assert given["content"].strip() == FIRST.heading, given
