"""Builds `tokenizer.json`: Gemma's structure with a vocabulary of 1,024.

Text is split into letter runs and single other characters before BPE, and the syllables of invented names
are merged before anything else and never with each other. So a copied string is the same tokens wherever it
stands, which is what a small model needs to copy without error.
"""

import collections
import json
import re
import sys
from pathlib import Path

import render
import task

HERE = Path(__file__).parent
VOCAB_SIZE = 1024
SPECIAL = {
    "<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4, "<|tool>": 46, "<tool|>": 47, "<|tool_call>": 48,
    "<tool_call|>": 49, "<|tool_response>": 50, "<tool_response|>": 51, '<|"|>': 52, "<|think|>": 98,
    "<|channel>": 100, "<channel|>": 101, "<|turn>": 105, "<turn|>": 106,
}
NEWLINE, FIRST_BYTE = 107, 238
SYLLABLES = task.SYLLABLES + [s.capitalize() for s in task.SYLLABLES]
EVERYDAY = (
    "the of and to in is it you that he was for on are with as his they be at one have this from or had by not but what all were "
    "when we there can an your which their said if do will each about how up out them then she many some so these would other "
    "into has more her two like him see time could no make than first been its who now people my made over did down only way "
    "find use may long little very after words called just where most know get through back much before good new write our "
    "me man too any day same right look think also around another came come work three word must because does part"
).split()


def word_counts():
    """Letter runs of everything the renderer can print, with how often they are met; invented names left out."""
    fixed = [render.head_text("goal", compacted=True), *task.GOALS, *task.SUMMARIES, *task.HEADINGS, *task.WORDS]
    fixed += [*task.FOLDERS, *task.REPORTS, *(r for topic in task.REMARKS.values() for r in topic), *EVERYDAY]
    fixed += ["owner code state open done title place topic note was before today again too wc tail unreadable response value"]
    fixed += ["error no such file is a directory not a text file text occurs times make it unique not found txt wrote appended edited"]
    counts = collections.Counter(w for text in fixed for w in re.findall(r"[A-Za-z]+", text))
    for often in "call read append edit path content new old state open done owner code txt response value inbox report".split():
        counts[often] += 1000
    return counts


def train_merges(counts, room):
    """Plain BPE over the words, syllables first; two syllables never merge with each other."""
    merges = [(s[0], s[1]) for s in SYLLABLES]
    closed = set(SYLLABLES)
    words = {w: apply_merges(list(w), {m: i for i, m in enumerate(merges)}) for w in counts}
    while len(merges) < room:
        pairs = collections.Counter()
        for word, parts in words.items():
            for pair in zip(parts, parts[1:]):
                if not (pair[0] in closed and pair[1] in closed):
                    pairs[pair] += counts[word]
        if not pairs:
            break
        best = max(pairs, key=lambda p: (pairs[p], p))
        merges.append(best)
        words = {w: apply_merges(parts, {best: 0}) for w, parts in words.items()}
    return merges


def apply_merges(parts, rank):
    """BPE on one piece: the lowest-ranked neighbouring pair first, leftmost first."""
    parts = list(parts)
    while len(parts) > 1:
        found = [(rank[p], i) for i, p in enumerate(zip(parts, parts[1:])) if p in rank]
        if not found:
            return parts
        at = min(found)[1]
        parts[at:at + 2] = [parts[at] + parts[at + 1]]
    return parts


def build():
    """The `tokenizer.json` object."""
    vocab = dict(SPECIAL)
    vocab["\n"] = NEWLINE
    vocab.update({f"<0x{b:02X}>": FIRST_BYTE + b for b in range(256)})
    free = iter(sorted(set(range(VOCAB_SIZE)) - set(vocab.values())))
    for char in ["▁"] + [chr(c) for c in range(33, 127)]:
        vocab[char] = next(free)
    merges = train_merges(word_counts(), VOCAB_SIZE - len(vocab))
    for a, b in merges:
        if a + b not in vocab:
            vocab[a + b] = next(free)
    for number, token_id in enumerate(free):
        vocab[f"<unused{number}>"] = token_id
    added = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": True} for t, i in SPECIAL.items()]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\p{L}+|[^\p{L}]"}, "behavior": "Isolated",
                          "invert": False},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": dict(sorted(vocab.items(), key=lambda kv: kv[1])), "merges": [list(m) for m in merges]},
    }


CONFIG = {
    "tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>",
    "mask_token": "<mask>", "add_bos_token": False, "add_eos_token": False, "clean_up_tokenization_spaces": False,
    "model_max_length": 4096, "sot_token": "<|turn>", "eot_token": "<turn|>", "soc_token": "<|channel>", "eoc_token": "<channel|>",
    "std_token": "<|tool>", "etd_token": "<tool|>", "stc_token": "<|tool_call>", "etc_token": "<tool_call|>",
    "str_token": "<|tool_response>", "etr_token": "<tool_response|>", "escape_token": '<|"|>', "think_token": "<|think|>",
}


class Encoder:
    """A fast encoder that agrees with the `tokenizers` library on the text the renderer prints."""

    def __init__(self, path=HERE.parent / "tokenizer.json"):
        model = json.loads(Path(path).read_text())["model"]
        self.vocab = model["vocab"]
        self.rank = {tuple(m): i for i, m in enumerate(model["merges"])}
        special = "|".join(re.escape(t) for t in sorted(SPECIAL, key=len, reverse=True))
        self.pieces = re.compile(f"{special}|[A-Za-z]+|[^A-Za-z]", re.S)
        self.memo = {" ": (self.vocab["▁"],), **{t: (i,) for t, i in SPECIAL.items()}}

    def __call__(self, text):
        """Token ids; special tokens in the text become special tokens."""
        out, memo = [], self.memo
        for piece in self.pieces.findall(text):
            ids = memo.get(piece)
            if ids is None:
                ids = memo[piece] = self._piece(piece)
            out.extend(ids)
        return out

    def _piece(self, piece):
        if piece not in self.vocab and not piece.isalpha() or not piece.isascii():
            return tuple(FIRST_BYTE + b for b in piece.encode())
        return tuple(self.vocab[p] for p in apply_merges(list(piece), self.rank))


def main():
    target = HERE.parent
    (target / "tokenizer.json").write_text(json.dumps(build(), ensure_ascii=False, indent=0) + "\n")
    (target / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    compare(target)


def compare(target):
    """Our encoder against the `tokenizers` library, both ways, on rendered text and on text unlike it."""
    from tokenizers import Tokenizer

    library, ours = Tokenizer.from_file(str(target / "tokenizer.json")), Encoder()
    texts = ["Grüße, 12 → x\n\n  tabs\tand 😊", "<|turn>user\nHi<turn|>"] + [render.sample_text(seed) for seed in range(40)]
    for text in texts:
        ids = library.encode(text, add_special_tokens=False).ids
        assert ids == ours(text), text[:80]
        assert library.decode(ids, skip_special_tokens=False) == text, text[:80]
    head = len(ours(render.head_text(task.GOALS[0], False)))
    print(f"vocabulary {library.get_vocab_size()}, head {head} tokens, checked {len(texts)} texts", file=sys.stderr)


if __name__ == "__main__":
    main()
