"""What HTTP costs brain: frontend.py BRAIN

With the fake device, which computes next to nothing: processor time of the whole process for a streamed
token at 64 streams, how late tokens come beyond the step that made them, and the memory of 1,000 streams
that wait. Measure on a machine that does nothing else.
"""

import asyncio
import json
import os
import pathlib
import sys
import time

from brain import Brain

PROGRAM = sys.argv[1]
TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the process is gone")


async def open_stream(url, number, tokens):
    """A streamed chat whose headers have arrived."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({
        "model": "demo", "messages": [{"role": "user", "content": f"Stream {number}"}],
        "stream": True, "max_tokens": tokens, "ignore_eos": True, "seed": number,
    }).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    status = await reader.readuntil(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 200"), status
    return reader, writer


async def arrivals(reader, clock):
    """When each piece of the stream came, to its end."""
    times = []
    while True:
        line = await reader.readline()
        if line.startswith(b"data: [DONE]"):
            return times
        if line.startswith(b"data: "):
            assert b'"error"' not in line[:20], line
            times.append(clock())


async def stream(brain, streams, tokens):
    opened = [await open_stream(brain.url, number, tokens) for number in range(streams)]
    before = processor_seconds(brain.process.pid)
    times = await asyncio.gather(*(arrivals(reader, time.perf_counter) for reader, _ in opened))
    spent = processor_seconds(brain.process.pid) - before
    for _, writer in opened:
        writer.close()
    return times, spent


def share(values, part):
    values = sorted(values)
    return values[min(len(values) - 1, int(part * len(values)))]


def flags(step, seqs):
    return ["--device", "fake", "--fake-step-time", step, "--draft-tokens", "off",
            "--max-num-seqs", str(seqs)]


def streaming(streams, tokens, step):
    with Brain(PROGRAM, *flags(f"{step}ms", 64)) as brain:
        asyncio.run(stream(brain, streams, 50))
        times, spent = asyncio.run(stream(brain, streams, tokens))
    counted = sum(len(each) for each in times)
    late = [1e3 * (b - a) - step for each in times for a, b in zip(each, each[1:])]
    print(f"{streams} streams of {tokens} tokens, a step every {step} ms: "
          f"{1e6 * spent / counted:.1f} us of processor time a token; a token later than its step by "
          f"{share(late, 0.5):.2f} ms (median), {share(late, 0.99):.2f} ms (99 %)")


def idle(streams):
    async def hold(brain):
        pid = brain.process.pid
        opened = [await open_stream(brain.url, 10_000, 4)]
        before = resident(pid)
        for number in range(streams):
            opened.append(await open_stream(brain.url, number, 4))
        after = resident(pid)
        for _, writer in opened:
            writer.close()
        return before, after

    with Brain(PROGRAM, *flags("5s", 64)) as brain:
        before, after = asyncio.run(hold(brain))
    print(f"{streams} waiting streams: {(after - before) / 1e6:.1f} MB more than one")


streaming(1, 400, 10)
streaming(64, 200, 20)
idle(1000)
