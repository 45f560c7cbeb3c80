"""The clerk's task: workspaces, the tools as pilot answers them, the teacher, and the oracle.

A workspace is a folder of small records. The run copies facts out of each record into a
report and marks the record as done; some records cannot be read, and some need a second try.
`task.md` states the same rules for readers of other languages.
"""

import random
from dataclasses import dataclass, field

CONSONANTS = "bdfghjklmnprstvz"
VOWELS = "aeiou"
SYLLABLES = [c + v for c in CONSONANTS for v in VOWELS]

FOLDERS = ["inbox", "records", "cards", "intake", "cases", "letters", "desk", "queue"]
REPORTS = ["report.txt", "summary.txt", "ledger.txt", "index.txt", "register.txt", "digest.txt"]
HEADINGS = ["Records of {}", "Report for {}", "Register of {}", "Open records of {}", "Cards for {}"]
WORDS = (
    "amber autumn basket bridge bronze candle canvas cellar cherry copper corner cotton field garden glass "
    "harbor hollow iron island kitchen ladder lantern linen maple market meadow mirror morning north orchard "
    "paper pepper pillow plain quiet river saddle salt silver smoke south spring stone summer table thunder "
    "timber tower valley velvet village walnut water wheel willow window winter wool yellow"
).split()
GOALS = [
    'Work through the records in the folder {folder}. Start the file {report} with the line "{heading}". '
    'For every record, in the order of the listing: read it, append the line "NAME | OWNER | CODE" to '
    '{report}, then edit "state: open" to "state: done" in the record. If a record cannot be read, append '
    '"NAME | unreadable" and go on. At the end look at {report}, then finish.',
    'The folder {folder} holds records. Write {report} with the heading "{heading}", then take the records '
    'one after the other: read, append "NAME | OWNER | CODE" to {report}, set "state: open" to "state: done". '
    'A record that cannot be read gets the line "NAME | unreadable". Check {report} before you finish.',
    'Please make {report} from the records in {folder}. Its first line is "{heading}". Each record adds a '
    'line "NAME | OWNER | CODE", or "NAME | unreadable", and is then changed from "state: open" to '
    '"state: done". Go in the order of the listing and check {report} at the end.',
]
SYSTEM_PROMPT = (
    "You are a careful agent. Do the task with the tools, one call at a time. "
    "When everything is done, call finish."
)
COMPACTED = "\n\nEarlier steps were left out here; the latest ones follow."

UNREADABLE = {"dangling": "no such file", "folder": "is a directory", "binary": "not a text file"}
KINDS = ["plain", "twice", "dangling", "folder", "binary"]

REMARK_SHARE = 0.17
REMARKS = {
    "write": ["Starting the report.", "First the heading.", "The report comes first.", "Let me begin."],
    "ls": ["Let me look at the folder.", "What is in the folder?", "I need the listing.", "Listing the folder."],
    "read": ["On to the next record.", "Next one.", "Now this record.", "Reading on.", "The next record, please.",
             "Let me open it.", "Going on with the list.", "Another record."],
    "append": ["This goes into the report.", "Adding the line.", "Noted.", "One more line.", "Into the report.",
               "Writing it down.", "Now the line for it."],
    "edit": ["Marking it as done.", "This one is done.", "Now the state.", "Setting the state.", "Done with it.",
             "Closing the record."],
    "bash": ["That was the last record.", "All records are through.", "Time to check.", "A quick check."],
    "check": ["Let me read it once more.", "Looking at the report.", "One last look.", "Is it all there?"],
    "finish": ["Everything is there.", "That is all.", "Good.", "All done."],
    "unreadable": ["This one cannot be read.", "A broken record.", "No luck with this one.", "Going on without it."],
    "retry": ["Twice in this file; I need more of the text.", "More context, then.", "The line before makes it unique.",
              "Once more, with the line before."],
}
SUMMARIES = [
    "All records are in {report}.",
    "{report} is complete and the records are done.",
    "Every record was copied to {report} and marked as done.",
    "Done: {report} has a line for every record.",
    "The records are worked through; see {report}.",
]


@dataclass
class Exchange:
    """One step of the run: an optional remark, a call, and the tool's answer."""

    remark: str
    name: str
    args: dict
    result: str = ""


@dataclass
class Workspace:
    """Folder contents and goal. `files` maps a path to text; other kinds are in `odd`."""

    folder: str
    report: str
    heading: str
    goal: str
    files: dict = field(default_factory=dict)
    odd: dict = field(default_factory=dict)
    expected: dict = field(default_factory=dict)


