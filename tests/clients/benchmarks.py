"""Benchmark clients, unmodified: benchmarks.py BRAIN llama-benchy|vllm-bench FOLDER [--results DIR]

They measure brain with the demo model over HTTP, one request at a time and without drafts. With
`--results` their own result files are kept, and `brain bench` measures the same work on the same machine.
No figure is judged here: a machine that does other things beside gives any.
"""

import contextlib
import functools
import http.server
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

PROGRAM, NAME, FOLDER = sys.argv[1:4]
RESULTS = pathlib.Path(sys.argv[5]).resolve() if sys.argv[4:5] == ["--results"] else None
TOKENIZER = demo_task.ROOT / "brain/assets/demo"
PROMPT, ANSWER = 1024, 128
PATIENCE = 240


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
        command += ["--num-prompts", 8, "--num-warmups", 1, "--max-concurrency", 1, "--prompt-token-ids"]
        command += ["--save-result", "--result-dir", home, "--result-filename", path.name]
        result = result_of(command, path, home)
        assert result["completed"] == 8 and result["failed"] == 0, result
        assert result["total_output_tokens"] == 8 * ANSWER, result
        first, each = result["median_ttft_ms"], result["median_tpot_ms"]
        report("vllm bench serve", PROMPT * 1e3 / first, 1e3 / each)


def report(client, prefill, decode):
    """The client's figures, and on request those of `brain bench` beside them."""
    said = f"{client}: prefill {prefill:.0f}, decode {decode:.1f} tokens a second"
    if RESULTS:
        with tempfile.TemporaryDirectory() as out:
            command = [PROGRAM, "bench", "--contexts", PROMPT, "--batches", 1, "--tokens", ANSWER]
            command += ["--repeats", 3, "--draft-tokens", "off", "--out", out]
            subprocess.run([str(part) for part in command], check=True, capture_output=True)
            own = json.loads((pathlib.Path(out) / "bench.json").read_text())["contexts"][0]
        rates = own["prefill_per_second"], own["decode_per_second"]
        said += f"; brain bench: {rates[0]:.0f}, {rates[1]:.1f}; "
        said += f"ratios {prefill / rates[0]:.3f}, {decode / rates[1]:.3f}"
    print(said)


with Brain(PROGRAM, "--draft-tokens", "off") as brain:
    run([{"llama-benchy": llama_benchy, "vllm-bench": vllm_bench}[NAME]])
