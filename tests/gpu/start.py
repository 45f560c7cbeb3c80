#!/usr/bin/env python3
"""How long brain takes from its start to the first token of a model of real size that lies on the
disk, against a plain read of the same files, both with a cold cache.

    tests/gpu/start.py BRAIN FOLDER [MODEL...]     default: e4b-bf16 31b-nvfp4

MODEL is a name of tests/shapes (e2b, e4b, 12b, 31b) and -bf16 or -nvfp4. Its checkpoint is written
into FOLDER, with random weights, and taken away again: 15 GB of e4b-bf16, 20 GB of 31b-nvfp4. The
tokenizer is the demo's, filled up to the real number of tokens. Needs a card, and NumPy.
"""

import json
import math
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import time

import numpy

ROOT = pathlib.Path(__file__).parents[2]
DEMO = ROOT / "brain/assets/demo"
BLOCK = 64 << 20
BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}


def tensors(facts, nvfp4):
    """(name, type, shape) of the text decoder; the products of layers in NVFP4 if asked for."""
    for entry in facts["tensors"]:
        if not entry["name"].startswith("model.language_model."):
            continue
        for layer in numbers(entry.get("layers")):
            name, shape = entry["name"].replace("{}", str(layer)), entry["shape"]
            if nvfp4 and name.endswith("_proj.weight") and ".layers." in name:
                module = name.removesuffix("weight")
                yield module + "weight", "U8", [shape[0], shape[1] // 2]
                yield module + "weight_scale", "F8_E4M3", [shape[0], shape[1] // 16]
                yield module + "weight_scale_2", "F32", []
            else:
                yield name, entry["dtype"], shape


def numbers(ranges):
    if ranges is None:
        return [0]
    ends = (part.split("-") for part in ranges.split(","))
    return [n for end in ends for n in range(int(end[0]), int(end[-1]) + 1)]


def blocks():
    """Bytes of each type that are finite, small numbers."""
    random = numpy.random.default_rng(1)
    floats = random.normal(0.0, 0.02, BLOCK // 4).astype(numpy.float32)
    halves = random.normal(0.0, 0.02, BLOCK // 2).astype(numpy.float32).view(numpy.uint32) >> 16
    codes = random.integers(0, 256, BLOCK, dtype=numpy.uint8)
    scales = random.integers(0x28, 0x48, BLOCK, dtype=numpy.uint8)
    return {"F32": abs(floats).tobytes(), "BF16": halves.astype(numpy.uint16).tobytes(),
            "U8": codes.tobytes(), "F8_E4M3": scales.tobytes()}


def write_weights(path, listed):
    header, at = {}, 0
    for name, dtype, shape in listed:
        size = math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = blocks()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in header.values():
            begin, end = entry["data_offsets"]
            for start in range(begin, end, BLOCK):
                file.write(memoryview(random[entry["dtype"]])[: min(BLOCK, end - start)])
        file.flush()
        os.fsync(file.fileno())


def write_tokenizer(path, size):
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for token in range(len(vocabulary), size):
        vocabulary[f"\u2402{token}"] = token
    path.write_text(json.dumps(tokenizer))


def make(folder, model):
    name, _, form = model.rpartition("-")
    facts = json.loads((ROOT / f"tests/shapes/{name}.json").read_text())
    config = facts["config"]
    if form == "nvfp4":
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4",
                                         "group_size": 16, "ignore": ["lm_head"]}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for file in ["chat_template.jinja", "generation_config.json", "tokenizer_config.json"]:
        shutil.copy(DEMO / file, folder)
    write_tokenizer(folder / "tokenizer.json", config["text_config"]["vocab_size"])
    write_weights(folder / "model.safetensors", list(tensors(facts, form == "nvfp4")))


def forget(folder):
    """Takes the files out of the system's cache."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_read(path):
    begin = time.monotonic()
    buffer = bytearray(BLOCK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.monotonic() - begin


def first_token(brain, folder):
    begin = time.monotonic()
    done = subprocess.run(
        [brain, "generate", "--device", "cuda", "--model", folder, "--drafter", "none",
         "--max-model-len", "4096", "--raw", "--prompt", "a ledger", "--max-tokens", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    seconds = time.monotonic() - begin
    if done.returncode != 0:
        sys.exit(f"{folder}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    return seconds


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__.strip())
    brain, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    print("| model | weights | plain read, cold | start to first token, cold | the rest | warm |")
    print("|---|---|---|---|---|---|")
    for model in sys.argv[3:] or ["e4b-bf16", "31b-nvfp4"]:
        target = folder / model
        make(target, model)
        try:
            weights = target / "model.safetensors"
            forget(target)
            read = plain_read(weights)
            forget(target)
            cold = first_token(brain, target)
            warm = first_token(brain, target)
            size = weights.stat().st_size / 1e9
            print(f"| {model} | {size:.1f} GB | {read:.1f} s, {size / read:.2f} GB/s | {cold:.1f} s "
                  f"| {cold - read:+.1f} s | {warm:.1f} s |", flush=True)
        finally:
            shutil.rmtree(target)


main()