def _name(rng, first, last):
    """Two or three syllables, no syllable twice in one name."""
    if first == last or rng.random() < 0.7:
        middle = rng.choice([s for s in SYLLABLES if s != first and s != last])
        last = last if last != first else rng.choice([s for s in SYLLABLES if s not in (first, middle)])
        return first + middle + last
    return first + last


def _record_names(rng, count):
    """No two names of one workspace start, or end, with the same syllable."""
    firsts, lasts = rng.sample(SYLLABLES, count), rng.sample(SYLLABLES, count)
    clash = [i for i in range(count) if firsts[i] == lasts[i]]
    spare = [s for s in SYLLABLES if s not in lasts]
    for i in clash:
        lasts[i] = spare.pop()
    return [_name(rng, a, b) for a, b in zip(firsts, lasts)]


def person(rng):
    """A capitalised invented name of two or three different syllables."""
    return "".join(rng.sample(SYLLABLES, rng.choice([2, 3]))).capitalize()


def _record(rng, twice):
    """Lines of one record in random order, and the facts that go into the report."""
    owner = person(rng)
    code = "".join(rng.sample("0123456789", rng.choice([4, 4, 5])))
    lines = [f"owner: {owner}", f"code: {code}"]
    noise = ["title: " + " ".join(rng.sample(WORDS, rng.choice([2, 3]))), "place: " + rng.choice(WORDS),
             "topic: " + " ".join(rng.sample(WORDS, 2))]
    lines += rng.sample(noise, rng.choice([0, 1, 1, 2] if twice else [0, 1, 1, 2, 3]))
    if twice:
        lines.append("note: was state: open " + rng.choice(["before", "today", "again", "too"]))
    rng.shuffle(lines)
    lines.insert(rng.randrange(1 if twice else 0, len(lines) + 1), "state: open")
    return "\n".join(lines) + "\n", owner, code


def make_workspace(rng, count, demo=False, odd_share=None):
    """A fresh workspace of `count` records. `demo` fixes the wording that pilot's demo uses."""
    folder, report = ("inbox", "report.txt") if demo else (rng.choice(FOLDERS), rng.choice(REPORTS))
    heading = rng.choice(HEADINGS).format(person(rng))
    goal = (GOALS[0] if demo else rng.choice(GOALS)).format(folder=folder, report=report, heading=heading)
    if demo:
        kinds = [k for k in KINDS[1:] for _ in range(2)][:count]
        kinds += ["plain"] * (count - len(kinds))
        rng.shuffle(kinds)
    else:
        share = rng.choice([0.0, 0.1, 0.25, 0.6]) if odd_share is None else odd_share
        kinds = [rng.choice(KINDS[1:]) if rng.random() < share else "plain" for _ in range(count)]
    ws = Workspace(folder, report, heading, goal)
    rows = {}
    for name, kind in zip(_record_names(rng, count), kinds):
        path = f"{folder}/{name}.txt"
        if kind in UNREADABLE:
            ws.odd[path] = kind
            rows[path] = f"{name} | unreadable"
            continue
        text, owner, code = _record(rng, kind == "twice")
        ws.files[path] = text
        rows[path] = f"{name} | {owner} | {code}"
        ws.expected[path] = "\n".join("state: done" if l == "state: open" else l for l in text.split("\n"))
    entries = sorted(rows, key=lambda p: (p + "/" if ws.odd.get(p) == "folder" else p).encode())
    ws.expected[report] = "\n".join([heading] + [rows[p] for p in entries]) + "\n"
    return ws


def perform(ws, name, args):
    """The answer pilot's tool would give; changes `ws.files` like the real tool changes the disk."""
    path = args.get("path", "")
    if name == "ls":
        inside = [p[len(path) + 1:] for p in list(ws.files) + list(ws.odd) if p.startswith(path + "/")]
        shown = [n + "/" if ws.odd.get(f"{path}/{n}") == "folder" else n for n in inside]
        return "\n".join(sorted(shown, key=str.encode)) or ("(empty)" if path == ws.folder else f"error: {path}: no such file")
    if name == "bash":
        return _shell(ws, args.get("command", ""))
    if name == "finish":
        return ""
    content = args.get("content", "")
    content = content if content.endswith("\n") else content + "\n"
    if name == "write":
        ws.files[path] = content
        return f"wrote {path}"
    if path in ws.odd:
        return f"error: {path}: {UNREADABLE[ws.odd[path]]}"
    if name == "append":
        ws.files[path] = ws.files.get(path, "") + content
        return f"appended to {path}"
    if path not in ws.files:
        return f"error: {path}: no such file"
    text = ws.files[path]
    if name == "read":
        return text[:-1] if text.endswith("\n") else text
    if name == "edit":
        times = text.count(args.get("old", "")) if args.get("old") else 0
        if times == 0:
            return f"error: {path}: text not found"
        if times > 1:
            return f"error: {path}: text occurs {times} times; make it unique"
        ws.files[path] = text.replace(args["old"], args.get("new", ""))
        return f"edited {path}"
    return f"error: unknown tool {name}"


