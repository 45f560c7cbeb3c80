"""Turns a run into the token rows the model is trained on: the head, then call and answer, step by step.

A run that outgrows its limit is compacted as pilot does it, so one run gives several rows. In a row, the
model's own tokens of this row carry the loss; everything it only reads does not.
"""

import json
import random
from pathlib import Path

import task

MARGIN, TOOL_CALL, STOP, QUOTE = 256, 48, 50, 52
LOSS_BIT, FREE_BIT = 0x8000, 0x4000
FREE_ARGUMENTS = ("bash", "finish")
SMALLEST_LIMIT, LIMIT = 1536, 4096


def _value(value):
    return f'<|"|>{value}<|"|>'


def declaration(function):
    """One tool as the chat template prints it."""
    parameters = function["parameters"]
    shown = ",".join(
        f'{name}:{{description:{_value(p["description"])},type:{_value(p["type"].upper())}}}'
        for name, p in sorted(parameters["properties"].items())
    )
    required = ",".join(_value(name) for name in parameters["required"])
    return (
        f'<|tool>declaration:{function["name"]}{{description:{_value(function["description"])},'
        f'parameters:{{properties:{{{shown}}},required:[{required}],type:{_value("OBJECT")}}}}}<tool|>'
    )


TOOLS = "".join(declaration(t["function"]) for t in json.loads((Path(__file__).parent / "tools.json").read_text()))


def head_text(goal, compacted, brief=False):
    """Everything before the first step; `brief` leaves the tool declarations out (used early in training only)."""
    goal += task.COMPACTED if compacted else ""
    return (
        f"<bos><|turn>system\n{task.SYSTEM_PROMPT}{'' if brief else TOOLS}<turn|>\n<|turn>user\n{goal}<turn|>\n"
        "<|turn>model\n<|channel>thought\n<channel|>"
    )


def call_text(exchange):
    """What the model emits for one step, its stop token included."""
    pairs = ",".join(f"{k}:{_value(v)}" for k, v in sorted(exchange.args.items()))
    return f"{exchange.remark}<|tool_call>call:{exchange.name}{{{pairs}}}<tool_call|><|tool_response>"


def answer_text(exchange):
    """What is put after the model's tokens when the tool has answered."""
    return f"response:{exchange.name}{{value:{_value(exchange.result)}}}<tool_response|>"


def keep_latest(lengths, limit):
    """How many of the newest segments a compacted prompt keeps: as many as fit into limit/4, at least one."""
    kept, total = 0, 0
    for length in reversed(lengths):
        total += length
        if kept and total > limit // 4:
            break
        kept += 1
    return kept


class Transcript:
    """An append-only prompt with pilot's compaction. `window` holds the visible (exchange, segment tokens)."""

    def __init__(self, encode, goal, limit, brief=False):
        self.encode, self.goal, self.limit, self.brief = encode, goal, limit, brief
        self.window, self.compactions = [], 0
        self.tokens = encode(head_text(goal, False, brief))
        self.loss_from = []

    def visible(self):
        return [exchange for exchange, _ in self.window]

    def full(self):
        return len(self.tokens) + MARGIN > self.limit

    def compact(self):
        kept = keep_latest([len(s) for _, s in self.window], self.limit)
        self.window = self.window[len(self.window) - kept:]
        self.tokens = self.encode(head_text(self.goal, True, self.brief))
        self.loss_from = []
        for _, segment in self.window:
            self.tokens += segment
        self.compactions += 1

    def add(self, exchange, own):
        """Appends one step: the model's tokens `own` (with FREE_BIT where the teacher chose freely), then the answer's."""
        start = len(self.tokens)
        self.loss_from += [(start + i, LOSS_BIT | (t & FREE_BIT)) for i, t in enumerate(own)]
        own = [t & ~FREE_BIT for t in own]
        segment = own if exchange.name == "finish" else own + self.encode(answer_text(exchange))
        self.tokens = self.tokens + segment
        self.window.append((exchange, segment))

    def row(self):
        """Tokens of the current prompt, those with loss marked by LOSS_BIT."""
        row = list(self.tokens)
        for i, bits in self.loss_from:
            row[i] |= bits
        return row


def own_tokens(encode, exchange):
    """The model's tokens of one step; FREE_BIT marks the remark, the choice to make one, and freely chosen arguments."""
    own = encode(call_text(exchange))
    call, value = own.index(TOOL_CALL), own.index(QUOTE)
    end = len(own) - 4 if exchange.name in FREE_ARGUMENTS else 0
    return [t | FREE_BIT if i <= call or value < i < end else t for i, t in enumerate(own)]


def teacher_rows(encode, rng, count, limit, demo=False, brief=False):
    """Rows of one taught run, or None if this limit hides from the teacher what it needs."""
    ws = task.make_workspace(rng, count, demo)
    transcript, rows = Transcript(encode, ws.goal, limit, brief), []
    while True:
        if transcript.full():
            if transcript.loss_from:
                rows.append(transcript.row())
            transcript.compact()
            if transcript.full():
                return None
        try:
            exchange = task.step(ws, transcript.visible(), rng)
        except (StopIteration, ValueError):
            return None
        own = own_tokens(encode, exchange)
        exchange.result = task.perform(ws, exchange.name, exchange.args)
        transcript.add(exchange, own)
        if exchange.name == "finish":
            rows.append(transcript.row())
            return rows if task.oracle(ws) == [] and max(map(len, rows)) <= limit else None


def random_rows(encode, rng, most, limit=LIMIT, brief=False):
    """Rows of a random run of at most `most` records and any limit up to `limit` that suits it."""
    while True:
        count = rng.randint(1, most)
        chosen = limit if rng.random() < 0.65 else rng.randint(SMALLEST_LIMIT, limit)
        rows = teacher_rows(encode, rng, count, chosen, rng.random() < 0.5, brief)
        if rows is not None:
            return rows


def sample_text(seed):
    """Rendered text of a short taught run; for checks of the tokenizer."""
    rng = random.Random(seed)
    ws, seen = task.make_workspace(rng, rng.randint(1, 5)), []
    text = head_text(ws.goal, seed % 2 == 0)
    while not seen or seen[-1].name != "finish":
        seen.append(task.step(ws, seen, rng))
        seen[-1].result = task.perform(ws, seen[-1].name, seen[-1].args)
        text += call_text(seen[-1]) + answer_text(seen[-1])
    return text
