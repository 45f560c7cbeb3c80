"""Benchmark clients, unmodified: benchmarks.py BRAIN llama-benchy|vllm-bench FOLDER [--results DIR]

They measure brain over HTTP, one request at a time and without drafts: the demo model, to see that they work.
With `--results` they measure a model whose tokens take tens of milliseconds, beside which what a client
computes is nothing: random weights, one compute thread, brain on one core and the client on the others.
Their own result files are kept. Beside their figures stand the engine's own times of the same requests (from
`/metrics`), and what `brain bench` measures of the same work in the same way. No figure is judged here: a machine
that does other things beside gives any.
"""

import contextlib
import functools
import http.server
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import urllib.request

import demo_task
from brain import Brain
from cases import run

PROGRAM, NAME, FOLDER = sys.argv[1:4]
RESULTS = pathlib.Path(sys.argv[5]).resolve() if sys.argv[4:5] == ["--results"] else None
TOKENIZER = demo_task.ROOT / "brain/assets/demo"
PROMPT, ANSWER, REQUESTS = (2048, 128, 8) if RESULTS else (1024, 128, 8)
PATIENCE = 240
CORES = sorted(os.sched_getaffinity(0))


@contextlib.contextmanager
def on(cores):
    """What is started meanwhile computes on these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    yield
    os.sched_setaffinity(0, before)


@contextlib.contextmanager
def model():
    """Flags of the model that is measured."""
    if not RESULTS:
        yield []
        return
    path = str(demo_task.ROOT / "tests/long/checkpoint-speed")
    loader = importlib.machinery.SourceFileLoader("checkpoint_speed", path)
    checkpoints = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(checkpoints)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints.make(pathlib.Path(folder), checkpoints.large(1))
        yield ["--model", folder, "--served-model-name", "demo", "--device", "cpu", "--threads", "1"]


@contextlib.contextmanager
def book(folder):
    """A text for llama-benchy, on this machine: it would fetch one from the web."""
    text = " ".join(" ".join(demo_task.workspace(seed, 8).files.values()) for seed in range(60))
    (pathlib.Path(folder) / "book.txt").write_text(text)
    handler = functools.partial(Quiet, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/book.txt"
    server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def result_of(command, path, home):
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "HOME": home, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0 and path.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    if RESULTS:
        RESULTS.mkdir(parents=True, exist_ok=True)
        # Where this repository lies is nobody's business.
        text = path.read_text().replace(f"{demo_task.ROOT}/", "")
        (RESULTS / path.name).write_text(text)
    return json.loads(path.read_text())


def llama_benchy():
    with tempfile.TemporaryDirectory() as home, book(home) as url:
        path = pathlib.Path(home) / "llama-benchy.json"
        command = [f"{FOLDER}/bin/llama-benchy", "--base-url", f"{brain.url}/v1", "--model", "demo"]
        command += ["--tokenizer", TOKENIZER, "--book-url", url, "--pp", PROMPT, "--tg", ANSWER]
        # The demo model does not know the capital of France.
        command += ["--exact-tg", "--no-cache", "--skip-coherence", "--runs", 3]
        # Its warm-up is of other lengths; brain has been warmed up.
        command += ["--no-warmup", "--no-adapt-prompt"]
        # Where it gets token ids it counts those alone that come with text, and misses the tokens that are half
        # a character; otherwise it takes the count of the usage.
        command += ["--extra-body", "temperature=0", "--extra-body", "return_token_ids=false"]
        command += ["--latency-mode", "none", "--format", "json", "--save-result", path]
        result = result_of(command, path, home)
        one = result["benchmarks"][0]
        assert one["tg_throughput"]["mean"] > 0 and one["pp_throughput"]["mean"] > 0, one
        rates = one["pp_throughput"]["mean"], one["tg_throughput"]["mean"]
        report("llama-benchy", *rates)


def vllm_bench():
    with tempfile.TemporaryDirectory() as home:
        path = pathlib.Path(home) / "vllm-bench.json"
        command = [f"{FOLDER}/vllm-rs", "bench", "serve", "--backend", "openai", "--base-url", brain.url]
        command += ["--model", "demo", "--tokenizer", TOKENIZER, "--dataset-name", "random"]
        command += ["--random-input-len", PROMPT, "--random-output-len", ANSWER, "--ignore-eos"]
        command += ["--num-prompts", REQUESTS, "--num-warmups", 0, "--max-concurrency", 1, "--prompt-token-ids"]
        command += ["--temperature", 0, "--save-result", "--result-dir", home, "--result-filename", path.name]
        result = result_of(command, path, home)
        assert result["completed"] == REQUESTS and result["failed"] == 0, result
        assert result["total_output_tokens"] == REQUESTS * ANSWER, result
        first, each = result["median_ttft_ms"], result["median_tpot_ms"]
        report("vllm bench serve", PROMPT * 1e3 / first, 1e3 / each)


def engine():
    """What the engine has computed so far: tokens and seconds of prompts and of answers."""
    with urllib.request.urlopen(f"{brain.url}/metrics") as answer:
        lines = [line.split() for line in answer.read().decode().splitlines() if not line.startswith("#")]
    read = {name.split("{")[0]: float(value) for name, value, *_ in lines}
    return [
        read["vllm:prompt_tokens_total"],
        read["vllm:request_prefill_time_seconds_sum"],
        # The first token of an answer comes with its prompt.
        read["vllm:generation_tokens_total"] - read["vllm:request_decode_time_seconds_count"],
        read["vllm:request_decode_time_seconds_sum"],
    ]


def warm_up():
    """One answer, of which nothing is counted."""
    body = {"prompt": [500 + 7 * number % 400 for number in range(PROMPT)], "max_tokens": ANSWER, "ignore_eos": True}
    request = urllib.request.Request(f"{brain.url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    urllib.request.urlopen(request).read()


def report(client, prefill, decode):
    """The client's figures, and on request the engine's and those of `brain bench` beside them."""
    tokens, seconds, generated, decoding = (b - a for a, b in zip(BEFORE, engine()))
    said = f"{client}: prefill {prefill:.0f}, decode {decode:.1f} tokens a second"
    own = tokens / seconds, generated / decoding
    said += f"; the engine's own times: {own[0]:.0f}, {own[1]:.1f}, ratios {prefill / own[0]:.3f}, {decode / own[1]:.3f}"
    if RESULTS:
        print(said, flush=True)
        with tempfile.TemporaryDirectory() as out:
            command = [PROGRAM, "bench", "--parts", "contexts", "--contexts", PROMPT, "--tokens", ANSWER]
            command += ["--repeats", 3, "--draft-tokens", "off", "--out", out, *FLAGS]
            with on(CORES[:1]):
                subprocess.run([str(part) for part in command], check=True, capture_output=True)
            own = json.loads((pathlib.Path(out) / "bench.json").read_text())["contexts"][0]
        rates = own["prefill_per_second"], own["decode_per_second"]
        said = f"brain bench: {rates[0]:.0f}, {rates[1]:.1f}; "
        said += f"ratios {prefill / rates[0]:.3f}, {decode / rates[1]:.3f}"
    print(said)


with model() as FLAGS:
    with on(CORES[:1] if RESULTS else CORES):
        brain = Brain(PROGRAM, "--draft-tokens", "off", *FLAGS)
    with brain, on(CORES[1:] if RESULTS and CORES[1:] else CORES):
        warm_up()
        BEFORE = engine()
        run([{"llama-benchy": llama_benchy, "vllm-bench": vllm_bench}[NAME]])