def _shell(ws, command):
    """The two commands the teacher uses; anything else is not simulated."""
    words = command.split(" ")
    text = ws.files.get(words[-1])
    if text is None:
        return "error: not simulated"
    if words[:-1] == ["wc", "-l"]:
        return f"{text.count(chr(10))} {words[-1]}"
    if words[:-1] == ["tail", "-n", "3"]:
        return "\n".join(text[:-1].split("\n")[-3:])
    return "error: not simulated"


def oracle(ws):
    """Paths whose content is not the expected one (none: the run did its work)."""
    return sorted(p for p in set(ws.files) | set(ws.expected) if ws.files.get(p) != ws.expected.get(p))


def _stem(path):
    return path.rsplit("/", 1)[-1].removesuffix(".txt")


def _last_worked(ws, visible):
    """Stem of the record the latest visible step worked on, or None."""
    for ex in reversed(visible):
        if ex.name == "append":
            return ex.args["content"].split(" | ")[0]
        if ex.name in ("read", "edit") and ex.args["path"].startswith(ws.folder + "/"):
            return _stem(ex.args["path"])
    return None


def decide(ws, visible, rng):
    """The teacher: (remark topic, tool, arguments) from the goal and the visible exchanges alone."""
    if not visible:
        return "write", "write", {"content": ws.heading, "path": ws.report}
    last = visible[-1]
    if last.name == "write":
        return "ls", "ls", {"path": ws.folder}
    if last.name == "read" and last.args["path"] == ws.report:
        return "finish", "finish", {"summary": rng.choice(SUMMARIES).format(report=ws.report)}
    if last.name == "bash":
        return "check", "read", {"path": ws.report}
    if last.name == "read":
        stem = _stem(last.args["path"])
        if last.result.startswith("error: "):
            return "unreadable", "append", {"content": f"{stem} | unreadable", "path": ws.report}
        facts = dict(l.split(": ", 1) for l in last.result.split("\n"))
        return "append", "append", {"content": f"{stem} | {facts['owner']} | {facts['code']}", "path": ws.report}
    if last.name == "append" and not last.args["content"].endswith(" | unreadable"):
        stem = last.args["content"].split(" | ")[0]
        return "edit", "edit", {"new": "state: done", "old": "state: open", "path": f"{ws.folder}/{stem}.txt"}
    if last.name == "edit" and last.result.startswith("error: "):
        path = last.args["path"]
        text = next(e.result for e in reversed(visible) if e.name == "read" and e.args["path"] == path)
        lines = text.split("\n")
        before = lines[lines.index("state: open") - 1]
        return "retry", "edit", {"new": f"{before}\nstate: done", "old": f"{before}\nstate: open", "path": path}
    listing = next((e.result for e in reversed(visible) if e.name == "ls"), None)
    if listing is None:
        return "ls", "ls", {"path": ws.folder}
    names = [_stem(n.rstrip("/")) for n in listing.split("\n")] if listing != "(empty)" else []
    worked = _last_worked(ws, visible)
    place = names.index(worked) + 1 if worked in names else 0
    if place < len(names):
        return "read", "read", {"path": f"{ws.folder}/{names[place]}.txt"}
    command = rng.choice(["wc -l {}", "tail -n 3 {}"]).format(ws.report)
    return "bash", "bash", {"command": command}


def step(ws, visible, rng):
    """One teacher step, with its free choices drawn from `rng`; not yet performed."""
    topic, name, args = decide(ws, visible, rng)
    remark = rng.choice(REMARKS[topic]) if rng.random() < REMARK_SHARE else ""
    return Exchange(remark, name, args)


def self_check(seeds=300):
    """The teacher, seeing everything, must satisfy the oracle on every workspace."""
    for seed in range(seeds):
        rng = random.Random(seed)
        ws, seen = make_workspace(rng, rng.randint(1, 48), demo=seed % 2 == 0), []
        while not seen or seen[-1].name != "finish":
            seen.append(step(ws, seen, rng))
            seen[-1].result = perform(ws, seen[-1].name, seen[-1].args)
        assert oracle(ws) == [], (seed, oracle(ws))
    return len(seen)


if __name__ == "__main__":
    print("last run:", self_check(), "calls; all right")
